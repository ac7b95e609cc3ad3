"""Pretraining of Chronos-Bolt, Chronos-T5 and Chronos-2 from scratch on the synthetic corpus.

The batch of step ``n`` depends only on the seed and ``n``, the optimizer state is saved with the
weights, and the learning rate is a function of the step: a stopped run resumes to the same weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import PreTrainedModel

from tscompress.data.batch import ForecastBatch
from tscompress.errors import DivergenceError, RecipeError
from tscompress.evaluation.batching import Processes
from tscompress.families.registry import adapter_of
from tscompress.families.stacks import layer_matrices
from tscompress.io.arguments import check_type
from tscompress.io.files import user_path
from tscompress.io.making_way import claimed
from tscompress.io.own_outputs import RANKS_LOG
from tscompress.io.places import remove
from tscompress.training.checkpoint import (
    STATE_FILE,
    TrainingState,
    load_training_state,
    save_training_state,
    unfinished_states,
)
from tscompress.training.loop import StopRequest, attention_for_training, training_precision
from tscompress.training.optimizers import make_optimizer
from tscompress.training.pretrain_batches import batches_from, drawing_processes, stage_corpora
from tscompress.training.pretrain_losses import loss_function
from tscompress.training.pretrain_model import (
    design,
    embedding_of,
    fresh_model,
    mean_with_start,
    start_,
)
from tscompress.training.pretrain_output import (
    CHECKPOINT,
    LOG_FILE,
    MODEL,
    check_no_state,
    check_pretraining_output,
    models_of_trainings,
    snapshot_name,
    write_model,
)
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.training.pretrain_state import check_resumable, log_up_to, record_of, with_part
from tscompress.training.rank_watch import RankWatch


@dataclass
class Progress:
    """Progress of a training run, reported at each logged step."""

    step: int
    total_steps: int
    loss: float
    learning_rate: float
    series_per_second: float
    eta_seconds: float


def pretrain(
    recipe: PretrainRecipe,
    output: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    inputs: Iterable[str | Path | None] = (),
    report: Callable[[Progress], None] = lambda progress: None,
    log_every: int = 20,
) -> Path | None:
    """Train and write ``output/model`` and ``output/log.jsonl``.

    The model is a stock checkpoint, or a factored one if head sizes differ between layers. The
    recipe and ``provenance.json`` are beside it, so that it can be pushed. On Ctrl-C or SIGTERM the
    run stops after the current step, saves everything and returns None; ``resume`` continues it.
    It trains on a GPU where there is one.

    Parameters
    ----------
    recipe
        As :func:`tscompress.load_pretrain_recipe` reads it.
    output
        The directory of ``model``, ``checkpoint`` and ``log.jsonl``.
    resume
        Continue from the checkpoint there.
    force
        Start afresh where the output holds a training, which goes.
    inputs
        Besides the models of the recipe: what the output must not replace.
    report
        Called with each line of the log, every ``log_every`` steps.

    Returns
    -------
    Path or None
        The directory of the model; None if the run was stopped.

    Raises
    ------
    RecipeError
        There is nothing to resume, it was begun with another recipe, ``embedding_from`` does not
        fit, or something would not be read.
    UsageError
        There are several processes, or an argument is of a wrong type.
    OutputExistsError
        The output holds something, and both ``resume`` and ``force`` are false; or it holds a log,
        a checkpoint or a model that no pretraining wrote, or that the recipe reads; or another
        process trains there.
    ModelLoadError
        ``embedding_from`` cannot be read.
    DivergenceError
        Loss or gradients are not finite; the last checkpoint stays as it was.
    VerificationError
        A factored checkpoint does not load back bit-equal; the training state is kept.
    """
    check_type("recipe", recipe, (PretrainRecipe,), "what tscompress.load_pretrain_recipe returned")
    check_type("output", output, (str, Path), "the path of a directory")
    output, inputs = user_path(output), tuple(inputs)
    Processes().check_alone("pretrain")
    check_pretraining_output(recipe, output, inputs, resume=resume, force=force)
    run = _Run(recipe, output, resume=resume)
    # Within the output, as its parent may be read-only.
    with claimed([output / LOG_FILE]):
        check_no_state(output, allowed=resume or force)  # another process may have ended meanwhile
        with StopRequest() as stop, attention_for_training(run.model):
            run.train(stop, report, log_every)
        return run.write_model(MODEL) if run.is_done else None


class _Run:
    """One pretraining: model, optimizer and checkpoint."""

    def __init__(self, recipe: PretrainRecipe, output: Path, *, resume: bool) -> None:
        self.recipe, self.output, self.resumed = recipe, output, resume
        self.checkpoint = output / CHECKPOINT
        parts = check_resumable(recipe, self.checkpoint) if resume else []
        # Otherwise a second run in a process keeps the precision of the first, and its device.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()  # one that does not sync keeps the optimizer from its steps
        cpu = not torch.cuda.is_available()
        device = torch.device("cpu" if cpu else "cuda")
        precision = recipe.precision or training_precision(device)
        self.accelerator = Accelerator(mixed_precision=precision, cpu=cpu)
        config, self.plan = design(recipe)
        gpus = range(torch.cuda.device_count())
        with torch.random.fork_rng(devices=gpus):  # the caller's generators stay as they are
            torch.manual_seed(recipe.seed)
            self.model = fresh_model(recipe, config, self.plan)
            if not resume:  # a checkpoint has it
                start_(self.model, recipe)
        for parameter in embedding_of(self.model).values():
            parameter.requires_grad_(not recipe.freeze_embedding)
        groups = parameter_groups(self.model, recipe)
        if not resume:
            _check_is_read(recipe, groups)
        optimizer = make_optimizer(
            recipe.optimizer,
            groups,
            learning_rate=recipe.learning_rate,
            bfloat16=precision == "bf16",
        )
        self.losses = [loss_function(self.model, s.label_smoothing_bins) for s in recipe.stages]
        self.corpora = stage_corpora(recipe)
        self.step = 0
        if resume:
            self.step = load_training_state(self.checkpoint, self.model, optimizer).step
        if self.step > recipe.total_steps:
            raise RecipeError(
                f"{self.checkpoint} has {self.step} steps, the recipe {recipe.total_steps}; resume "
                "with as many or more."
            )
        self.parts = with_part(parts, self.step, recipe)
        self.watch = _watch_of(self.model, recipe, output)
        self.wrapped, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        self.wrapped.train()

    @property
    def is_done(self) -> bool:
        """Whether every step of the recipe is done."""
        return self.step == self.recipe.total_steps

    def train(self, stop: StopRequest, report: Callable[[Progress], None], log_every: int) -> None:
        """Run the remaining steps, or until a stop is requested, and save everything."""
        recipe = self.recipe
        self.output.mkdir(parents=True, exist_ok=True)
        if not self.resumed:  # what an earlier run wrote must not be taken for this one's
            earlier: tuple[Path, ...] = (self.checkpoint / STATE_FILE, self.output / RANKS_LOG)
            earlier += tuple(unfinished_states(self.checkpoint))
            for path in (*earlier, *models_of_trainings(self.output)):
                remove(path)
        if self.watch is not None:
            self.watch.start(self.step)
        self._look()
        meter = _Meter(self.step, recipe.total_steps)
        saved_at = time.monotonic()
        processes = drawing_processes(self.accelerator.device)
        with (
            log_up_to(self.step, self.output / LOG_FILE).open("a") as log,
            closing(batches_from(recipe, self.corpora, self.step, processes)) as batches,
        ):
            while not self.is_done and not stop.requested:
                rate = recipe.learning_rate_at(self.step)
                meter.add(*self._train_step(next(batches), rate))
                self._look()
                if self.step in recipe.snapshot_steps:
                    self.write_model(snapshot_name(self.step))
                if self.step % log_every == 0 or self.is_done:
                    progress = meter.progress(self.step, rate)
                    log.write(json.dumps(progress.__dict__) + "\n")
                    log.flush()
                    report(progress)
                if time.monotonic() - saved_at > 60 * recipe.checkpoint_minutes:
                    self._save()
                    saved_at = time.monotonic()
            self._save()

    def _look(self) -> None:
        """Write ranks, if the recipe asks for them and this is a watched step."""
        if self.watch is not None:
            self.watch.look(self.model, self.step, last=self.is_done)

    def _train_step(self, batch: ForecastBatch, rate: float) -> tuple[float, int]:
        """One step on a batch at a learning rate; its loss, and its number of series."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        loss_of = self.losses[self.recipe.stage_at(self.step)]
        with self.accelerator.autocast():
            loss = loss_of(self.wrapped, batch.to(self.accelerator.device))
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(
            self.wrapped.parameters(), self.recipe.max_grad_norm
        )
        self._check_finite("loss", float(loss.detach()))  # before it reaches a weight
        self._check_finite("gradient's norm", float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach()), len(batch)

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise DivergenceError(
                f"the {name} is {value} at step {self.step + 1}; lower learning_rate "
                f"({self.recipe.learning_rate:g}) and resume from {self.checkpoint} with --resume."
            )

    def _save(self) -> None:
        state = TrainingState(self.step, record_of(self.recipe, self.parts))
        save_training_state(self.checkpoint, self.model, self.optimizer, state)

    def write_model(self, name: str) -> Path:
        """Write the current model into a directory of the run."""
        path = self.output / name
        model = mean_with_start(self.model, self.recipe) if self.is_done else self.model
        write_model(model, self.recipe, path, self.plan, self.parts)
        return path


def _watch_of(model: PreTrainedModel, recipe: PretrainRecipe, output: Path) -> RankWatch | None:
    """The rank watch that the recipe asks for."""
    if not recipe.watch_ranks:
        return None
    return RankWatch(adapter_of(recipe.family).describe(model), output)


class _Meter:
    """Mean loss since the previous line, and the speed since the start."""

    def __init__(self, first: int, total: int) -> None:
        self._first, self._total = first, total
        self._started = time.monotonic()
        self._losses: list[float] = []
        self._series = 0

    def add(self, loss: float, series: int) -> None:
        """Count one step."""
        self._losses.append(loss)
        self._series += series

    def progress(self, step: int, learning_rate: float) -> Progress:
        """The line of ``step``; resets the mean."""
        seconds = time.monotonic() - self._started
        loss = sum(self._losses) / len(self._losses)
        self._losses.clear()
        return Progress(
            step=step,
            total_steps=self._total,
            loss=loss,
            learning_rate=learning_rate,
            series_per_second=self._series / seconds,
            eta_seconds=seconds / (step - self._first) * (self._total - step),
        )


def _check_is_read(recipe: PretrainRecipe, groups: list[dict[str, Any]]) -> None:
    """Refuse of a new training what its model would not read; what was begun may be resumed.

    Raises
    ------
    RecipeError
    """
    if recipe.position_bias_rate != 1 and not groups[-1]["params"]:
        raise RecipeError(
            f"position_bias_rate is {recipe.position_bias_rate:g}, and a {recipe.family} trains no "
            "position biases; leave it out."
        )
    unread = (
        ("patch_size", "quantiles")
        if adapter_of(recipe.family).draws_samples
        else ("vocab_size", "top_k")
    )
    fields = type(recipe.architecture).model_fields
    for name in unread:
        if getattr(recipe.architecture, name) != fields[name].default:
            raise RecipeError(f"architecture: a {recipe.family} reads no {name}; leave it out.")
    corpora = [stage.corpus or recipe.corpus for stage in recipe.stages]
    if recipe.real_series and not any(corpus.real_weight for corpus in corpora):
        raise RecipeError(
            "real_series are drawn by the real_weight of a corpus, which is 0 in every stage; give "
            "it above 0, or leave real_series out."
        )
    longest = max(bucket.context_length for stage in recipe.stages for bucket in stage.buckets)
    if longest > recipe.architecture.context_length:
        raise RecipeError(
            f"a bucket's context_length is {longest}, that of the architecture "
            f"{recipe.architecture.context_length}; ask for no more than that."
        )


def parameter_groups(model: nn.Module, recipe: PretrainRecipe) -> list[dict[str, Any]]:
    """Trained parameters: matrices, the rest, and position biases with their own learning rate."""
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
