"""Rank watch: spectra of the attention matrices while a model trains (Yu et al., 2025, App. G.2).

Small initial weights have nearly full rank. Training makes a few singular values grow by orders of
magnitude, so that ranks fall to what the data need, and then rise slowly.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from tscompress.errors import UsageError
from tscompress.io.files import check_file, write_text_atomically
from tscompress.io.own_outputs import RANKS_LOG
from tscompress.io.text import percent
from tscompress.linalg import epsilon_rank, stable_rank
from tscompress.plan.architecture import Architecture
from tscompress.profiling.measure import head_slices, weight_matrix
from tscompress.profiling.rank_profile import rounded
from tscompress.profiling.untrained import EPSILON, looks_untrained, untrained_finding

EPSILONS = (0.3, 0.1, 0.03, 0.01)
#: Watched steps per factor of ten.
PER_DECADE = 6
#: Largest change of the mean rank since half of the steps that counts as settled.
SETTLED = 0.1

Row = Mapping[str, Any]


def is_watched(step: int) -> bool:
    """Whether ``step`` is one of 0, 1, 2, 3, 5, 7, 10, 15, 22, 32, 46, 68, 100, ..."""
    if step < 1:
        return step == 0
    nearest = round(PER_DECADE * math.log10(step))
    return round(10 ** (nearest / PER_DECADE)) == step


class RankWatch:
    """Rows of ``ranks.jsonl``: a step and an attention matrix each.

    A row has ``sigma_1``, the ``stable_rank`` |W|_F^2 / sigma_1^2 and ``ranks``, the ε-ranks at
    0.3, 0.1, 0.03 and 0.01, and lists of the same for its heads: rows of q, k and v, columns of o.
    They depend on the weights alone, so that a resumed training writes the same.

    Parameters
    ----------
    architecture
        Of the model that is watched.
    directory
        Where the training writes its log; None: rows stay in memory.

    Raises
    ------
    UsageError
        The model has no attention.
    """

    def __init__(self, architecture: Architecture, directory: Path | None) -> None:
        self._matrices = list(architecture.attention_projections())
        if not self._matrices:
            raise UsageError(
                f"this {architecture.family} model has no attention whose ranks could be watched; "
                "leave out watch_ranks (--watch-ranks)."
            )
        self._path = None if directory is None else directory / RANKS_LOG
        self.rows: list[Row] = []

    def start(self, step: int = 0) -> None:
        """Forget the rows after ``step``, in the file too: a killed run may have left some.

        Raises
        ------
        OutputExistsError
            The file is not one of a rank watch.
        """
        if self._path is None:
            self.rows = []
            return
        check_file(self._path, force=True)
        written = read_ranks(self._path) if step else []
        self.rows = [row for row in written if row["step"] <= step]
        if self._path.exists() and len(self.rows) < len(written):
            write_text_atomically(self._path, ranks_text(self.rows))

    def look(self, model: nn.Module, step: int, *, last: bool = False) -> None:
        """Write the rows of ``step`` if it is a watched one or the ``last``, and not there yet."""
        if not (last or is_watched(step)) or (self.rows and self.rows[-1]["step"] >= step):
            return
        self.rows += self._rows_of(model, step)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self._path, ranks_text(self.rows))

    def _rows_of(self, model: nn.Module, step: int) -> list[Row]:
        weights = [weight_matrix(model.get_submodule(name)) for _, _, name in self._matrices]
        heads = [
            head_slices(W, role, block.num_heads)
            for W, (block, role, _) in zip(weights, self._matrices, strict=True)
        ]
        whole = _spectra([W[None] for W in weights])
        by_head = _spectra(heads)
        return [
            {
                "step": step,
                "name": name,
                "kind": block.kind,
                "depth": block.depth,
                "role": role,
                "shape": list(W.shape),
                **{key: values[0] for key, values in _numbers(sigma).items()},
                "untrained": looks_untrained(sigma[0], (W.shape[0], W.shape[1])),
                "heads": _numbers(parts),
            }
            for (block, role, name), W, sigma, parts in zip(
                self._matrices, weights, whole, by_head, strict=True
            )
        ]


def _spectra(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Singular values ``[H, k]`` of each stack of matrices ``[H, m, n]``, in descending order.

    Stacks of one shape are decomposed together, through the smaller Gram matrix.
    """
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for index, stack in enumerate(stacks):
        alike[stack.shape].append(index)
    found: dict[int, Tensor] = {}
    for indices in alike.values():
        W = torch.stack([stacks[index] for index in indices])
        gram = W @ W.mT if W.shape[-2] <= W.shape[-1] else W.mT @ W
        sigma = torch.linalg.eigvalsh(gram).clamp_min(0).flip(-1).sqrt()
        found |= dict(zip(indices, sigma, strict=True))
    return [found[index] for index in range(len(stacks))]


def _numbers(spectra: Tensor) -> dict[str, list[Any]]:
    """What a row has of each of the spectra ``[H, k]``."""
    return {
        "sigma_1": [rounded(float(sigma[0])) for sigma in spectra],
        "stable_rank": [rounded(stable_rank(sigma)) for sigma in spectra],
        "ranks": [[epsilon_rank(sigma, epsilon) for epsilon in EPSILONS] for sigma in spectra],
    }


def ranks_text(rows: Sequence[Row]) -> str:
    """The content of a ``ranks.jsonl``."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_ranks(path: Path) -> list[Row]:
    """The rows of a ``ranks.jsonl``; of no file, none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def watch_findings(rows: Sequence[Row]) -> list[str]:
    """What the rows of a rank watch show, as sentences; of no rows, none."""
    if not rows:
        return []
    at = EPSILONS.index(EPSILON)
    means = {
        step: fmean(row["ranks"][at] for row in rows if row["step"] == step)
        for step in dict.fromkeys(row["step"] for row in rows)
    }
    first, last = next(iter(means)), rows[-1]["step"]
    lowest = min(means, key=means.__getitem__)
    lines = [
        f"Attention matrices have a mean ε-rank of {means[last]:.3g} at step {last} and ε = "
        f"{EPSILON:g}; it was {means[first]:.3g} at step {first}, and lowest at step {lowest}: "
        f"{means[lowest]:.3g}."
    ]
    final = [row for row in rows if row["step"] == last]
    untrained = [f"{row['kind']} {row['depth']} {row['role']}" for row in final if row["untrained"]]
    if untrained:
        lines.append(untrained_finding(untrained, len(final)))
    half = max((step for step in means if step <= last / 2), default=last)
    if half < last:
        change = means[last] / max(means[half], 1) - 1
        verdict = _verdict(change, len(untrained) / len(final))
        lines.append(f"It changed by {percent(change, 0)} since step {half}: {verdict}")
    return lines


def _verdict(change: float, untrained: float) -> str:
    """Whether ranks tell what a cut costs, from their change and the share that looks untrained."""
    if untrained >= 0.5:
        return "they are those of initial weights; train longer before judging what a cut costs."
    if abs(change) > SETTLED:
        return "they still move; train longer before judging what a cut costs."
    return "they have settled, and cuts show what they cost."
