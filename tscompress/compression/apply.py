"""Apply a plan to a model, in place.

Linear layers become two factors, or layers are folded to smaller sizes. A model folded to the same
sizes everywhere becomes the stock model of a smaller config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tscompress.checkpoints.format import apply_structure_
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.complete_fold_plan import check_width, complete_fold_plan
from tscompress.compression.fold import fold_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.residual_stream import (
    principal_directions,
    rotate_,
    sliced_config,
    sliced_weights,
)
from tscompress.compression.token_embedding import factor_rows_
from tscompress.compression.univariate import separate_and_merge_
from tscompress.data.batch import ForecastBatch
from tscompress.errors import PlanError
from tscompress.families.registry import adapter_of, build_empty, wrap_pipeline
from tscompress.families.stacks import layer_name, stack_layers
from tscompress.families.t5_stack import tie_weights_
from tscompress.plan.plan import Plan


def fold_planned_(
    loaded: LoadedModel,
    plan: Plan,
    batches: Sequence[ForecastBatch],
    config: FoldConfig,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Drop the layers that a plan does not keep and fold the others; see :func:`apply_fold_`.

    A plan that only drops what does nothing needs no ``batches`` and no fit.

    Raises
    ------
    PlanError
        The plan does not fit the model, or ``kept_layers`` has all layers.
    FactorizationError
        A decomposition failed; the message names the layer.
    """
    if not plan.calibrates:
        separate_and_merge_(loaded, plan)
        return
    if plan.width is not None and not plan.kept_layers:
        plan = complete_fold_plan(loaded.model, loaded.architecture, plan)
    if second_fold(loaded, plan) is not None:
        _narrow_and_fold_(loaded, plan, batches, config, on_layer)
        return
    original = None
    if plan.kept_layers:
        have = stack_layers(loaded.model)
        if all(len(layers) == len(have.get(k, ())) for k, layers in plan.kept_layers.items()):
            raise PlanError("kept_layers has every layer, so none is dropped; leave it out.")
        config_of_layers(loaded, plan.kept_layers)  # before a weight changes
        check_width(loaded.model, plan)
        if plan.width is not None:  # also the streams of the layers to be dropped
            rotate_(loaded, principal_directions(loaded, batches))
        original = replace(loaded)  # weights are shared
        keep_layers_(loaded, plan.kept_layers)
    apply_fold_(loaded, plan, batches, config, on_layer, original=original)


def second_fold(loaded: LoadedModel, plan: Plan) -> Plan | None:
    """What :func:`fold_planned_` folds after it has narrowed the stream; None: it folds once.

    Raises
    ------
    PlanError
        The plan does not fit the model.
    """
    if plan.width is None or plan.kept_layers:
        return None
    plan = complete_fold_plan(loaded.model, loaded.architecture, plan)
    return plan.narrowed() if _narrows_first(plan) else None


def _narrows_first(plan: Plan) -> bool:
    """Whether a complete plan has a width and sizes that were chosen for the narrower model."""
    sizes = {size for head in plan.heads for size in (head.qk_size, head.vo_size)}
    units = {entry.kept for entry in plan.hidden}
    # A narrower model with its heads whole: no head is larger than the stream.
    width = plan.width.kept if plan.width is not None else 0
    possible = all(head.head_size <= width for head in plan.heads)
    apart = possible and not (plan.latent or plan.dropped)
    return apart and (len(sizes) > 1 or len(units) > 1 or plan.embedding is not None)


def _narrow_and_fold_(
    loaded: LoadedModel,
    plan: Plan,
    batches: Sequence[ForecastBatch],
    config: FoldConfig,
    on_layer: Callable[[int, int], None],
) -> None:
    """Slice the stream, and then fold the narrower model to sizes by layer.

    The second is fitted to the narrower model, not to the original. In one go sizes by layer lose a
    little more (eval/notes/folding.md).
    """
    narrow = Plan(family=plan.family, method="fold", width=plan.width)
    apply_fold_(loaded, narrow, batches, config, lambda done, n: on_layer(done, 2 * n))
    apply_fold_(loaded, plan.narrowed(), batches, config, lambda done, n: on_layer(n + done, 2 * n))
    assert loaded.plan is not None
    heads = zip(loaded.plan.heads, plan.heads, strict=True)  # with the chosen frequencies
    loaded.plan = plan.model_copy(
        update={
            "heads": tuple(new.model_copy(update={"d_model": old.d_model}) for new, old in heads)
        }
    )


def apply_fold_(
    loaded: LoadedModel,
    plan: Plan,
    batches: Sequence[ForecastBatch],
    config: FoldConfig,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    *,
    original: LoadedModel | None = None,
) -> None:
    """Fold ``loaded`` as planned, fitted on ``batches``, and set ``loaded.plan``.

    Layers must be dropped before (:func:`keep_layers_`); ``original`` still has them, see
    :func:`~tscompress.compression.fold.fold_`, and is rotated if the plan has a width. If sizes are
    the same in all layers, ``loaded`` becomes a stock model with a smaller config.

    Raises
    ------
    PlanError
        The plan does not fit the model.
    FactorizationError
        A decomposition failed; the message names the layer. The model is then half folded: load it
        again.
    """
    if plan.width is not None and original is None:
        complete_fold_plan(loaded.model, loaded.architecture, plan)  # before a weight changes
        rotate_(loaded, principal_directions(loaded, batches))
    tokens = plan.narrowed().embedding
    plan = fold_(loaded, plan, batches, config, on_layer, original=original)
    loaded.plan = plan
    sizes, width, new, weights = plan.uniform_sizes, plan.width, loaded.config, None
    if width is not None:
        weights = sliced_weights(loaded, width.kept)
        new = sliced_config(loaded.family, new, width.kept)
    if sizes is not None:
        _rebuild_(loaded, {**new, "d_kv": sizes[0], "d_ff": sizes[1]}, weights)
    elif width is not None:
        _rebuild_(loaded, new, weights, plan.model_copy(update={"embedding": None}))
    if tokens is not None:
        factor_rows_(loaded, tokens)


def keep_layers_(loaded: LoadedModel, kept: Mapping[str, Sequence[int]]) -> None:
    """Keep only the given layers of each stack; the result is a stock model with fewer layers.

    The relative position bias, which the first layer of a stack holds for all, is kept.

    Raises
    ------
    PlanError
        A stack or layer does not exist, or none would be kept.
    """
    config = config_of_layers(loaded, kept)
    new = dict(loaded.model.state_dict())
    for stack, stay in kept.items():
        weights = [
            {k: x for k, x in layer.state_dict().items() if "relative_attention_bias" not in k}
            for layer in stack_layers(loaded.model)[stack]
        ]
        for index, of_layer in enumerate(weights):
            for name in of_layer:
                del new[f"{layer_name(stack, index)}.{name}"]
        for place, index in enumerate(stay):
            new |= {f"{layer_name(stack, place)}.{k}": x for k, x in weights[index].items()}
    _rebuild_(loaded, config, new)


def config_of_layers(loaded: LoadedModel, kept: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Config of the model with only the ``kept`` layers; raises as :func:`keep_layers_`."""
    have = {stack: len(layers) for stack, layers in stack_layers(loaded.model).items()}
    changes: dict[str, int] = {}
    for stack, layers in kept.items():
        count = have.get(stack, 0)
        if not layers or sorted(set(layers) & set(range(count))) != list(layers):
            raise PlanError(
                f"cannot keep layers {list(layers)} of {stack!r}, which has {count}; "
                "give at least one, ascending."
            )
        changes["num_layers" if stack == "encoder" else "num_decoder_layers"] = len(layers)
    if "decoder" in have:
        # By default the decoder has as many layers as the encoder.
        changes.setdefault("num_layers", have["encoder"])
        changes.setdefault("num_decoder_layers", have["decoder"])
    counts = have | {stack: len(layers) for stack, layers in kept.items()}
    if reason := adapter_of(loaded.family).layers_refused(counts):
        raise PlanError(reason)
    return {**loaded.config, **changes}


def _rebuild_(
    loaded: LoadedModel,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor] | None = None,
    plan: Plan | None = None,
) -> None:
    """Make ``loaded`` the model of ``config`` with these weights; None: its current ones.

    With a ``plan``, its layers replace those of the stock model.
    """
    device = next(loaded.model.parameters()).device
    weights = dict(loaded.model.state_dict() if weights is None else weights)
    model: Any = build_empty(loaded.family, config)
    if plan is not None:
        apply_structure_(model, plan)
    model.load_state_dict(weights, strict=True, assign=True)
    tie_weights_(model)
    changed = replace(loaded, model=model.to(device).eval(), config=config)
    changed.pipeline = wrap_pipeline(loaded.family, changed.model)
    vars(loaded).update(vars(changed))
