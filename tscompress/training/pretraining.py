"""Pretraining of Chronos-Bolt and Chronos-T5 from scratch on the synthetic corpus.

The batch of step ``n`` depends only on the seed and ``n``, the optimizer state is saved with the
weights, and the learning rate is a function of the step: a run that was stopped continues to the
weights it would have had. Losses are the ones of the official training code (pinball on
instance-normalised targets for Bolt, cross-entropy on tokens for T5), with one addition for T5:
``label_smoothing_bins`` spreads a target token over its neighbours on the value axis.

With a ``schedule`` the model is compressed by design (paper sec. 5, Tables 3 and 4): each attention
block has a head size of its own from the first step on.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from chronos.chronos import ChronosConfig, ChronosTokenizer
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn
from transformers import PreTrainedModel, T5Config

from tscompress.checkpoints.format import unique_tensors, write_factored
from tscompress.checkpoints.load import load
from tscompress.checkpoints.names import CONFIG_FILE
from tscompress.checkpoints.provenance import write_provenance
from tscompress.compression.calibration import CalibrationBatch, run_teacher_forced
from tscompress.compression.fold_plans import PowerLawSchedule, fold_plan_of
from tscompress.data.series import training_series
from tscompress.data.synthetic import CorpusConfig, SyntheticCorpus
from tscompress.errors import DivergenceError, RecipeError, UsageError, VerificationError
from tscompress.families.registry import adapter_of, adapter_of_model
from tscompress.families.stacks import layer_matrices
from tscompress.io.files import new_directory, write_text_atomically
from tscompress.io.untrusted import shown
from tscompress.layers.resize import replace_heads_
from tscompress.plan.plan import Plan
from tscompress.training.growth import grow_
from tscompress.training.loop import (
    STATE_FILE,
    Bucket,
    StopRequest,
    TrainingState,
    attention_for_training,
    draw_bucket,
    load_training_state,
    read_training_record,
    save_training_state,
    split_windows,
)
from tscompress.training.optimizers import OptimizerName, make_optimizer

PRETRAIN_FILE = "pretrain.yaml"
_STRICT = ConfigDict(extra="forbid", frozen=True)
QUANTILE_LEVELS = tuple(round(0.1 * level, 1) for level in range(1, 10))
#: Of a recipe: what a run that goes on may change, besides the steps of the last stage.
_FREE_ON_RESUME = ("learning_rate", "checkpoint_minutes")


class Stage(BaseModel):
    """Steps during which batches come from the same buckets."""

    model_config = _STRICT

    steps: int = Field(ge=1)
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    label_smoothing_bins: float = Field(
        default=0.0, ge=0, description="T5: std of the target, in bins"
    )
    corpus: CorpusConfig | None = Field(default=None, description="instead of the recipe's")
    shorten_probability: float = Field(
        default=0.5, ge=0, le=1, description="share of contexts that are cut short"
    )


class Architecture(BaseModel):
    """Shape of the T5 stacks."""

    model_config = _STRICT

    d_model: int = Field(ge=1)
    d_kv: int = Field(ge=1, description="of every head; with a schedule, the most that one gets")
    d_ff: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_decoder_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    context_length: int = Field(ge=1)
    prediction_length: int = Field(default=64, ge=1)
    vocab_size: int = Field(default=4096, ge=16, description="T5 only")
    patch_size: int = Field(default=16, ge=1, description="Bolt only")
    top_k: int = Field(default=50, ge=1, description="T5 only: tokens kept when sampling")


class PretrainRecipe(BaseModel):
    """Everything that determines a pretrained checkpoint."""

    model_config = _STRICT

    family: Literal["chronos-bolt", "chronos-t5"]
    name: str
    architecture: Architecture
    schedule: PowerLawSchedule | None = Field(
        default=None, description="head size by depth; null: d_kv everywhere"
    )
    corpus: CorpusConfig = CorpusConfig()
    real_series: tuple[str, ...] = Field(
        default=(), description="collections from tscompress.data.series.training_series"
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
    token_embedding: Literal["fourier", "normal"] = Field(
        default="fourier", description="T5: initial token table, but for embedding_from"
    )
    embedding_from: str | None = Field(
        default=None, description="model whose embedding to start from; null: from scratch"
    )
    start_from: str | None = Field(
        default=None,
        description="trained model of the same or a smaller shape, which is grown; null: scratch",
    )
    freeze_embedding: bool = Field(default=False, description="leave the embedding as it starts")
    precision: Literal["no", "bf16"] = "bf16"
    seed: int = 0
    checkpoint_minutes: float = Field(default=5.0, gt=0)
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
    def _starts_once(self) -> PretrainRecipe:
        if self.start_from is not None:
            for name in ("embedding_from", "schedule"):
                if getattr(self, name) is not None:
                    raise ValueError(f"start_from and {name} exclude each other; leave one out")
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
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> int:
        """Index of the stage that step ``step`` (from 0) belongs to."""
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


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------


def build_model(recipe: PretrainRecipe) -> PreTrainedModel:
    """A randomly initialised model of the recipe's shape, in float32.

    Raises
    ------
    RecipeError
        ``embedding_from`` or ``start_from`` is of another family or shape.
    ModelLoadError
        It cannot be read.
    """
    model = _fresh_model(recipe, *design(recipe))
    _start_(model, recipe)
    return model


def _start_(model: PreTrainedModel, recipe: PretrainRecipe) -> None:
    """Weights, or an embedding, of the trained model that the recipe names, if any."""
    if recipe.embedding_from is not None:
        reuse_embedding_(model, recipe.family, recipe.embedding_from)
    if recipe.start_from is not None:
        small = load(recipe.start_from)
        if small.family != recipe.family:
            raise RecipeError(
                f"start_from: {recipe.start_from!r} is a {small.family} model; the recipe's family "
                f"is {recipe.family}."
            )
        grow_(model, small.model)


def design(recipe: PretrainRecipe) -> tuple[T5Config, Plan | None]:
    """The config, and the head size of each block where they differ and no config can name them.

    Head sizes are ceil(d_0 (1 + i)^alpha), at most ``architecture.d_kv``; cross-attention counts
    after all encoder layers (paper sec. 5). If they come out alike, they stand in the config.
    """
    family = adapter_of(recipe.family)
    config: T5Config = family.stock_config(recipe.architecture)
    if recipe.schedule is None:
        return config, None
    empty = family.empty_model(config.to_dict())
    plan = fold_plan_of(empty, family.describe(empty), recipe.schedule)
    if plan.uniform_sizes is None:
        return config, plan
    config.d_kv = plan.uniform_sizes[0]
    return config, None


def _fresh_model(recipe: PretrainRecipe, config: T5Config, plan: Plan | None) -> PreTrainedModel:
    """A randomly initialised model of ``config``, with the heads of ``plan`` in it."""
    family = adapter_of(recipe.family)
    model: PreTrainedModel = family.stock_class(config)
    if family.draws_samples and recipe.token_embedding == "fourier":
        centers = ChronosConfig(**config.chronos_config).create_tokenizer().centers
        table = fourier_token_embedding(centers, config.d_model)
        with torch.no_grad():
            model.shared.weight[2 : 2 + len(table)] = table
    if plan is not None:
        # Feed-forwards keep their size, and with it the weights they have been given.
        for head in plan.heads:
            initialize_heads_(replace_heads_(model, head), config.initializer_factor)
    return model


def initialize_heads_(attention: nn.Module, factor: float) -> None:
    """Draw q, k, v, o as T5 does for heads of this size.

    W_Q has the standard deviation ``factor`` (d_model d_kv)^{-1/2}, which stands in for the
    division of the scores by d_kv^{1/2}; W_K and W_V have ``factor`` d_model^{-1/2}, and W_O has
    ``factor`` (heads d_kv)^{-1/2}. The relative position bias is left alone.
    """
    projections: Any = attention
    q, k, v, o = projections.q, projections.k, projections.v, projections.o
    d_model, head_size = q.in_features, q.out_features // projections.n_heads
    nn.init.normal_(q.weight, std=factor * (d_model * head_size) ** -0.5)
    nn.init.normal_(k.weight, std=factor * d_model**-0.5)
    nn.init.normal_(v.weight, std=factor * d_model**-0.5)
    nn.init.normal_(o.weight, std=factor * o.in_features**-0.5)


def reuse_embedding_(model: PreTrainedModel, family: str, source: str) -> None:
    """Copy the embedding of the trained model ``source`` into ``model`` (paper Table 3).

    T5: the token table, which is the output layer too. Bolt: the patch embedding and the table of
    special tokens.

    Raises
    ------
    RecipeError
        ``source`` is of another family, or its embedding of another shape.
    ModelLoadError
        It cannot be read.
    """
    loaded = load(source)
    if loaded.family != family:
        raise RecipeError(
            f"embedding_from: {source!r} is a {loaded.family} model; the recipe's family is "
            f"{family}."
        )
    given = _embedding(loaded.model)
    wanted = _embedding(model)
    for name, parameter in wanted.items():
        shapes = [tuple(tensor.shape) for tensor in (given[name], parameter)]
        if shapes[0] != shapes[1]:
            raise RecipeError(
                f"embedding_from: {name} of {source!r} is {shapes[0]}; the recipe's architecture "
                f"makes it {shapes[1]}."
            )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(given[name])


def _embedding(model: nn.Module) -> dict[str, nn.Parameter]:
    """What turns series into the vectors that the first layer reads, by name."""
    parts = ("shared.", "input_patch_embedding.")
    return {name: p for name, p in model.named_parameters() if name.startswith(parts)}


def fourier_token_embedding(
    centers: torch.Tensor, d_model: int, longest: float = 12.0, shortest: float = 0.06
) -> torch.Tensor:
    """A smooth initial token table ``[n_bins, d_model]`` of unit variance.

    Row ``j`` holds sines and cosines of asinh of the bin centre, at wavelengths spaced evenly in
    the logarithm from ``longest`` to ``shortest`` (in units of asinh). Neighbouring values start
    with neighbouring embeddings, which random tables must first learn.
    """
    coordinate = torch.asinh(centers.double())[:, None]
    pairs = d_model // 2
    wavelength = torch.logspace(
        math.log10(longest), math.log10(shortest), pairs, dtype=torch.float64
    )
    angle = 2 * math.pi * coordinate / wavelength[None, :]
    features = torch.cat([angle.sin(), angle.cos()], dim=1) * math.sqrt(2)
    if features.shape[1] < d_model:
        features = nn.functional.pad(features, (0, d_model - features.shape[1]))
    return features.float()


# --------------------------------------------------------------------------------------------------
# Batches and losses
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Series split at the forecast origin; missing values and left padding are NaN."""

    context: torch.Tensor  # [B, T]
    target: torch.Tensor  # [B, H]
    label_smoothing_bins: float


def stage_corpora(recipe: PretrainRecipe) -> list[SyntheticCorpus]:
    """The corpus of every stage.

    Raises
    ------
    RecipeError
        No series are left to draw.
    """
    real = training_series(recipe.real_series)
    try:
        return [SyntheticCorpus(stage.corpus or recipe.corpus, real) for stage in recipe.stages]
    except ValueError as error:
        raise RecipeError(f"corpus: {error}.") from None


def make_batch(recipe: PretrainRecipe, corpora: Sequence[SyntheticCorpus], step: int) -> Batch:
    """The batch of a step; depends on nothing but the recipe and the step."""
    rng = np.random.default_rng([recipe.seed, step])
    index = recipe.stage_at(step)
    stage, corpus = recipe.stages[index], corpora[index]
    bucket = draw_bucket(rng, stage.buckets)
    length = bucket.context_length
    series = corpus.sample(rng, bucket.batch_size, length + bucket.horizon)
    context, target = split_windows(
        rng, series, length, recipe.missing_probability, stage.shorten_probability
    )
    return Batch(torch.from_numpy(context), torch.from_numpy(target), stage.label_smoothing_bins)


def bolt_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Pinball loss on instance-normalised targets, per observed target value."""
    target = batch.target
    observed = torch.isfinite(target)
    output = model(context=batch.context, target=torch.nan_to_num(target), target_mask=observed)
    horizon = output.quantile_preds.shape[-1]
    share = observed.float().mean() * target.shape[-1] / horizon
    loss: torch.Tensor = output.loss / share.clamp_min(1e-3)
    return loss


class TokenLoss:
    """Cross-entropy on tokens, optionally smoothed over neighbouring bins."""

    def __init__(self, tokenizer: ChronosTokenizer, prediction_length: int) -> None:
        self.tokenizer: Any = tokenizer
        self.prediction_length = prediction_length

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if not torch.isfinite(batch.target).any():  # nothing to learn from, and no mean of nothing
            return 0.0 * next(model.parameters()).sum()
        device = batch.context.device
        # The tokenizer's bin edges live on the CPU.
        context, target = batch.context.cpu(), batch.target.cpu()
        input_ids, attention_mask, scale = self.tokenizer.context_input_transform(context)
        labels, observed, _ = self.tokenizer._input_transform(target, scale=scale)
        if batch.target.shape[-1] == self.prediction_length:
            labels, observed = self.tokenizer._append_eos_token(labels, observed)
        labels, observed = labels.to(device), observed.to(device)
        start = torch.zeros_like(labels[:, :1])
        logits = model(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            decoder_input_ids=torch.cat([start, labels[:, :-1]], dim=1),
        ).logits  # [B, H, V]
        return token_cross_entropy(logits[observed], labels[observed], batch.label_smoothing_bins)


def token_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, smoothing_bins: float, n_special_tokens: int = 2
) -> torch.Tensor:
    """Mean cross-entropy of ``logits`` ``[N, V]`` against ``labels`` ``[N]``.

    With ``smoothing_bins`` s > 0 the target of a bin is a Gaussian of standard deviation s bins
    around it (cut at 3 s and at the ends of the value axis); special tokens stay one-hot.
    """
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    if smoothing_bins <= 0:
        return nn.functional.nll_loss(log_probabilities, labels)
    radius = math.ceil(3 * smoothing_bins)
    offset = torch.arange(-radius, radius + 1, device=labels.device)
    neighbours = labels[:, None] + offset[None, :]  # [N, 2 radius + 1]
    vocabulary = logits.shape[-1]
    weight = torch.exp(-0.5 * (offset / smoothing_bins) ** 2).expand_as(neighbours).clone()
    weight[(neighbours < n_special_tokens) | (neighbours >= vocabulary)] = 0.0
    special = labels < n_special_tokens
    weight[special] = (offset == 0).to(weight)
    weight = weight / weight.sum(dim=-1, keepdim=True)
    gathered = log_probabilities.gather(1, neighbours.clamp(0, vocabulary - 1))
    return -(weight * gathered).sum(dim=-1).mean()


def loss_function(model: PreTrainedModel) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """The training loss of the model's family."""
    if not adapter_of_model(model).draws_samples:
        return bolt_loss
    config = ChronosConfig(**model.config.chronos_config)
    return TokenLoss(config.create_tokenizer(), config.prediction_length)


# --------------------------------------------------------------------------------------------------
# The loop
# --------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a training run reports: one of these for each logged step."""

    step: int
    total_steps: int
    loss: float
    learning_rate: float
    series_per_second: float
    eta_seconds: float


def pretrain(
    recipe: PretrainRecipe,
    output: Path,
    *,
    resume: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
    log_every: int = 20,
) -> Path | None:
    """Train and write ``output/model`` and ``output/log.jsonl``.

    The model is a plain checkpoint that stock chronos loads, or a factored one if the recipe's
    schedule gives layers different head sizes; the recipe and ``provenance.json`` lie beside it,
    so that it can be pushed. Stops after the current step on Ctrl-C or SIGTERM
    with everything saved, and returns None; ``resume`` goes on from there.

    Raises
    ------
    RecipeError
        There is nothing to resume, it was begun with another recipe, or ``embedding_from`` does not
        fit.
    UsageError
        There are several processes.
    ModelLoadError
        ``embedding_from`` cannot be read.
    DivergenceError
        Loss or gradients are not finite; the last checkpoint stays as it was.
    VerificationError
        A factored checkpoint does not load back bit-equal; the training state is kept.
    """
    checkpoint = output / "checkpoint"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("pretrain runs in one process; start it without torchrun or accelerate.")
    parts = _check_settled(recipe, checkpoint) if resume else []
    set_seed(recipe.seed)
    AcceleratorState._reset_state()  # or a second run in a process keeps the precision of the first
    accelerator = Accelerator(mixed_precision=recipe.precision, cpu=not torch.cuda.is_available())
    config, plan = design(recipe)
    model = _fresh_model(recipe, config, plan)
    if not resume:  # a checkpoint has it
        _start_(model, recipe)
    for parameter in _embedding(model).values():
        parameter.requires_grad_(not recipe.freeze_embedding)
    optimizer = make_optimizer(
        recipe.optimizer,
        _parameter_groups(model, recipe),
        learning_rate=recipe.learning_rate,
        bfloat16=recipe.precision == "bf16",
    )
    loss_of = loss_function(model)
    corpora = stage_corpora(recipe)
    first = load_training_state(checkpoint, model, optimizer).step if resume else 0
    if first > recipe.total_steps:
        raise RecipeError(
            f"{checkpoint} has {first} steps, the recipe {recipe.total_steps}; resume with as many "
            "or more."
        )
    part = [recipe.learning_rate, recipe.total_steps]
    if not parts or parts[-1][1:] != part:
        parts.append([first, *part])
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    wrapped.train()
    output.mkdir(parents=True, exist_ok=True)
    if not resume:  # nobody shall go on from that of a run before
        (checkpoint / STATE_FILE).unlink(missing_ok=True)
    log = _log_up_to(first, output / "log.jsonl").open("a")
    started = last_saved = time.monotonic()
    losses: list[float] = []
    series = 0
    with StopRequest() as stop, log, attention_for_training(model):
        step = first
        while step < recipe.total_steps and not stop.requested:
            rate = recipe.learning_rate_at(step)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["rate"]
            batch = make_batch(recipe, corpora, step)
            batch = Batch(
                batch.context.to(accelerator.device),
                batch.target.to(accelerator.device),
                batch.label_smoothing_bins,
            )
            with accelerator.autocast():
                loss = loss_of(wrapped, batch)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(wrapped.parameters(), recipe.max_grad_norm)
            for what, found in (("loss", loss.detach()), ("gradient's norm", norm)):
                if not math.isfinite(value := float(found)):  # before it reaches a weight
                    raise DivergenceError(
                        f"the {what} is {value} at step {step + 1}; lower learning_rate "
                        f"({recipe.learning_rate:g}) and go on from {checkpoint} with --resume."
                    )
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            series += len(batch.context)
            losses.append(float(loss.detach()))
            if step in recipe.snapshot_steps:
                _write_model(model, recipe, output / f"step-{step}", plan, parts)
            now = time.monotonic()
            if step % log_every == 0 or step == recipe.total_steps:
                progress = Progress(
                    step=step,
                    total_steps=recipe.total_steps,
                    loss=sum(losses) / len(losses),
                    learning_rate=rate,
                    series_per_second=series / (now - started),
                    eta_seconds=(now - started) / (step - first) * (recipe.total_steps - step),
                )
                losses.clear()
                log.write(json.dumps(progress.__dict__) + "\n")
                log.flush()
                report(progress)
            if now - last_saved > 60 * recipe.checkpoint_minutes:
                save_training_state(
                    checkpoint, model, optimizer, TrainingState(step, _settled(recipe, parts))
                )
                last_saved = now
        save_training_state(
            checkpoint, model, optimizer, TrainingState(step, _settled(recipe, parts))
        )
    if step < recipe.total_steps:
        return None
    _write_model(model, recipe, output / "model", plan, parts)
    return output / "model"


def _write_model(
    model: PreTrainedModel,
    recipe: PretrainRecipe,
    path: Path,
    plan: Plan | None,
    parts: list[list[float]],
) -> None:
    with new_directory(path, force=True) as directory:
        save_pretrained(model, directory, plan)
        _record(recipe, directory, parts)


def _log_up_to(step: int, path: Path) -> Path:
    """Leave the lines of a log up to ``step``: a killed run logged steps that it did not save."""
    kept = []
    if step and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if json.loads(line)["step"] > step:
                    break
            except (ValueError, TypeError, KeyError):  # cut off as it was written
                break
            kept.append(line)
    path.write_text("".join(kept), encoding="utf-8")
    return path


def _record(recipe: PretrainRecipe, directory: Path, parts: list[list[float]]) -> None:
    """The recipe, from which the same model can be trained again, and ``provenance.json``.

    If a resumed run had another learning rate or number of steps than it was begun with, that has
    each part's first step, rate and steps in all.
    """
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    write_text_atomically(directory / PRETRAIN_FILE, text)
    write_provenance(
        directory,
        {"model": None, "revision": None, "family": recipe.family, "sha256": {}},
        others=[directory / PRETRAIN_FILE],
        dtype="bfloat16",
        calibration={},
        recovery=None,
        pretraining={
            "steps": recipe.total_steps,
            "seed": recipe.seed,
            "embedding_from": recipe.embedding_from,
            "start_from": recipe.start_from,
            **({"parts": parts} if len(parts) > 1 else {}),
        },
    )


def _settled(recipe: PretrainRecipe, parts: list[list[float]]) -> dict[str, str]:
    """What a checkpoint says of its run, as text."""
    return {"recipe": recipe.model_dump_json(), "parts": json.dumps(parts)}


def _check_settled(recipe: PretrainRecipe, checkpoint: Path) -> list[list[float]]:
    """The parts of the run so far; refuses to go on with another recipe than it was begun with.

    Raises
    ------
    RecipeError
        Names the first key that differs.
    """
    record = read_training_record(checkpoint)
    begun, ours = json.loads(record.get("recipe", "{}")), recipe.model_dump(mode="json")
    for content in (begun, ours):
        for stage in content.get("stages", [])[-1:]:
            stage["steps"] = "any"
    for name, value in ours.items():
        if begun.get(name) != value and name not in _FREE_ON_RESUME:
            raise RecipeError(
                f"{str(checkpoint)!r} was begun with {name} {shown(begun.get(name))}; the recipe "
                f"says {shown(value)}. Resume with the recipe it was begun with, or choose another "
                "output."
            )
    parts: list[list[float]] = json.loads(record["parts"])
    return parts


def save_pretrained(model: PreTrainedModel, directory: Path, plan: Plan | None = None) -> None:
    """Write the weights in bfloat16 and a config that old and new readers understand.

    With ``plan``, the head sizes of ``model``, a factored checkpoint that is loaded back and
    compared.

    Raises
    ------
    VerificationError
        The factored checkpoint does not load back bit-equal.
    """
    directory.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.config.dtype = torch.bfloat16
    if plan is not None:
        # Both names: transformers 4 reads torch_dtype, 5 reads dtype.
        dtypes = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
        base_config = json.loads(half.config.to_json_string()) | dtypes
        write_factored(half, plan, base_config, directory)
        _verify(half, directory)
        return
    half.save_pretrained(directory)
    path = directory / CONFIG_FILE
    config = json.loads(path.read_text())
    config["torch_dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _verify(model: PreTrainedModel, directory: Path) -> None:
    """Load ``directory`` afresh and compare weights and one forward pass, bit for bit."""
    reloaded = load(directory)
    ours, theirs = unique_tensors(model.cpu()), unique_tensors(reloaded.model)
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[n], theirs[n]) for n in ours):
        raise VerificationError("the weights do not load back as they were in memory.")
    wave = torch.sin(torch.arange(2 * 56.0) / 3).reshape(2, 56)
    probe = CalibrationBatch(wave[:, :48], wave[:, 48:])
    in_memory = replace(reloaded, model=model.requires_grad_(True).eval())
    reloaded.model.requires_grad_(True)  # frozen weights take another path through matmul
    outputs = [run_teacher_forced(one, probe) for one in (in_memory, reloaded)]
    name = "logits" if "logits" in outputs[0] else "quantile_preds"
    if not torch.equal(outputs[0][name], outputs[1][name]):
        raise VerificationError("the saved model predicts differently than the one in memory.")


def _parameter_groups(model: nn.Module, recipe: PretrainRecipe) -> list[dict[str, Any]]:
    """What is trained: matrices, the rest, and position biases at a rate of their own."""
    groups: dict[str, list[nn.Parameter]] = {"layer": [], "matrix": [], "other": [], "position": []}
    in_layers = layer_matrices(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "relative_attention_bias" in name:
            groups["position"].append(parameter)
        elif name in in_layers:
            groups["layer"].append(parameter)
        else:
            decays = parameter.ndim == 2 and "shared" not in name
            groups["matrix" if decays else "other"].append(parameter)
    decayed: dict[str, Any] = {"weight_decay": recipe.weight_decay, "rate": 1.0}
    return [
        {"params": groups["layer"], "orthogonal": True, **decayed},
        {"params": groups["matrix"], **decayed},
        {"params": groups["other"], "weight_decay": 0.0, "rate": 1.0},
        {
            "params": groups["position"],
            "weight_decay": 0.0,
            "rate": recipe.position_bias_rate,
        },
    ]
