"""The recipe of a pretraining: everything that determines the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tscompress.data.evaluation_sets import QUANTILE_LEVELS
from tscompress.data.multivariate import GroupsConfig
from tscompress.data.synthetic import CorpusConfig
from tscompress.errors import RecipeError
from tscompress.families.registry import adapter_of
from tscompress.io.strict import Strict
from tscompress.plan.schedules import PowerLawSchedule
from tscompress.training.loop import Precision
from tscompress.training.optimizers import OptimizerName
from tscompress.training.windows import Bucket

PRETRAIN_FILE = "pretrain.yaml"


class Stage(Strict):
    """Steps during which batches come from the same buckets."""

    steps: int = Field(ge=1)
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    label_smoothing_bins: float = Field(
        default=0.0, ge=0, description="T5: std of the target, in bins"
    )
    corpus: CorpusConfig | None = Field(default=None, description="instead of the recipe's")
    shorten_probability: float = Field(
        default=0.5, ge=0, le=1, description="share of contexts that are cut short"
    )
    groups: GroupsConfig | None = Field(
        default=None, description="Chronos-2: series that depend on others; null: none does"
    )
    horizon_multiple: int | None = Field(
        default=None, ge=1, description="horizons are drawn: multiples of it; null: the bucket's"
    )

    @model_validator(mode="after")
    def _horizons_can_be_drawn(self) -> Stage:
        shortest = min(bucket.horizon for bucket in self.buckets)
        if self.horizon_multiple is not None and self.horizon_multiple > shortest:
            raise ValueError(
                f"horizon_multiple is {self.horizon_multiple}, a bucket's horizon {shortest}; "
                "give no more than that"
            )
        return self


class Architecture(Strict):
    """Shape of the stacks."""

    d_model: int = Field(ge=1)
    d_kv: int = Field(ge=1, description="of every head; with a schedule, the most that one gets")
    d_ff: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_decoder_layers: int = Field(default=0, ge=0, description="0 for Chronos-2")
    num_heads: int = Field(ge=1)
    context_length: int = Field(ge=1)
    prediction_length: int = Field(default=64, ge=1)
    vocab_size: int = Field(default=4096, ge=16, description="T5 only")
    patch_size: int = Field(default=16, ge=1, description="Bolt and Chronos-2")
    quantiles: tuple[float, ...] = Field(
        default=tuple(QUANTILE_LEVELS),
        min_length=1,
        description="Bolt and Chronos-2: levels, rising",
    )
    top_k: int = Field(default=50, ge=1, description="T5 only: tokens kept when sampling")

    @field_validator("quantiles")
    @classmethod
    def _levels_rise(cls, levels: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < a < b < 1 for a, b in zip(levels, (*levels[1:], 1 - 1e-9), strict=True)):
            raise ValueError(f"levels rise, above 0 and below 1; got {list(levels)}")
        return levels


class PretrainRecipe(Strict):
    """Everything that determines a pretrained checkpoint."""

    family: Literal["chronos-bolt", "chronos-t5", "chronos-2"]
    name: str
    architecture: Architecture
    schedule: PowerLawSchedule | None = Field(
        default=None, description="head size by depth; null: d_kv everywhere"
    )
    corpus: CorpusConfig = CorpusConfig()
    real_series: tuple[str, ...] = Field(
        default=(),
        description="collections from tscompress.data.training_collections.training_series",
    )
    stages: tuple[Stage, ...] = Field(min_length=1)
    optimizer: OptimizerName = Field(
        default="adamw", description="muon: AdamW but for matrices within layers"
    )
    learning_rate: float = Field(default=1e-3, gt=0)
    position_bias_rate: float = Field(
        default=1.0, gt=0, description="learning rate of relative position biases, as a factor"
    )
    warmup_steps: int = Field(default=200, ge=0)
    decay_fraction: float = Field(default=0.25, gt=0, le=1, description="last share of the steps")
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    missing_probability: float = Field(default=0.1, ge=0, le=1)
    initializer_factor: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="scale of fresh weights; null: 1 for T5, 0.05 for Bolt and Chronos-2",
    )
    token_embedding: Literal["fourier", "normal", "chebyshev"] = Field(
        default="fourier", description="T5: initial token table, but for embedding_from"
    )
    embedding_rank: int | None = Field(
        default=None, ge=1, description="of a chebyshev table, which stays as it is"
    )
    tie_embedding: bool = Field(
        default=True, description="T5: the output head is the token table; false: its own"
    )
    embedding_from: str | None = Field(
        default=None, description="model whose embedding to start from; null: from scratch"
    )
    start_from: str | None = Field(
        default=None,
        description="trained model of the same or a smaller shape, which is grown; null: scratch",
    )
    keep_of_start: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of start_from's weights in the mean that is written",
    )
    freeze_embedding: bool = Field(default=False, description="leave the embedding as it starts")
    precision: Precision | None = Field(
        default=None, description="null: bf16 where the hardware multiplies in it"
    )
    seed: int = Field(default=0, ge=0, lt=2**63)
    checkpoint_minutes: float = Field(default=5.0, gt=0)
    watch_ranks: bool = Field(
        default=False, description="write ranks of the attention matrices into ranks.jsonl"
    )
    snapshots: tuple[float, ...] = Field(
        default=(), description="shares of the steps after which the model is kept in a directory"
    )

    @model_validator(mode="after")
    def _forecasts_what_it_can(self) -> PretrainRecipe:
        longest = max(bucket.horizon for stage in self.stages for bucket in stage.buckets)
        if longest > self.architecture.prediction_length:
            raise ValueError(
                f"a bucket's horizon is {longest}, prediction_length of the architecture "
                f"{self.architecture.prediction_length}; ask for no more than that"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_read(self) -> PretrainRecipe:
        grouped = any(stage.groups is not None for stage in self.stages)
        if grouped and adapter_of(self.family).group_size == 1:
            raise ValueError(
                f"a stage has groups, and {self.family} reads each series alone; leave them out"
            )
        return self

    @model_validator(mode="after")
    def _starts_once(self) -> PretrainRecipe:
        if self.start_from is not None:
            for name in ("embedding_from", "schedule"):
                if getattr(self, name) is not None:
                    raise ValueError(f"start_from and {name} exclude each other; leave one out")
        elif self.keep_of_start:
            raise ValueError("keep_of_start is a share of start_from's weights; give that, too")
        return self

    @model_validator(mode="after")
    def _head_and_table_fit(self) -> PretrainRecipe:
        problem = next(_table_problems(self), None)
        if problem is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _snapshots_lie_within(self) -> PretrainRecipe:
        if not all(0 < share < 1 for share in self.snapshots):
            raise ValueError("snapshots are shares of the steps, above 0 and below 1")
        return self

    @property
    def snapshot_steps(self) -> frozenset[int]:
        """Steps after which the model is kept."""
        return frozenset(max(1, round(share * self.total_steps)) for share in self.snapshots)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> int:
        """Index of the stage that step ``step`` (from 0) belongs to.

        Raises
        ------
        RecipeError
            The step is past the end.
        """
        end = 0
        for index, stage in enumerate(self.stages):
            end += stage.steps
            if step < end:
                return index
        raise RecipeError(f"step {step} is past the end of the recipe's {self.total_steps} steps.")

    def learning_rate_at(self, step: int) -> float:
        """Warm-up, constant, then linear decay to 0 over the last ``decay_fraction``."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        decay_steps = max(1, math.ceil(self.decay_fraction * self.total_steps))
        decay = min(1.0, (self.total_steps - step) / decay_steps)
        return self.learning_rate * min(warmup, decay)


def _table_problems(recipe: PretrainRecipe) -> Iterator[str]:
    """What does not fit together in the token table and the output head, a clause each."""
    chebyshev, rank = recipe.token_embedding == "chebyshev", recipe.embedding_rank
    if not adapter_of(recipe.family).draws_samples:
        if not recipe.tie_embedding:
            yield f"tie_embedding: {recipe.family} has no token table to untie; leave it out"
        if recipe.token_embedding != "fourier":
            yield (
                f"token_embedding is {recipe.token_embedding}, and {recipe.family} reads no "
                "tokens; leave it out"
            )
        if any(stage.label_smoothing_bins for stage in recipe.stages):
            yield f"label_smoothing_bins: {recipe.family} has no bins to smooth; leave it out"
    if recipe.start_from is not None and not recipe.tie_embedding:
        yield "start_from and tie_embedding: false exclude each other; leave one out"
    if chebyshev != (rank is not None):
        yield "token_embedding: chebyshev and embedding_rank go together; give both or neither"
    if not chebyshev or rank is None:
        return
    for name in ("embedding_from", "start_from"):
        if getattr(recipe, name) is not None:
            yield f"{name} would replace the chebyshev table; leave one out"
    if recipe.tie_embedding or not recipe.freeze_embedding:
        yield (
            "token_embedding: chebyshev needs freeze_embedding: true, or its rank would not stay, "
            "and tie_embedding: false, or it would bound the rank of the logits"
        )
    most = min(recipe.architecture.d_model, recipe.architecture.vocab_size - 3)
    if rank > most:
        yield f"embedding_rank is {rank}; give at most {most}, of d_model and the bins"
