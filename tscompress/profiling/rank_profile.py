"""The rank profile: records, findings in words, and its file.

Figures and equations are those of "Understanding Transformers for Time Series: Rank Structure,
Flow-of-ranks, and Compressibility", called the paper below.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tscompress.families.registry import FORECAST_FAMILIES
from tscompress.io.files import user_path, write_text_atomically
from tscompress.io.results import Result
from tscompress.io.strict import Strict
from tscompress.io.text import percent, rounded_count
from tscompress.linalg import epsilon_rank
from tscompress.profiling.heads import HeadAngles, sharing_findings, sharing_index
from tscompress.profiling.untrained import looks_untrained, untrained_finding

PROFILE_FILE, RANKS_FILE = "profile.json", "ranks.csv"

Part = Literal["attention", "feed_forward"]


class Spectrum(Strict):
    """Singular values of one matrix.

    Attributes
    ----------
    full_rank
        The largest rank that the matrix can have.
    largest
        sigma_1.
    relative
        sigma_j / sigma_1 in descending order, to four significant digits.
    ranks
        ε-ranks (paper eq. 1), in the order of :attr:`RankProfile.epsilons`; computed before
        rounding.
    """

    full_rank: int
    largest: float
    relative: tuple[float, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, sigma: Tensor, epsilons: Sequence[float]) -> Spectrum:
        """From singular values ``sigma`` ``[k]`` in descending order."""
        largest = float(sigma[0]) if len(sigma) else 0.0
        relative = sigma / largest if largest > 0 else sigma
        return cls(
            full_rank=len(sigma),
            largest=rounded(largest),
            relative=tuple(map(rounded, relative.tolist())),
            ranks=tuple(epsilon_rank(sigma, epsilon) for epsilon in epsilons),
        )

    def relative_ranks(self) -> list[float]:
        """ε-ranks as shares of the full rank, in [0, 1]."""
        return [rank / max(1, self.full_rank) for rank in self.ranks]


class EmbeddingGroup(Strict):
    """Embedded vectors of one kind of input.

    Attributes
    ----------
    name
        ``tokens``, ``all signals``, or the signal that the patches were cut from.
    order
        What the rows are ordered by.
    rows, rows_total
        Vectors that were decomposed, and how many there are.
    coordinates
        Projections ``[N, 2]`` of an even sub-sample of the rows onto two leading right singular
        vectors: of the token table, or of all signals together (paper Fig. 2b, c).
    angles
        Angles in radians ``[n, n]`` between an even sub-sample of the rows (paper eq. 2).
    """

    name: str
    order: str
    rows: int
    rows_total: int
    spectrum: Spectrum
    coordinates: tuple[tuple[float, float], ...] = ()
    angles: tuple[tuple[float, ...], ...] = ()


class WeightProfile(Strict):
    """One projection, and its heads if it belongs to an attention block.

    Attributes
    ----------
    kind, depth
        Of the attention block; a feed-forward has those of the attention block right before it.
    parameters
        As stored: fewer than ``out_features * in_features`` if the layer is two factors already.
    heads
        Spectra of the row slices ``[d_kv, d_model]`` of q, k, v and of the column slices of o.
    """

    part: Part
    kind: str
    depth: int
    role: str
    name: str
    out_features: int
    in_features: int
    parameters: int
    spectrum: Spectrum
    heads: tuple[Spectrum, ...] = ()


class InputProfile(Strict):
    """Ranks of one layer's inputs on the calibration series.

    Attributes
    ----------
    part
        ``encoder_output`` is what every cross-attention reads for its keys and values.
    positions
        Valid positions that the spectrum was taken over; the rank cannot exceed them.
    """

    part: Literal["attention", "feed_forward", "encoder_output"]
    kind: str
    depth: int
    name: str
    positions: int
    spectrum: Spectrum


class Saving(Strict):
    """What truncated SVD at one ε leaves of one part of the model (paper sec. 5).

    Attributes
    ----------
    factored
        How many of the ``projections`` become two factors; the others stay as they are, because
        two factors of their ε-rank would not be smaller.
    parameter_ratio
        After / before, of this part.
    model_parameter_ratio
        After / before, of the whole model if nothing else changes.
    bytes_saved
        In the dtype of the checkpoint.
    macs_saved
        Multiply-accumulates per position that passes through every projection once.
    """

    part: Part
    epsilon: float
    projections: int
    factored: int
    parameters_before: int
    parameters_after: int
    parameter_ratio: float
    model_parameter_ratio: float
    bytes_saved: int
    macs_saved: int


class PowerLawFit(Strict):
    """Least-squares d_0 (1 + depth)^alpha of the mean ε-rank of a head (paper sec. 5)."""

    epsilon: float
    d_0: float
    alpha: float


class RankProfile(Result):
    """Ranks and spectra of one model.

    Attributes
    ----------
    epsilons
        In descending order.
    weight_floor
        Relative singular values of weights below this can be rounding, of the stored dtype or
        of the computation.
    input_floor
        The same for layer inputs, rounded to the dtype that the model ran in.
    inputs
        Empty if the model was not run, for ``inputs_reason``.
    head_angles
        Of W_Q of the first block; None with one head, and in files of before.
    compressed
        Whether the model has layers of tscompress, which ``compress`` refuses.
    """

    kind: ClassVar[str] = "a rank profile"
    command: ClassVar[str] = "tscompress profile --output"
    limit: ClassVar[int | None] = 2**28

    version: Literal[1] = 1
    model: str
    family: str
    dtype: str
    parameters: int
    epsilons: tuple[float, ...]
    weight_floor: float
    input_floor: float
    corpus: str | None
    inputs_reason: str | None
    embedding: tuple[EmbeddingGroup, ...]
    weights: tuple[WeightProfile, ...]
    inputs: tuple[InputProfile, ...]
    savings: tuple[Saving, ...]
    power_laws: tuple[PowerLawFit, ...]
    head_angles: HeadAngles | None = None
    compressed: bool = False

    def __repr__(self) -> str:
        epsilon = self.epsilons[self.middle]
        savings = [
            f"attention {percent(saving.parameter_ratio, 0)} at ε = {epsilon:g}"
            for saving in self.savings
            if saving.part == "attention" and saving.epsilon == epsilon
        ]
        size = f"{rounded_count(self.parameters)} parameters"
        facts = [repr(self.model), self.family, size, *savings]
        inputs = [] if self.inputs else ["weights only"]
        return f"RankProfile({', '.join([*facts, *inputs])})"

    def __str__(self) -> str:
        return repr(self)

    @property
    def middle(self) -> int:
        """Index of the ε that sentences and single-ε figures are about."""
        return len(self.epsilons) // 2

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; :meth:`model_validate` reads it back."""
        return self.model_dump(mode="json")

    def save(self, directory: str | Path) -> list[Path]:
        """Write ``profile.json`` and ``ranks.csv`` (a row per matrix and ε); returns the paths."""
        target = user_path(directory)
        written = {
            target / PROFILE_FILE: json.dumps(self.to_dict()) + "\n",
            target / RANKS_FILE: _ranks_csv(self),
        }
        for path, text in written.items():
            write_text_atomically(path, text)
        return list(written)

    def findings(self) -> list[str]:
        """Findings as sentences."""
        return [
            *_embedding_findings(self),
            *_saving_findings(self),
            *_weight_findings(self),
            *_head_findings(self),
            *_untrained_findings(self),
            *_input_findings(self),
            *_folding_findings(self),
            *_rounding_findings(self),
            _cost_finding(self),
        ]


# --------------------------------------------------------------------------------------------------
# In words
# --------------------------------------------------------------------------------------------------


def _embedding_findings(profile: RankProfile) -> list[str]:
    group = profile.embedding[0]
    spectrum, at = group.spectrum, profile.middle
    tables = {"tokens": "token embeddings", "pixels": "embedded pixels"}
    what = tables.get(group.name, "embedded patches")
    sampled = f" (an even sample of {group.rows_total})" if group.rows < group.rows_total else ""
    return [
        f"The {group.rows} {what}{sampled} have ε-rank {spectrum.ranks[at]} of "
        f"{spectrum.full_rank} ({percent(spectrum.relative_ranks()[at], 0)}) at ε = "
        f"{profile.epsilons[at]:g}."
    ]


def _saving_findings(profile: RankProfile) -> list[str]:
    attention = [saving for saving in profile.savings if saving.part == "attention"]
    lines = [
        f"At ε = {saving.epsilon:g} truncated SVD makes {saving.factored} of {saving.projections} "
        f"projections smaller and leaves {percent(saving.parameter_ratio, 1)} of the attention "
        f"parameters: {saving.bytes_saved / 1e6:.3g} MB and {saving.macs_saved / 1e6:.3g} M "
        "multiply-accumulates per position less."
        for saving in attention
        if saving.factored
    ]
    futile = [f"{saving.epsilon:g}" for saving in attention if not saving.factored]
    if futile:
        lines.append(
            f"At ε = {', '.join(futile)} truncated SVD makes no attention projection smaller: "
            "nothing can be saved."
        )
    return lines


def _weight_findings(profile: RankProfile) -> list[str]:
    at = profile.middle
    epsilon = f"ε = {profile.epsilons[at]:g}"
    shares = {
        part: fmean(w.spectrum.relative_ranks()[at] for w in profile.weights if w.part == part)
        for part in dict.fromkeys(weight.part for weight in profile.weights)
    }
    lines = []
    if len(shares) == 2:
        lines.append(
            f"At {epsilon} attention projections have {percent(shares['attention'], 0)} of full "
            f"rank on average, feed-forward ones {percent(shares['feed_forward'], 0)}."
        )
    heads = [head for weight in profile.weights for head in weight.heads]
    if heads:
        share = fmean(head.relative_ranks()[at] for head in heads)
        lines.append(
            f"At {epsilon} a head's projection has rank {fmean(h.ranks[at] for h in heads):.3g} "
            f"on average, {percent(share, 0)} of full rank."
        )
    depths = {weight.depth for weight in profile.weights if weight.heads}
    if profile.power_laws and len(depths) > 1:
        fit = profile.power_laws[at]
        lines.append(
            f"Over all attention blocks at {epsilon} the rank of a head {_trend(fit.alpha)} with "
            f"depth i: the fit is {fit.d_0:.3g} (1 + i)^{fit.alpha:.2f}."
        )
    return lines


def _head_findings(profile: RankProfile) -> list[str]:
    """At the largest ε: at smaller ones heads often have full rank."""
    queries = [weight for weight in profile.weights if weight.role == "q" and weight.heads]
    indices = [
        sharing_index(weight.spectrum.ranks[0], [head.ranks[0] for head in weight.heads])
        for weight in queries
    ]
    shares = [head.relative_ranks()[0] for weight in queries for head in weight.heads]
    heads = max((len(weight.heads) for weight in queries), default=1)
    share = fmean(shares) if shares else 1.0
    return sharing_findings(indices, heads, share, profile.epsilons[0], profile.head_angles)


def _untrained_findings(profile: RankProfile) -> list[str]:
    attention = [weight for weight in profile.weights if weight.part == "attention"]
    fresh = [
        f"{weight.kind} {weight.depth} {weight.role}"
        for weight in attention
        if looks_untrained(
            torch.tensor(weight.spectrum.relative), (weight.out_features, weight.in_features)
        )
    ]
    return [untrained_finding(fresh, len(attention))] if fresh else []


def _trend(alpha: float) -> str:
    if abs(alpha) < 0.005:  # prints as 0.00
        return "does not change"
    return "rises" if alpha > 0 else "falls"


def _input_findings(profile: RankProfile) -> list[str]:
    if not profile.inputs:
        return [f"There is no flow of ranks: {profile.inputs_reason}."]
    at = profile.middle
    lines = []
    first_kind = profile.inputs[0].kind
    stack = [i for i in profile.inputs if i.part == "attention" and i.kind == first_kind]
    if len(stack) > 1:
        first, last = stack[0], stack[-1]
        lines.append(
            f"The inputs of {first_kind} attention go from ε-rank {first.spectrum.ranks[at]} at "
            f"depth {first.depth} to {last.spectrum.ranks[at]} at depth {last.depth}, of "
            f"{last.spectrum.full_rank}, at ε = {profile.epsilons[at]:g}."
        )
    widths = {weight.name: weight.in_features for weight in profile.weights}
    scarce = [i for i in profile.inputs if i.positions < widths[i.name]]
    if scarce:
        fewest = min(scarce, key=lambda i: i.positions)
        lines.append(
            f"{len(scarce)} of {len(profile.inputs)} layer inputs were seen at fewer positions "
            f"than they are wide ({fewest.name}: {fewest.positions} of {widths[fewest.name]}), "
            "which bounds their rank; use more series."
        )
    return lines


def _folding_findings(profile: RankProfile) -> list[str]:
    """What folding could do with the ranks, as options of ``compress``."""
    if profile.family not in FORECAST_FAMILIES:
        return []
    if profile.compressed:
        return ["The model is compressed already: other sizes are folded from its original."]
    at = profile.middle
    epsilon = f"ε = {profile.epsilons[at]:g}"
    lines = []
    heads = [head for weight in profile.weights for head in weight.heads]
    if heads:
        full = max(head.full_rank for head in heads)
        # Rotary positions turn pairs of dimensions.
        size = 2 * math.ceil(fmean(head.ranks[at] for head in heads) / 2)
        lines.append(
            f"Folding could make heads of {full} as small as their mean ε-rank, {size} (--rank "
            f"{size}), or smaller where ranks are (--fit {profile.epsilons[at]:g})."
            if size < full
            else f"At {epsilon} heads are of full rank: folding to smaller ones (--rank) would cut "
            "into what they use."
        )
    if profile.inputs:
        full = max(entry.spectrum.full_rank for entry in profile.inputs)
        most = max(entry.spectrum.ranks[at] for entry in profile.inputs)
        could = f"it could be sliced to about these (--width {most})"
        none = "that is all: a smaller --width would cut into it"
        lines.append(
            f"At {epsilon} the layers read up to {most} of the {full} dimensions of the residual "
            f"stream: {could if most < full else none}."
        )
    lines.append(
        "Ranks do not show how many feed-forward units folding could leave out (--ff-ratio)."
    )
    return lines


def _cost_finding(profile: RankProfile) -> str:
    said = "Ranks show what is kept, not what a cut costs"
    if profile.compressed or profile.family not in FORECAST_FAMILIES:
        return f"{said}."
    return (
        f"{said}: tscompress sensitivity measures that for each part, tscompress evaluate for the "
        "whole."
    )


def _rounding_findings(profile: RankProfile) -> list[str]:
    lines = []
    for what, floor in (("weights", profile.weight_floor), ("inputs", profile.input_floor)):
        below = [f"{epsilon:g}" for epsilon in profile.epsilons if epsilon < floor]
        if below and (what == "weights" or profile.inputs):
            lines.append(
                f"Relative singular values of the {what} below {floor:.2g} can be rounding; "
                f"ranks at ε = {', '.join(below)} may count it."
            )
    return lines


def _ranks_csv(profile: RankProfile) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["matrix", "part", "kind", "depth", "role", "head", "full_rank", "epsilon", "rank"]
    )
    for labels, spectrum in _labelled_spectra(profile):
        for epsilon, rank in zip(profile.epsilons, spectrum.ranks, strict=True):
            writer.writerow([*labels, spectrum.full_rank, f"{epsilon:g}", rank])
    return stream.getvalue()


def _labelled_spectra(profile: RankProfile) -> Iterator[tuple[tuple[object, ...], Spectrum]]:
    """``(matrix, part, kind, depth, role, head)`` and the spectrum of everything in a profile."""
    for group in profile.embedding:
        yield (group.name, "embedding", "", "", "", ""), group.spectrum
    for weight in profile.weights:
        labels = (weight.name, weight.part, weight.kind, weight.depth, weight.role)
        yield (*labels, ""), weight.spectrum
        for head, spectrum in enumerate(weight.heads):
            yield (*labels, head), spectrum
    for entry in profile.inputs:
        yield (
            (entry.name, f"input of {entry.part}", entry.kind, entry.depth, "", ""),
            entry.spectrum,
        )


def rounded(value: float) -> float:
    """Four significant digits, the precision of a saved profile."""
    return float(f"{value:.4g}")
