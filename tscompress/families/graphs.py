"""What is exported of a model: a module with tensors in and out, and the names of its inputs.

The modules compute what the stock ``forward`` does, on whole patches, and read a mask beside each
input: no step depends on NaN, which some runtimes lose, nor on the values of the batch.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tscompress.layers.sized_attention import SizedT5Attention, same_sizes
from tscompress.runtime.graph import OUTPUT
from tscompress.runtime.quantiles import FloatArray


@dataclass(frozen=True)
class GraphSource:
    """A module to export.

    Attributes
    ----------
    module
        Its arguments are ``inputs``, in order; its results are ``outputs``.
    inputs
        Name to an example.
    sizes
        Name to dimension to the name of its size, which is free; ``"patches"`` stands for as many
        patches as are named so, a multiple of ``patch_size`` steps.
    patch_size
        Steps in a patch.
    whole
        Names within ``module`` of parts that int8 leaves as they are, such as what writes the
        outputs.
    outputs
        Names. One is the quantiles ``[B, Q, H]``.
    listed
        How many of the inputs, the last ones, are one argument, a list.
    weights_only
        Whether float16 stores weights in half precision, and computes in float32.
    """

    module: nn.Module
    inputs: Mapping[str, Tensor]
    sizes: Mapping[str, Mapping[int, str]]
    patch_size: int = 1
    whole: tuple[str, ...] = ("model.output_patch_embedding",)
    outputs: tuple[str, ...] = (OUTPUT,)
    listed: int = 0
    weights_only: bool = False


class Exportable(ABC):
    """A family of which models can be exported, in one or several graphs.

    Attributes
    ----------
    compared_values
        What is compared of a graph and its source.
    page_name
        Name for readers of a page that forecasts in a browser; None: such a page cannot compute its
        forecasts.
    """

    compared_values: ClassVar[str] = "quantiles"
    page_name: ClassVar[str | None] = None

    @abstractmethod
    def graph_sources(self, model: nn.Module) -> Mapping[str, GraphSource]:
        """File name to what is exported of a model, which is copied.

        Raises
        ------
        UnsupportedModelError
            Models with these settings cannot be exported.
        """

    @abstractmethod
    def card_notes(self, settings: Mapping[str, Any]) -> str:
        """Notes of a card on inputs and outputs; ``settings`` is the ``chronos_config``."""

    @abstractmethod
    def compared(
        self, pipeline: Any, forecaster: Any, contexts: Sequence[FloatArray]
    ) -> tuple[FloatArray, FloatArray]:
        """:attr:`compared_values` of a graph and of its source, ``[B, ...]`` each.

        Parameters
        ----------
        pipeline, forecaster
            Of the source, and of its export.
        contexts
            ``[T]`` each, NaN where missing.
        """


def exportable_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with unfused attention of the same sizes, which exporters can read."""
    found = copy.deepcopy(model).cpu().eval()
    for module in found.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            config._attn_implementation = "eager"  # type: ignore[union-attr]
    for name, module in list(found.named_modules()):
        if isinstance(module, SizedT5Attention):
            found.set_submodule(name, same_sizes(module))
    return found.requires_grad_(False)


class Scaling(nn.Module):
    """Instance normalisation of the observed steps, and its inverse, in float32.

    Parameters
    ----------
    norm
        Chronos' ``InstanceNorm``.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.eps, self.use_arcsinh = float(norm.eps), bool(norm.use_arcsinh)

    def fit(self, values: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation ``[B, 1]`` of ``values`` ``[B, T]`` where observed."""
        count = observed.sum(-1, keepdim=True)
        some, divisor = count > 0, count.clamp_min(1)
        loc = values.sum(-1, keepdim=True) / divisor
        # Before the square: that of a masked step may overflow, and no product with 0 mends it.
        squares = torch.where(observed > 0, values - loc, 0.0).square()
        scale = torch.where(some, (squares.sum(-1, keepdim=True) / divisor).sqrt(), 1.0)
        return loc, torch.where(scale == 0, self.eps, scale)

    def forward(self, values: Tensor, observed: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Values ``[B, T]`` scaled by those of :meth:`fit`, 0 where not ``observed`` ``[B, T]``."""
        scaled = torch.where(observed > 0, values - loc, 0.0) / scale
        return scaled.arcsinh() if self.use_arcsinh else scaled

    def inverse(self, scaled: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Values of ``scaled`` ``[B, Q, H]``."""
        values = scaled.float()
        values = values.sinh() if self.use_arcsinh else values
        return values * scale[..., None] + loc[..., None]


def observed_values(values: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Values and mask, ``[B, T]`` as both arguments, 0 where a step is masked or NaN."""
    there = (observed > 0) & ~values.isnan()
    return torch.where(there, values, 0.0), there.to(values.dtype)


def patched(values: Tensor, size: int) -> Tensor:
    """``[B, S, size]`` of ``[B, S size]``."""
    return torch.unflatten(values, -1, (-1, size))


class _PatchGraph(nn.Module):
    """A model that reads patches of scaled series, as a graph.

    Parameters
    ----------
    model
        A copy of :func:`exportable_copy`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.scaling = Scaling(model.instance_norm)


class BoltGraph(_PatchGraph):
    """Chronos-Bolt from a context and its mask to quantiles."""

    def forward(self, context: Tensor, observed: Tensor) -> Tensor:
        """Quantiles ``[B, Q, H]``.

        Parameters
        ----------
        context, observed
            ``[B, S P]``; 1 where a step is observed.
        """
        model, settings = self.model, self.model.chronos_config
        dtype = model.input_patch_embedding.hidden_layer.weight.dtype
        values, there = observed_values(context, observed)
        loc, scale = self.scaling.fit(values, there)
        scaled = self.scaling(values, there, loc, scale)
        parts = [patched(one, settings.input_patch_size) for one in (scaled, there)]
        embedded = model.input_patch_embedding(torch.cat(parts, dim=-1).to(dtype))
        mask = (parts[1].sum(-1) > 0).to(dtype)  # [B, S]
        if settings.use_reg_token:
            embedded = torch.cat([embedded, _reg_token(model, embedded)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        encoded = model.encoder(attention_mask=mask, inputs_embeds=embedded)[0]
        decoded = model.decode(embedded, mask, encoded)
        shape = (len(model.chronos_config.quantiles), settings.prediction_length)
        quantiles = model.output_patch_embedding(decoded)[:, 0].unflatten(-1, shape)
        return self.scaling.inverse(quantiles, loc, scale)


class Chronos2Graph(_PatchGraph):
    """Chronos-2 from contexts, groups and known futures, each with its mask, to quantiles."""

    def forward(
        self,
        context: Tensor,
        observed: Tensor,
        group_ids: Tensor,
        future: Tensor,
        future_observed: Tensor,
    ) -> Tensor:
        """Quantiles ``[B, Q, F P]``.

        Parameters
        ----------
        context, observed
            ``[B, S P]``; 1 where a step is observed.
        group_ids
            ``[B]``, integers; series of one group attend to each other.
        future, future_observed
            ``[B, F P]``: values that are known ahead; 1 where there is one.
        """
        values, there = observed_values(context, observed)
        known, known_there = observed_values(future, future_observed)
        scaled = self.scaling(known, known_there, *self.scaling.fit(values, there))
        ahead = self.embedding(self._time(0, known), scaled, known_there)
        return self.quantiles(context, observed, ahead, group_ids)

    def quantiles(
        self, context: Tensor, observed: Tensor, ahead: Tensor, group_ids: Tensor | None
    ) -> Tensor:
        """Quantiles ``[B, Q, F P]``, of embedded patches of the future ``[B, F, d]``."""
        model = self.model
        values, there = observed_values(context, observed)
        loc, scale = self.scaling.fit(values, there)
        scaled = self.scaling(values, there, loc, scale)
        past = self.embedding(self._time(-context.shape[1], values), scaled, there)
        data = patched(there, model.chronos_config.input_patch_size)
        mask = (data.sum(-1) > 0).to(past.dtype)  # [B, S]
        ones = torch.ones_like(ahead[..., 0])  # [B, F]: every patch of the future is attended to
        parts, masks = [past, ahead], [mask, ones]
        if model.chronos_config.use_reg_token:
            parts.insert(1, _reg_token(model, past))
            masks.insert(1, torch.ones_like(mask[:, :1]))
        hidden, mask = torch.cat(parts, dim=1), torch.cat(masks, dim=1)
        encoded = self._encoded(hidden, mask, group_ids, read=ahead.shape[1])
        levels = len(model.chronos_config.quantiles)
        head = model.output_patch_embedding(encoded)  # [B, F, Q P]
        quantiles = head.unflatten(-1, (levels, -1)).transpose(1, 2).flatten(2)
        return self.scaling.inverse(quantiles, loc, scale)

    def _time(self, start: int, values: Tensor) -> Tensor:
        """Encoded time of steps from ``start``, as many as ``values`` ``[B, T]`` has."""
        time = torch.arange(start, start + values.shape[1], dtype=torch.float32)
        return (time / float(self.model.chronos_config.time_encoding_scale)).expand_as(values)

    def embedding(self, time: Tensor, scaled: Tensor, there: Tensor) -> Tensor:
        """Embedded patches ``[B, S, d]`` of encoded time, scaled values and mask ``[B, S P]``."""
        layer, size = self.model.input_patch_embedding, self.model.chronos_config.input_patch_size
        parts = torch.cat([patched(one, size) for one in (time, scaled, there)], dim=-1)
        found: Tensor = layer(parts.to(layer.hidden_layer.weight.dtype))
        return found

    def _encoded(self, hidden: Tensor, mask: Tensor, group_ids: Tensor | None, read: int) -> Tensor:
        """Output of the encoder at the last ``read`` positions, ``[B, read, d]``.

        Of the others the last layer needs keys and values of time attention, and nothing more.

        Parameters
        ----------
        hidden, mask
            Embedded patches ``[B, S, d]``; 1 where one has data, ``[B, S]``.
        group_ids
            None: the model has no group attention.
        """
        lowest = torch.finfo(hidden.dtype).min
        encoder = self.model.encoder
        across = None
        if group_ids is not None:
            together = (group_ids[:, None] == group_ids[None, :]).to(mask.dtype)  # [B, B]
            seen = together[None] * mask.transpose(0, 1)[:, None, :]  # [S, B, B]
            across = (1 - seen[:, None]) * lowest
        positions = torch.arange(hidden.shape[1])[None]
        over_time = (1 - mask[:, None, None, :]) * lowest
        *blocks, last = encoder.block
        for block in blocks:
            hidden = block(
                hidden,
                position_ids=positions,
                attention_mask=over_time,
                group_time_mask=across,
            )[0]
        time, group, feed_forward = last.layer
        hidden = time(hidden, attention_mask=over_time, position_ids=positions)[0][:, -read:]
        hidden = group(hidden, attention_mask=None if across is None else across[-read:])[0]
        found: Tensor = encoder.final_layer_norm(feed_forward(hidden))
        return found


def _reg_token(model: Any, embedded: Tensor) -> Tensor:
    """The REG token's embedding of each series, ``[B, 1, d]``."""
    token = model.shared.weight[model.config.reg_token_id]
    found: Tensor = token.expand(embedded.shape[0], 1, -1)
    return found
