"""How far a student is from its teacher: forecasts, truth, and what layers put out between.

Every loss is a mean within each series, ``[B]``, so that the loss of a batch does not depend on how
its series are spread over processes. Chronos-Bolt and Chronos-2 are compared by their quantiles in
the scaled space, in which they were trained; Chronos-T5 by its token distributions (Hinton et al.,
2015), fed the true target or a path drawn from the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from tscompress.architectures import STACKS
from tscompress.errors import UsageError
from tscompress.heads import cache_name
from tscompress.loading import LoadedModel

Distance = Literal["absolute", "squared"]
HiddenAt = Literal["layers", "attention", "both"]


@dataclass(frozen=True)
class TrainingBatch:
    """Series split at the forecast origin; missing values and left padding are NaN."""

    context: Tensor  # [B, T]
    target: Tensor  # [B, H]
    group_ids: Tensor | None = None  # [B]; Chronos-2 attends across rows of one group
    noise: Tensor | None = None  # [B, H], uniform; Chronos-T5 draws the teacher's path by it
    future: Tensor | None = None  # [B, H]; what Chronos-2 is told of steps ahead, NaN elsewhere

    def __len__(self) -> int:
        return len(self.context)

    def rows(self, part: slice) -> TrainingBatch:
        """Some of the series."""
        return self._each(lambda tensor: tensor[part])

    def to(self, device: torch.device) -> TrainingBatch:
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> TrainingBatch:
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: change(t) for n, t in present.items() if t is not None})


@dataclass(frozen=True)
class Losses:
    """One value a series, ``[B]``; what does not apply is 0.

    Attributes
    ----------
    teacher
        Distance of scaled quantiles, or KL divergence in nats a token, from the teacher's.
    truth
        Twice the pinball loss of scaled quantiles, or cross-entropy in nats a token.
    hidden
        Squared distance of what is matched within, relative to the teacher's residual stream;
        mean over places.
    """

    teacher: Tensor
    truth: Tensor
    hidden: Tensor

    def stack(self) -> Tensor:
        """All three, ``[3, B]``."""
        return torch.stack([self.teacher, self.truth, self.hidden])


@dataclass(frozen=True)
class Lesson:
    """What a teacher made of a batch; a student can learn from it more than once.

    Attributes
    ----------
    forecast
        Scaled quantiles ``[B, Q, H]``, or logits ``[B, H, V]``.
    inputs
        Chronos-T5: the tokens of the context and which of them count, ``[B, T]``.
    labels, observed
        Chronos-T5: the path of tokens that is fed, and which of them count, ``[B, H]``.
    outputs, streams
        Of the modules that are matched, by name: what they put out, and the residual stream after
        them where that is not the same.
    encoder_mask
        Positions of the encoder that count, ``[B, S]``; None: all, or nothing is matched.
    """

    forecast: Tensor
    inputs: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    observed: Tensor | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    streams: dict[str, Tensor] = field(default_factory=dict)
    encoder_mask: Tensor | None = None


# --------------------------------------------------------------------------------------------------
# Pure functions
# --------------------------------------------------------------------------------------------------


def quantile_distance(student: Tensor, teacher: Tensor, distance: Distance) -> Tensor:
    """Mean distance of two sets of quantiles ``[B, Q, H]`` in each series, ``[B]``."""
    error = student.float() - teacher.float()
    return (error.abs() if distance == "absolute" else error.square()).mean((1, 2))


def _asked(batch: TrainingBatch) -> Tensor:
    """Weights ``[B]``, of mean 1: none for what is known ahead, which Chronos-2 forecasts anyhow.

    It was never trained there, and what it says means nothing.
    """
    if batch.future is None:
        return torch.ones(len(batch), device=batch.context.device)
    asked = (~torch.isfinite(batch.future).any(1)).float()
    return asked / asked.mean().clamp_min(1e-9)


def pinball_loss(quantiles: Tensor, target: Tensor, levels: Tensor) -> Tensor:
    """Twice the pinball loss, mean over levels and observed steps of each series, ``[B]``.

    ``quantiles`` ``[B, Q, H]`` at ``levels`` ``[Q]``; ``target`` ``[B, H]`` is NaN where missing.
    """
    observed = torch.isfinite(target)
    error = target.nan_to_num(posinf=0, neginf=0)[:, None] - quantiles.float()  # [B, Q, H]
    loss = 2 * torch.maximum(levels[:, None] * error, (levels[:, None] - 1) * error)
    return _row_means(loss.mean(1), observed)


def token_losses(
    student: Tensor, teacher: Tensor, labels: Tensor, observed: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """KL divergence from teacher to student, and cross-entropy of ``labels``, each ``[B]``.

    Logits ``[B, H, V]``; labels and which of them count ``[B, H]``. The divergence is taken at
    ``temperature`` and multiplied by its square, so that gradients keep their size (Hinton et al.,
    2015, sec. 2).
    """
    log_student = (student.float() / temperature).log_softmax(-1)
    log_teacher = (teacher.float() / temperature).log_softmax(-1)
    divergence = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)  # [B, H]
    plain = log_student if temperature == 1 else student.float().log_softmax(-1)
    entropy = -plain.gather(-1, labels[..., None])[..., 0]
    return (
        temperature**2 * _row_means(divergence, observed),
        _row_means(entropy, observed),
    )


def hidden_distance(
    student: Tensor, teacher: Tensor, valid: Tensor | None, stream: Tensor | None = None
) -> Tensor:
    """Squared distance of two outputs ``[B, S, d]`` over the square of ``stream``, ``[B]``.

    ``stream`` ``[B, S, d]`` is what the teacher's output is a part of; None: it is the whole.
    ``valid`` ``[B, S]`` says which positions count; None: all.
    """
    error = (student.float() - teacher.float()).square().sum(-1)  # [B, S]
    size = (teacher if stream is None else stream).float().square().sum(-1)
    if valid is not None:
        error, size = error.where(valid, 0.0), size.where(valid, 0.0)
    return error.sum(1) / size.sum(1).clamp_min(1e-12)


def _row_means(values: Tensor, counted: Tensor) -> Tensor:
    """Means of ``values`` ``[B, H]`` where ``counted``; 0 in rows where nothing is."""
    return values.where(counted, 0.0).sum(1) / counted.sum(1).clamp_min(1)


def layer_targets(kept: Sequence[int] | None, layers: int, teacher_layers: int) -> list[int]:
    """The teacher's layer whose output each of the student's ``layers`` should have.

    What a student's layer puts out feeds the next one that was kept, so its target is the stream
    just before that. Without a record of ``kept`` the layers are spread evenly.
    """
    if kept is None or len(kept) != layers:
        return [round((i + 1) * teacher_layers / layers) - 1 for i in range(layers)]
    return [*(after - 1 for after in kept[1:]), teacher_layers - 1]


# --------------------------------------------------------------------------------------------------
# Running both models
# --------------------------------------------------------------------------------------------------


class Distillation:
    """Losses of a student against its teacher; watches both models until :meth:`close`.

    Parameters
    ----------
    teacher, student
        Models of one family and width, on one device.
    temperature
        Of the divergence of token distributions, Chronos-T5.
    distance
        Of quantiles, the other families.
    match
        Compare the residual streams after each of the ``layers`` too, or what each ``attention``
        adds to its stream, or both; costs some memory.

    Raises
    ------
    UsageError
        The two cannot be compared.
    """

    def __init__(
        self,
        teacher: LoadedModel,
        student: LoadedModel,
        *,
        temperature: float = 1.0,
        distance: Distance = "absolute",
        match: HiddenAt | None = None,
    ) -> None:
        check_comparable(teacher, student, match)
        self.teacher, self.student = teacher, student
        self.temperature, self.distance = temperature, distance
        self._pairs = [] if match is None else _places(teacher, student, match)
        head = [] if teacher.family == "chronos-t5" else ["output_patch_embedding"]
        self._of_teacher = _Watch(teacher.model, [*head, *(name for name, _ in self._pairs)])
        self._of_student = _Watch(student.model, [*head, *(name for _, name in self._pairs)])

    def close(self) -> None:
        """Remove every hook."""
        self._of_teacher.close()
        self._of_student.close()

    @torch.no_grad()
    def lesson(self, batch: TrainingBatch) -> Lesson:
        """What the teacher makes of ``batch``."""
        found = (self._token_lesson if self._has_tokens else self._quantile_lesson)(batch)
        self._of_teacher.forget()
        return found

    def __call__(
        self, model: nn.Module, batch: TrainingBatch, lesson: Lesson | None = None
    ) -> Losses:
        """Losses of ``model``, the student or a wrapper around it, on ``batch``.

        ``lesson`` is the teacher's of this very batch; None: the teacher is run.
        """
        lesson = lesson or self.lesson(batch)
        losses = (self._token_losses if self._has_tokens else self._quantile_losses)(
            model, batch, lesson
        )
        self._of_student.forget()
        return losses

    @property
    def matches(self) -> bool:
        """Whether layers are compared, too."""
        return bool(self._pairs)

    @property
    def _has_tokens(self) -> bool:
        return self.teacher.family == "chronos-t5"

    def _quantile_inputs(self, batch: TrainingBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = {"context": batch.context}
        if self.teacher.family == "chronos-2":
            inner: Any = self.teacher.model
            patch = inner.chronos_config.output_patch_size
            inputs |= {
                "group_ids": batch.group_ids,
                "future_covariates": batch.future,
                "num_output_patches": -(-batch.target.shape[1] // patch),
            }
        return inputs

    def _quantile_lesson(self, batch: TrainingBatch) -> Lesson:
        inner: Any = self.teacher.model
        inner(**self._quantile_inputs(batch))
        patches = self._of_teacher.seen["output_patch_embedding"]
        return Lesson(
            _scaled_quantiles(patches, len(inner.chronos_config.quantiles)), **self._matched()
        )

    def _quantile_losses(self, model: nn.Module, batch: TrainingBatch, lesson: Lesson) -> Losses:
        inner: Any = self.teacher.model
        model(**self._quantile_inputs(batch))
        levels = torch.tensor(inner.chronos_config.quantiles, device=batch.context.device)
        ours = _scaled_quantiles(self._of_student.seen["output_patch_embedding"], len(levels))
        context = batch.context[:, -inner.chronos_config.context_length :]
        _, loc_scale = inner.instance_norm(context)
        target, _ = inner.instance_norm(batch.target, loc_scale)  # [B, H]
        asked = _asked(batch)
        return Losses(
            asked * quantile_distance(ours, lesson.forecast, self.distance),
            asked * pinball_loss(ours[..., : target.shape[1]], target, levels),
            self._hidden(len(batch), lesson, None, ours),
        )

    def _tokens(self, batch: TrainingBatch) -> tuple[dict[str, Tensor], Tensor]:
        """What an encoder is given, and the scale of each series."""
        tokenizer: Any = self.teacher.forecaster.tokenizer
        # The tokenizer's bin edges live on the CPU.
        input_ids, mask, scale = tokenizer.context_input_transform(batch.context.cpu())
        device = batch.context.device
        return {"input_ids": input_ids.to(device), "attention_mask": mask.to(device)}, scale

    def _fed(self, inputs: dict[str, Tensor], labels: Tensor) -> dict[str, Any]:
        """Those and, for the decoder, ``labels`` ``[B, H]`` a step later."""
        config: Any = self.teacher.model.config
        start = torch.full_like(labels[:, :1], config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return {**inputs, "decoder_input_ids": shifted, "use_cache": False}

    def _token_lesson(self, batch: TrainingBatch) -> Lesson:
        inner: Any = self.teacher.model
        inputs, scale = self._tokens(batch)
        logits: Tensor | None = None
        if batch.noise is None:
            tokenizer: Any = self.teacher.forecaster.tokenizer
            labels, observed, _ = tokenizer._input_transform(batch.target.cpu(), scale=scale)
            labels, observed = labels.to(batch.target.device), observed.to(batch.target.device)
        else:
            top_k = inner.config.chronos_config["top_k"]
            special = inner.config.chronos_config["n_special_tokens"]
            labels, logits = draw_paths(inner, **inputs, noise=batch.noise, top_k=top_k,
                                        n_special_tokens=special)  # fmt: skip
            observed = torch.ones_like(labels, dtype=torch.bool)
        if logits is None or self._pairs:  # the hooks saw one token at a time
            logits = inner(**self._fed(inputs, labels)).logits
        assert logits is not None
        return Lesson(logits, inputs, labels, observed, **self._matched())

    def _token_losses(self, model: nn.Module, batch: TrainingBatch, lesson: Lesson) -> Losses:
        labels, observed = lesson.labels, lesson.observed
        assert labels is not None
        assert observed is not None
        ours = model(**self._fed(lesson.inputs, labels)).logits
        divergence, entropy = token_losses(
            ours, lesson.forecast, labels, observed, self.temperature
        )
        if batch.noise is not None:  # the teacher's own path is no truth
            entropy = torch.zeros_like(entropy)
        fed = torch.cat([torch.ones_like(observed[:, :1]), observed[:, :-1]], dim=1)
        return Losses(divergence, entropy, self._hidden(len(batch), lesson, fed, ours))

    def _matched(self) -> dict[str, Any]:
        """What the teacher's watched modules have just put out."""
        if not self._pairs:
            return {}
        watch = self._of_teacher
        return {
            "outputs": {theirs: watch.seen[theirs] for theirs, _ in self._pairs},
            "streams": dict(watch.streams),
            "encoder_mask": watch.encoder_mask,
        }

    def _hidden(self, rows: int, lesson: Lesson, fed: Tensor | None, like: Tensor) -> Tensor:
        """Mean over layers; ``fed`` ``[B, H]`` says which positions of the decoder count."""
        if not self._pairs:
            return torch.zeros(rows, device=like.device)
        distances = [
            hidden_distance(
                self._of_student.seen[ours],
                lesson.outputs[theirs],
                lesson.encoder_mask if ours.startswith("encoder") else fed,
                lesson.streams.get(theirs),
            )
            for theirs, ours in self._pairs
        ]
        return torch.stack(distances).mean(0)


def check_comparable(
    teacher: LoadedModel, student: LoadedModel, match: HiddenAt | None = None
) -> None:
    """Refuse a teacher of another family, forecast or width.

    A student whose plan narrowed it may be narrower, but not where layers are matched: their
    streams are not alike.

    Raises
    ------
    UsageError
    """

    def facts(loaded: LoadedModel) -> dict[str, object]:
        model: Any = loaded.model
        chronos = dict(model.config.chronos_config)
        forecast = {
            key: chronos.get(key)
            for key in ("quantiles", "prediction_length", "input_patch_size", "n_tokens")
        }
        return {"family": loaded.family, **forecast}

    _ = teacher.forecaster, student.forecaster  # families that forecast
    theirs, ours = facts(teacher), facts(student)
    different = [key for key in theirs if theirs[key] != ours[key]]
    if different:
        key = different[0]
        raise UsageError(
            f"the student has {key} {ours[key]} and the teacher {theirs[key]}; "
            "give the model that the student was made from."
        )
    models: tuple[Any, Any] = student.model, teacher.model
    narrow, wide = (model.config.d_model for model in models)
    made_narrow = student.plan is not None and student.plan.width is not None
    if narrow > wide or (narrow < wide and not made_narrow):
        raise UsageError(
            f"the student has d_model {narrow} and the teacher {wide}; "
            "give the model that the student was made from."
        )
    if match is not None and narrow < wide:
        raise UsageError(
            f"hidden_weight compares residual streams, and the student has d_model {narrow} where "
            f"the teacher has {wide}; leave it out."
        )


@torch.no_grad()
def draw_paths(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    noise: Tensor,
    top_k: int,
    n_special_tokens: int,
) -> tuple[Tensor, Tensor]:
    """One path of tokens ``[B, H]`` a series, as the model forecasts, and its logits ``[B, H, V]``.

    ``input_ids`` and ``attention_mask`` ``[B, T]``. ``noise`` ``[B, H]`` is uniform in [0, 1) and
    says which path: the token of a step is where the distribution function of the ``top_k``
    likeliest passes it.
    """
    encoded = model.encoder(input_ids=input_ids, attention_mask=attention_mask)
    token = torch.full_like(input_ids[:, :1], model.config.decoder_start_token_id)
    # A model puts into it what it computes, whatever it calls it.
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    options = {cache_name(model): cache, "use_cache": True}
    path, seen = [], []
    for step in range(noise.shape[1]):
        output = model(
            encoder_outputs=encoded,
            attention_mask=attention_mask,
            decoder_input_ids=token,
            **options,
        )
        seen.append(output.logits[:, -1])
        logits = seen[-1][:, n_special_tokens:].float()
        largest, index = logits.topk(min(top_k, logits.shape[-1]))
        passed = largest.softmax(-1).cumsum(-1)
        place = torch.searchsorted(passed, noise[:, step : step + 1].contiguous())
        token = n_special_tokens + index.gather(1, place.clamp_max(index.shape[1] - 1))
        path.append(token)
    return torch.cat(path, dim=1), torch.stack(seen, dim=1)


def _scaled_quantiles(patches: Tensor, levels: int) -> Tensor:
    """``[B, n, levels * p]`` as the head puts them out to quantiles ``[B, levels, n * p]``."""
    rows, count, _ = patches.shape
    return patches.view(rows, count, levels, -1).transpose(1, 2).reshape(rows, levels, -1)


def _places(teacher: LoadedModel, student: LoadedModel, match: HiddenAt) -> list[tuple[str, str]]:
    """Names of modules of both models whose outputs should be alike."""
    kept = (student.plan.kept_layers if student.plan is not None else None) or {}
    pairs: list[tuple[str, str]] = []
    for stack in STACKS:
        blocks, teacher_blocks = (
            getattr(getattr(loaded.model, stack, None), "block", ())
            for loaded in (student, teacher)
        )
        if not len(blocks):
            continue
        targets = layer_targets(kept.get(stack), len(blocks), len(teacher_blocks))
        if match in ("layers", "both"):
            pairs += [(f"{stack}.block.{t}", f"{stack}.block.{i}") for i, t in enumerate(targets)]
        if match in ("attention", "both"):
            # An attention has its own of the teacher, whatever layers were dropped behind it.
            known = kept.get(stack)
            sources = targets if known is None or len(known) != len(blocks) else known
            pairs += [
                (f"{stack}.block.{t}.layer.{j}", f"{stack}.block.{i}.layer.{j}")
                for i, t in enumerate(sources)
                for j in range(len(blocks[i].layer) - 1)  # the last is the feed-forward
            ]
    return pairs


class _Watch:
    """Keeps what modules last put out, and the mask that the encoder was given.

    Of a sublayer, such as ``encoder.block.0.layer.0``, it keeps what that adds to its input, and
    beside it the sum, the residual stream. An attention may add next to nothing, as that of
    Chronos-Bolt's decoder to its one position does, and be no measure of itself.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.seen: dict[str, Tensor] = {}
        self.streams: dict[str, Tensor] = {}
        self.encoder_mask: Tensor | None = None
        self._handles = [
            model.get_submodule(name).register_forward_hook(self._keep(name)) for name in set(names)
        ]
        encoder = model.get_submodule("encoder")
        self._handles.append(encoder.register_forward_pre_hook(self._mask, with_kwargs=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.forget()

    def forget(self) -> None:
        self.seen.clear()
        self.streams.clear()

    def _keep(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        adds = ".layer." in name

        def hook(_: nn.Module, args: Any, output: Any) -> None:
            found = output if isinstance(output, Tensor) else output[0]
            self.seen[name] = found
            if adds:
                self.seen[name], self.streams[name] = found - args[0], found.detach()

        return hook

    def _mask(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self.encoder_mask = None if mask is None else mask > 0


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Within the block, layers keep their inputs alone and are run again on the way back."""
    blocks = [
        block for stack in STACKS for block in getattr(getattr(model, stack, None), "block", ())
    ]
    modules = (model, *(getattr(model, stack, None) for stack in STACKS))
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    configs = [config for config in configs if config is not None]
    caching = [getattr(config, "use_cache", None) for config in configs]
    try:
        for config in configs:  # a layer that is run twice must not write to a cache twice
            config.use_cache = False
        for block in blocks:
            vars(block)["forward"] = _recomputed(block.forward)
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
        for config, value in zip(configs, caching, strict=True):
            config.use_cache = value


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
