"""Cut the attention of a learner to every size, recover it, and keep what was measured."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.activations import collect_moments
from tscompress.compression.factor import apply_plan_, make_plan
from tscompress.compression.fold import fold_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.streams import entering_streams, layers_alone
from tscompress.data.batch import StreamBatch
from tscompress.io.files import write_text_atomically
from tscompress.lab.in_context import Array
from tscompress.plan.layer_plans import ProjectionPlan
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import RankSchedule
from tscompress.training.in_context import BatchLoss, InContextTraining, train_in_context

METHODS = ("svd", "activation-svd", "fold")
#: The original, which is given the same recovery.
UNCUT = "uncut"
Measures = Mapping[str, float]

# --------------------------------------------------------------------------------------------------
# One cut
# --------------------------------------------------------------------------------------------------


def rank_within(projection: ProjectionPlan, share: float) -> int:
    """The largest rank whose two factors have at most this share of the weights, at least 1."""
    of_rank_one = projection.out_features + projection.in_features
    return max(1, int(share * projection.dense_parameters / of_rank_one + 1e-9))


def cut_(learner: nn.Module, method: str, size: int, streams: list[StreamBatch]) -> Plan:
    """Cut all attention of ``learner.encoder`` in place, as heads of ``size`` or as cheap as those.

    Heads that are no larger keep their size.

    Parameters
    ----------
    method
        One of :data:`METHODS`. ``fold`` makes heads of ``size``. The others factor q, k, v and o at
        the ranks that have no more weights than such heads.
    streams
        What enters the layers, see :func:`~tscompress.compression.streams.entering_streams`.
    """
    loaded = layers_alone(learner.encoder, method)  # type: ignore[arg-type]
    if method == "fold":
        plan = smaller_heads(loaded, size)
        fold_(loaded, plan, streams, FoldConfig())
        return plan
    names = [name for _, _, name in loaded.architecture.attention_projections()]
    moments = None if method == "svd" else collect_moments(loaded, streams, names)
    plan = factors_as_cheap(loaded, method, size, moments)
    apply_plan_(loaded, plan, moments)
    return plan


def smaller_heads(loaded: LoadedModel, size: int) -> Plan:
    """A plan to fold every head to ``size``."""
    whole = fold_plan(loaded.model, loaded.architecture)
    sizes = {head.name: min(size, head.head_size) for head in whole.heads}
    return fold_plan(loaded.model, loaded.architecture, qk=sizes, vo=sizes)


def factors_as_cheap(loaded: LoadedModel, method: Any, size: int, moments: Any) -> Plan:
    """A plan to factor every projection within the weights that heads of ``size`` have."""
    shares = {}
    for block in loaded.architecture.attention:
        head_size = loaded.model.get_submodule(block.name).head_size  # type: ignore[union-attr]
        for name in block.projections.values():
            shares[name] = min(size, head_size) / head_size
    plan = make_plan(
        loaded.model, loaded.architecture, method, RankSchedule(rank=1), moments=moments
    )
    cut = tuple(
        one.model_copy(
            update={"rank": rank_within(one, shares[one.name]) if shares[one.name] < 1 else None}
        )
        for one in plan.projections
    )
    return plan.model_copy(update={"projections": cut})


def attention_weights(learner: nn.Module) -> int:
    """Weights of all attention of the encoder."""
    parts: Any = learner.encoder.block  # type: ignore[union-attr]
    return sum(
        weight.numel()
        for block in parts
        for name, weight in block.named_parameters()
        if ".attention." in name
    )


# --------------------------------------------------------------------------------------------------
# Every cut of a learner
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A trained learner and what is done to it.

    Attributes
    ----------
    name
        For tables and figures.
    learner
        With an ``encoder``; its weights are left alone.
    head_size
        Of its largest heads.
    calibrate
        Runs a learner on calibration prompts.
    measure, skill
        What is measured of a learner, and its skill alone.
    average
        Forecasts ``[K, Q]`` of queries after contexts, see :func:`average_forecast_error`.
    loss
        The training loss of a learner, for its recovery; None: it is not recovered.
    setup
        What else decides the results, as text.
    sizes, recovered
        Sizes to cut to, and those that are recovered; None: every size below ``head_size``.
    """

    name: str
    learner: nn.Module
    head_size: int
    calibrate: Callable[[Any], object]
    measure: Callable[[Any], Measures]
    skill: Callable[[Any], float]
    average: Callable[[Any], Array]
    loss: Callable[[Any], BatchLoss] | None
    setup: str
    sizes: tuple[int, ...] | None = None
    recovered: tuple[int, ...] | None = None

    def streams(self) -> list[StreamBatch]:
        """What enters its layers on calibration prompts."""
        with entering_streams(self.learner.encoder) as seen:  # type: ignore[arg-type]
            self.calibrate(self.learner)
        return seen

    def cuts(self) -> Iterator[tuple[str, int]]:
        """Method and size of every cut, the largest first; the original is the first."""
        yield UNCUT, self.head_size
        for size in range(self.head_size - 1, 0, -1):
            if self.sizes is None or size in self.sizes:
                yield from ((method, size) for method in METHODS)

    def recovers(self, method: str, size: int) -> bool:
        """Whether a cut is recovered."""
        wanted = self.recovered is None or method == UNCUT or size in self.recovered
        return self.loss is not None and wanted


def measured_cuts(
    subject: Subject, recovery: InContextTraining, directory: Path, logged: Callable[[], None]
) -> pd.DataFrame:
    """A row a cut and one after its recovery, kept in ``directory`` once measured.

    Rows have ``model``, ``method``, ``size``, ``share`` of the attention's weights,
    ``recovered``, what the subject measures, and ``average`` of cuts alone: the error of the
    average forecast of a query.
    """
    streams: list[StreamBatch] = []
    rows: list[dict[str, Any]] = []
    asked = f"{subject.setup} {digest_of(subject.learner)} {recovery.model_dump_json()}"
    for method, size in subject.cuts():
        place = directory / subject.name.replace(", ", "-").replace(" ", "-")
        place = place / f"{method}-{size}.json"
        setup = f"{asked} {subject.recovers(method, size)}"
        kept = kept_rows(place, setup)
        if kept is None:
            streams = streams or subject.streams()
            kept = _measured(subject, method, size, streams, recovery)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(place, json.dumps({"setup": setup, "rows": kept}))
            logged()
        rows += [{"model": subject.name, "method": method, "size": size, **row} for row in kept]
    return pd.DataFrame(rows)


def digest_of(learner: nn.Module) -> str:
    """Of all weights: no cut of a learner that has gone on training since is taken for its own."""
    found = hashlib.sha256()
    for weight in learner.state_dict().values():
        found.update(weight.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def _measured(
    subject: Subject,
    method: str,
    size: int,
    streams: list[StreamBatch],
    recovery: InContextTraining,
) -> list[dict[str, Any]]:
    learner = copy.deepcopy(subject.learner)
    whole = attention_weights(learner)
    if method != UNCUT:
        cut_(learner, method, size, streams)
    share = attention_weights(learner) / whole
    average = average_forecast_error(subject.average(learner))
    rows = [{"share": share, "recovered": False, **subject.measure(learner), "average": average}]
    if subject.loss is not None and subject.recovers(method, size):
        learner.requires_grad_(True)
        with tempfile.TemporaryDirectory() as state:
            train_in_context(learner, subject.loss(learner), dict, recovery, Path(state))
        rows.append({"share": share, "recovered": True, **subject.measure(learner)})
    return rows


def kept_rows(place: Path, setup: str) -> list[dict[str, Any]] | None:
    """Rows of an earlier run in the same setup; None of another one, or of a damaged file."""
    try:
        found = json.loads(place.read_text())
        return list(found["rows"]) if found["setup"] == setup else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


# --------------------------------------------------------------------------------------------------
# The average forecast
# --------------------------------------------------------------------------------------------------


def average_forecast_error(forecasts: Array) -> float:
    """Mean square of the average forecast of a query over contexts, whose right value is 0.

    Parameters
    ----------
    forecasts
        ``[2 K, Q]``, of Q queries after K contexts and after the same with all outcomes negated,
        which are as likely. What K draws add to the square is taken off.
    """
    pairs = (forecasts[: len(forecasts) // 2] + forecasts[len(forecasts) // 2 :]) / 2
    noise = pairs.var(0, ddof=1) / len(pairs)
    return float((np.square(pairs.mean(0)) - noise).mean())
