"""Growing a trained model into a wider one with the same forecasts: the inverse of ``--width``.

The residual stream gets more dimensions that start at zero, attention more heads and feed-forwards
more hidden units whose outputs start at zero, a stack more layers that add zero. Their readers are
initialised as in a fresh model, so all weights have gradients from the first step on
(function-preserving growth; Chen et al., "Net2Net", 2016, with zeros in place of copies, as Evci et
al., "GradMax", 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tscompress.errors import RecipeError

#: Layers whose rows are dimensions of the residual stream.
_WRITES_STREAM = (
    ".o.weight",
    ".wo.weight",
    "input_patch_embedding.output_layer.weight",
    "input_patch_embedding.output_layer.bias",
    "input_patch_embedding.residual_layer.weight",
    "input_patch_embedding.residual_layer.bias",
)
#: Layers whose columns read heads or hidden units, and tables whose columns are the stream's.
_ZERO_COLUMNS = (".o.weight", ".wo.weight", "patch_embedding.output_layer.weight", "shared.weight")
#: Of ``chronos_config``: how series are read and forecasts are written.
_SAME_READING = (
    "input_patch_size", "input_patch_stride", "output_patch_size", "quantiles", "tokenizer_kwargs",
    "time_encoding_scale", "use_arcsinh",
)  # fmt: skip


def grow_(model: PreTrainedModel, small: PreTrainedModel) -> None:
    """Give ``model``, freshly initialised, the function of ``small``, whose shape fits into it.

    ``d_model``, ``num_heads``, ``d_ff``, and the layers of each stack may be larger; head size,
    vocabulary, patches and the steps of a Chronos-Bolt must be equal. Outputs agree up to rounding,
    except for the epsilon of RMS norms, whose effect is ``D / d`` times as large.

    Parameters
    ----------
    model
        A model of the wanted shape (``d_model`` D); weights are overwritten.
    small
        A trained model of the same family (``d_model`` d).

    Raises
    ------
    RecipeError
        A part of ``small`` does not fit into ``model``.
    """
    _check_fit(model, small)
    _check_layers(model, small)
    widths = small.config.d_model, model.config.d_model
    given = dict(small.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in given:
                _grow_tensor_(name, parameter, given[name].to(parameter), widths)
            elif name.endswith((".o.weight", ".wo.weight")):  # of a layer that small has not
                parameter.zero_()
        _undo_output_scale_(model, widths[1] / widths[0])


def _grow_tensor_(
    name: str, parameter: nn.Parameter, old: torch.Tensor, widths: tuple[int, int]
) -> None:
    small_width, width = widths
    if "layer_norm" in name:
        # A mean over D of squares that are zero beyond d is d / D of the mean over d.
        parameter.fill_(float(old.mean()))
        parameter[:small_width] = old
        parameter.mul_((small_width / width) ** 0.5)
        return
    if name.endswith(_WRITES_STREAM):
        parameter[old.shape[0] :] = 0
    if name.endswith(_ZERO_COLUMNS):
        parameter[:, old.shape[1] :] = 0
    parameter[tuple(slice(size) for size in old.shape)] = old


def _undo_output_scale_(model: Any, ratio: float) -> None:
    """A tied T5 divides the input of its head by ``sqrt(d_model)``, which is larger now."""
    config = model.config
    if hasattr(model, "lm_head") and getattr(
        config, "scale_decoder_outputs", config.tie_word_embeddings
    ):
        model.decoder.final_layer_norm.weight.mul_(ratio**0.5)


def _check_layers(model: PreTrainedModel, small: PreTrainedModel) -> None:
    """Refuse weights that the wanted model has no place for, such as a head of its own."""
    ours, theirs = (dict(one.named_parameters()) for one in (model, small))
    if unknown := sorted(theirs.keys() - ours.keys()):
        raise RecipeError(
            f"start_from: it has {unknown[0]}, which the recipe's model has not; start from a "
            "model as it was trained, not from one with a narrower stream or with factors."
        )


def _check_fit(model: PreTrainedModel, small: PreTrainedModel) -> None:
    wanted, given = model.config, small.config
    for name in ("d_kv", "vocab_size"):
        if getattr(wanted, name) != getattr(given, name):
            raise RecipeError(
                f"start_from: its {name} is {getattr(given, name)}, the recipe's "
                f"{getattr(wanted, name)}; they must be alike."
            )
    for name in ("d_model", "num_heads", "d_ff", "num_layers", "num_decoder_layers"):
        # Chronos-2 has no decoder.
        if getattr(wanted, name, 0) < getattr(given, name, 0):
            raise RecipeError(
                f"start_from: its {name} is {getattr(given, name)}, the recipe's only "
                f"{getattr(wanted, name)}; start from a model that is no larger."
            )
    ours, theirs = wanted.chronos_config, given.chronos_config
    same = [*_SAME_READING]
    if hasattr(model, "output_patch_embedding") and "output_patch_size" not in ours:
        same.append("prediction_length")  # a Chronos-Bolt has a row for each step and quantile
    differ = [name for name in same if ours.get(name) != theirs.get(name)]
    if differ:
        hint = " (context_length gives it)" if differ[0] == "time_encoding_scale" else ""
        raise RecipeError(
            f"start_from: its {differ[0]} is {theirs.get(differ[0])}, the recipe's "
            f"{ours.get(differ[0])}{hint}; they must be alike."
        )
