"""Pretraining of Chronos-Bolt and Chronos-T5 from scratch on the synthetic corpus.

The batch of step ``n`` depends only on the seed and ``n``, the optimizer state is saved with the
weights, and the learning rate is a function of the step: a run that was stopped continues to the
weights it would have had. Losses are the ones of the official training code (pinball on
instance-normalised targets for Bolt, cross-entropy on tokens for T5), with one addition for T5:
``label_smoothing_bins`` spreads a target token over its neighbours on the value axis.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from chronos.chronos import ChronosConfig, ChronosTokenizer
from chronos.chronos_bolt import ChronosBoltModelForForecasting
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from tscompress.corpus import CorpusConfig, SyntheticCorpus
from tscompress.data import training_series
from tscompress.errors import DivergenceError, RecipeError
from tscompress.files import new_directory
from tscompress.training import (
    Bucket,
    StopRequest,
    TrainingState,
    draw_bucket,
    load_training_state,
    save_training_state,
    split_windows,
)

_STRICT = ConfigDict(extra="forbid", frozen=True)
QUANTILE_LEVELS = tuple(round(0.1 * level, 1) for level in range(1, 10))


class Stage(BaseModel):
    """Steps during which batches come from the same buckets."""

    model_config = _STRICT

    steps: int = Field(ge=1)
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    label_smoothing_bins: float = Field(
        default=0.0, ge=0, description="T5: std of the target, in bins"
    )
    corpus: CorpusConfig | None = Field(default=None, description="instead of the recipe's")


class Architecture(BaseModel):
    """Shape of the T5 stacks."""

    model_config = _STRICT

    d_model: int = Field(ge=1)
    d_kv: int = Field(ge=1)
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
    corpus: CorpusConfig = CorpusConfig()
    real_series: tuple[str, ...] = Field(
        default=(), description="collections from tscompress.data.training_series"
    )
    stages: tuple[Stage, ...] = Field(min_length=1)
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
        default="fourier", description="T5: initial token table"
    )
    precision: Literal["no", "bf16"] = "bf16"
    seed: int = 0
    checkpoint_minutes: float = Field(default=5.0, gt=0)

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
    """A randomly initialised model of the recipe's shape, in float32."""
    shape = recipe.architecture
    common: dict[str, Any] = {
        "d_model": shape.d_model,
        "d_kv": shape.d_kv,
        "d_ff": shape.d_ff,
        "num_layers": shape.num_layers,
        "num_decoder_layers": shape.num_decoder_layers,
        "num_heads": shape.num_heads,
        "dropout_rate": 0.0,
        "feed_forward_proj": "relu",
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
    }
    if recipe.family == "chronos-bolt":
        chronos_config: dict[str, Any] = {
            "context_length": shape.context_length,
            "prediction_length": shape.prediction_length,
            "input_patch_size": shape.patch_size,
            "input_patch_stride": shape.patch_size,
            "quantiles": list(QUANTILE_LEVELS),
            "use_reg_token": True,
        }
        config = T5Config(
            **common,
            initializer_factor=0.05,
            chronos_config=chronos_config,
            chronos_pipeline_class="ChronosBoltPipeline",
            reg_token_id=1,
            vocab_size=2,
            architectures=["ChronosBoltModelForForecasting"],
        )
        return ChronosBoltModelForForecasting(config)
    chronos_config = {
        "tokenizer_class": "MeanScaleUniformBins",
        "tokenizer_kwargs": {"low_limit": -15.0, "high_limit": 15.0},
        "n_tokens": shape.vocab_size,
        "n_special_tokens": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "use_eos_token": True,
        "model_type": "seq2seq",
        "context_length": shape.context_length,
        "prediction_length": shape.prediction_length,
        "num_samples": 20,
        "temperature": 1.0,
        "top_k": shape.top_k,
        "top_p": 1.0,
    }
    config = T5Config(
        **common,
        vocab_size=shape.vocab_size,
        chronos_config=chronos_config,
        chronos_pipeline_class="ChronosPipeline",
        architectures=["T5ForConditionalGeneration"],
    )
    model = T5ForConditionalGeneration(config)
    if recipe.token_embedding == "fourier":
        centers = ChronosConfig(**chronos_config).create_tokenizer().centers
        table = fourier_token_embedding(centers, shape.d_model)
        with torch.no_grad():
            model.shared.weight[2 : 2 + len(table)] = table
    return model


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
    """The corpus of every stage."""
    real = training_series(recipe.real_series)
    return [SyntheticCorpus(stage.corpus or recipe.corpus, real) for stage in recipe.stages]


def make_batch(recipe: PretrainRecipe, corpora: Sequence[SyntheticCorpus], step: int) -> Batch:
    """The batch of a step; depends on nothing but the recipe and the step."""
    rng = np.random.default_rng([recipe.seed, step])
    index = recipe.stage_at(step)
    stage, corpus = recipe.stages[index], corpora[index]
    bucket = draw_bucket(rng, stage.buckets)
    length = bucket.context_length
    series = corpus.sample(rng, bucket.batch_size, length + bucket.horizon)
    context, target = split_windows(rng, series, length, recipe.missing_probability)
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
    if isinstance(model, ChronosBoltModelForForecasting):
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
    """Train and write ``output/model`` (stock-loadable) and ``output/log.jsonl``.

    Stops after the current step on Ctrl-C or SIGTERM with everything saved, and returns None;
    ``resume`` goes on from there.

    Raises
    ------
    DivergenceError
        The loss is not finite; the last checkpoint stays as it was.
    """
    set_seed(recipe.seed)
    AcceleratorState._reset_state()  # or a second run in a process keeps the precision of the first
    accelerator = Accelerator(mixed_precision=recipe.precision, cpu=not torch.cuda.is_available())
    model = build_model(recipe)
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, recipe),
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    loss_of = loss_function(model)
    corpora = stage_corpora(recipe)
    checkpoint = output / "checkpoint"
    first = load_training_state(checkpoint, model, optimizer).step if resume else 0
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    wrapped.train()
    output.mkdir(parents=True, exist_ok=True)
    log = (output / "log.jsonl").open("a" if resume else "w")
    started = last_saved = time.monotonic()
    losses: list[float] = []
    series = 0
    with StopRequest() as stop, log:
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
            accelerator.clip_grad_norm_(wrapped.parameters(), recipe.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            series += len(batch.context)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise DivergenceError(
                    f"the loss is {losses[-1]} at step {step}; lower learning_rate "
                    f"({recipe.learning_rate:g}) and go on from {checkpoint} with --resume."
                )
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
                save_training_state(checkpoint, model, optimizer, TrainingState(step))
                last_saved = now
        save_training_state(checkpoint, model, optimizer, TrainingState(step))
    if step < recipe.total_steps:
        return None
    with new_directory(output / "model", force=True) as directory:
        save_pretrained(model, directory)
    return output / "model"


def save_pretrained(model: PreTrainedModel, directory: Path) -> None:
    """Write the weights in bfloat16 and a config that old and new readers understand."""
    directory.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.config.dtype = torch.bfloat16
    half.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = "bfloat16"  # transformers 4 reads this key, 5 reads dtype
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _parameter_groups(model: nn.Module, recipe: PretrainRecipe) -> list[dict[str, Any]]:
    """Decayed matrices, the rest, and relative position biases at a rate of their own."""
    groups: dict[str, list[nn.Parameter]] = {"matrix": [], "other": [], "position": []}
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            groups["position"].append(parameter)
        else:
            decayed = parameter.ndim == 2 and "shared" not in name
            groups["matrix" if decayed else "other"].append(parameter)
    return [
        {"params": groups["matrix"], "weight_decay": recipe.weight_decay, "rate": 1.0},
        {"params": groups["other"], "weight_decay": 0.0, "rate": 1.0},
        {
            "params": groups["position"],
            "weight_decay": 0.0,
            "rate": recipe.position_bias_rate,
        },
    ]
