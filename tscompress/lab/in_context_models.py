"""Small transformers that learn in context, made from scratch.

Four layouts of labelled examples as tokens and shifted causal attention (Dange et al., section 3),
and a looped transformer that reads instruments (Liang et al., 2025, section 4). Projections are
named Linear layers, ``q``, ``k``, ``v`` and ``o``, without biases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tscompress.errors import UsageError
from tscompress.lab.in_context import Array, RegressionPrompts
from tscompress.lab.instruments import InstrumentPrompts

AttentionKind = Literal["full", "causal", "shifted"]
LayoutName = Literal["interleaved", "aligned", "lagged", "shifted"]

# --------------------------------------------------------------------------------------------------
# Attention
# --------------------------------------------------------------------------------------------------


def shifted_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, linear: bool = False, size: int | None = None
) -> Tensor:
    """Key j meets value j + 1, and the last key the last value (Dange et al., eq. 1).

    Parameters
    ----------
    q, k, v
        ``[..., T, d_h]``. Scores are divided by sqrt(d_h), which eq. 1 leaves out.
    linear
        Scores divided by t take the place of their softmax.
    size
        What d_h was before heads were made smaller, which scores are still divided by the root of.

    Returns
    -------
    Tensor
        ``[..., T, d_h]``; output t depends on positions up to t alone.
    """
    weights = _weights(q, k, causal=True, linear=linear, size=size)
    own = weights.diagonal(dim1=-2, dim2=-1)
    following = torch.cat([v[..., 1:, :], v[..., -1:, :]], dim=-2)
    return (weights - torch.diag_embed(own)) @ following + own[..., None] * v


def _weights(q: Tensor, k: Tensor, *, causal: bool, linear: bool, size: int | None) -> Tensor:
    """``[..., T, T]``; each row sums to 1, unless ``linear``."""
    scores = (q / math.sqrt(size or q.shape[-1])) @ k.mT
    length = scores.shape[-1]
    if linear:
        counts = torch.arange(1, length + 1, device=q.device, dtype=q.dtype)[:, None]
        return scores.tril() / counts if causal else scores / length
    if causal:
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1)


class SelfAttention(nn.Module):
    """Multi-head attention among all tokens, earlier ones, or earlier ones shifted by one.

    Heads may be made smaller, by other projections: those of values by themselves, and scores are
    divided by the root of the first size.

    Attributes
    ----------
    n_heads, d_model, head_size
        Heads, width of tokens, and width of a head when made.
    softmax
        Whether scores pass a softmax.

    Raises
    ------
    UsageError
        ``width`` is no multiple of ``heads``, as 80 is none of 12.
    """

    def __init__(
        self, width: int, heads: int, kind: AttentionKind = "full", *, linear: bool = False
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        self.n_heads, self.d_model, self.head_size = heads, width, width // heads
        self.kind, self.linear, self.softmax = kind, linear, not linear
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, T, width]`` to ``[B, T, width]``."""
        q, k, v = (
            one(hidden).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )  # [B, heads, T, d_h]
        mixed: Tensor = self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return mixed

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Outputs of the heads, ``[B, heads, T, d_h]`` like ``v``."""
        how: dict[str, Any] = {"linear": self.linear, "size": self.head_size}
        if self.kind == "shifted":
            return shifted_causal_attention(q, k, v, **how)
        return _weights(q, k, causal=self.kind == "causal", **how) @ v


class ShiftedCausalAttention(SelfAttention):
    """Shifted causal attention with its projections (Dange et al., eq. 1)."""

    def __init__(self, width: int, heads: int, *, linear: bool = False) -> None:
        super().__init__(width, heads, "shifted", linear=linear)


def check_heads(width: int, heads: int) -> None:
    """Refuse a width that heads of one size do not fill; UsageError."""
    if heads < 1 or width < 1 or width % heads:
        below, above = max(1, width // max(heads, 1)) * heads, (width // max(heads, 1) + 1) * heads
        raise UsageError(
            f"width is {width} and heads {heads}; give a multiple of the heads, such as "
            f"{below} or {above}."
        )


class AttentionLayer(nn.Module):
    """A norm, attention, and the stream that they add to: ``[B, T, width]`` to the same."""

    def __init__(self, attention: SelfAttention, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layer_norm = norm or nn.LayerNorm(attention.d_model)
        self.attention = attention

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.as_tensor(self.attention(self.layer_norm(hidden)))


class FeedForwardLayer(nn.Module):
    """A norm, four times as many hidden units, and the stream that they add to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(width)
        self.wi, self.wo = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        units = nn.functional.gelu(self.wi(self.layer_norm(hidden)))
        return hidden + torch.as_tensor(self.wo(units))


class Block(nn.Module):
    """A layer of GPT-2, as its sublayers one after the other."""

    def __init__(self, *layer: nn.Module) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layer)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, T, width]`` to ``[B, T, width]``."""
        for part in self.layer:
            hidden = part(hidden)
        return hidden

    @classmethod
    def of(cls, width: int, heads: int, kind: AttentionKind, *, linear: bool = False) -> Block:
        """Attention and a feed-forward."""
        attention = AttentionLayer(SelfAttention(width, heads, kind, linear=linear))
        return cls(attention, FeedForwardLayer(width))


class Encoder(nn.Module):
    """Layers, named as those of T5, which compression walks; the norm after the last is apart."""

    def __init__(self, block: Iterable[Block], norm: nn.Module) -> None:
        super().__init__()
        self.block, self.final_layer_norm = nn.ModuleList(block), norm

    def forward(self, stream: Tensor) -> Tensor:
        """``[B, T, width]`` to the same, without the norm: a looped model comes here again."""
        for one in self.block:
            stream = one(stream)
        return stream


# --------------------------------------------------------------------------------------------------
# Layouts: how examples become tokens, and where forecasts are read
# --------------------------------------------------------------------------------------------------


class Lagged:
    """Tokens (x_t, y_{t-1}), y_0 = 0; forecasts at every token.

    With patches of p points a token holds the x of its patch and the y of the patch before.
    """

    attention: AttentionKind = "causal"

    def width_in(self, dim: int, patch: int) -> int:
        """Numbers of a token."""
        return patch * (dim + 1)

    def length(self, points: int, patch: int) -> int:
        """Tokens of a prompt."""
        return points // patch

    def tokens(self, x: Tensor, y: Tensor, patch: int) -> Tensor:
        """``[B, T / patch, patch (d + 1)]``."""
        batch, points = y.shape
        x = x.reshape(batch, points // patch, -1)
        y = y.reshape(batch, points // patch, patch)
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)
        return torch.cat([x, before], dim=-1)

    def read(self, outputs: Tensor) -> Tensor:
        """``[B, T]`` of outputs ``[B, T / patch, patch]``."""
        return outputs.flatten(1)


class Shifted(Lagged):
    """Tokens of :class:`Lagged` under shifted causal attention, so that x_j meets y_j."""

    attention: AttentionKind = "shifted"


class Interleaved(Lagged):
    """Tokens x_1, (y_1, 0, ...), x_2, ...; forecasts at those of x (Garg et al., 2022)."""

    def width_in(self, dim: int, patch: int) -> int:
        """The x of a token; those of y are padded to it."""
        return dim

    def length(self, points: int, patch: int) -> int:
        """Two tokens a point."""
        return 2 * points

    def tokens(self, x: Tensor, y: Tensor, patch: int) -> Tensor:
        """``[B, 2 T, d]``."""
        labels = torch.cat([y[..., None], torch.zeros_like(x[..., 1:])], dim=-1)
        return torch.stack([x, labels], dim=2).flatten(1, 2)

    def read(self, outputs: Tensor) -> Tensor:
        """``[B, T]`` of outputs ``[B, 2 T, 1]``."""
        return outputs[:, ::2, 0]


class Aligned(Lagged):
    """Tokens (x_t, y_t), the last (x, 0); one forecast, at the last (Zhang et al., 2023)."""

    def tokens(self, x: Tensor, y: Tensor, patch: int) -> Tensor:
        """``[B, T, d + 1]``."""
        labels = torch.cat([y[:, :-1], torch.zeros_like(y[:, -1:])], dim=1)
        return torch.cat([x, labels[..., None]], dim=-1)

    def read(self, outputs: Tensor) -> Tensor:
        """``[B, 1]`` of outputs ``[B, T, 1]``."""
        return outputs[:, -1]


LAYOUTS: dict[LayoutName, Lagged] = {
    "interleaved": Interleaved(),
    "aligned": Aligned(),
    "lagged": Lagged(),
    "shifted": Shifted(),
}


class InContextRegressor(nn.Module):
    """A transformer that forecasts each y_t of a prompt from x_t and the examples before.

    Parameters
    ----------
    layout
        A key of :data:`LAYOUTS`.
    dim, points
        Covariates, and points of a prompt with the query.
    patch
        Points of a token; more than 1 for ``lagged`` and ``shifted`` alone.
    linear
        Attention without softmax.

    Raises
    ------
    UsageError
        A layout that has no patches, points that patches do not divide, or a width that heads do
        not divide.
    """

    def __init__(
        self,
        layout: LayoutName,
        *,
        dim: int,
        points: int,
        width: int,
        heads: int,
        layers: int,
        patch: int = 1,
        linear: bool = False,
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise UsageError(f"layout is {layout!r}; give one of {', '.join(LAYOUTS)}.")
        if patch < 1 or (patch > 1 and layout not in ("lagged", "shifted")):
            raise UsageError(f"patch is {patch} for {layout!r}; give 1, or a layout with lags.")
        if points % patch:
            raise UsageError(f"{points} points are no multiple of the patch, {patch}.")
        self.layout, self.patch = LAYOUTS[layout], patch
        self.read_in = nn.Linear(self.layout.width_in(dim, patch), width)
        self.positions = nn.Embedding(self.layout.length(points, patch), width)
        kind = self.layout.attention
        blocks = [Block.of(width, heads, kind, linear=linear) for _ in range(layers)]
        self.encoder = Encoder(blocks, nn.LayerNorm(width))
        self.read_out = nn.Linear(width, patch)
        _initialise(self)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Forecasts of one pass, where the layout reads them: ``[B, T]``, ``aligned`` ``[B, 1]``.

        ``x`` is ``[B, T, d]``, ``y`` ``[B, T]``; no forecast depends on its own y.
        """
        hidden = self.read_in(self.layout.tokens(x, y, self.patch))
        hidden = self.encoder(hidden + self.positions.weight[: hidden.shape[1]])
        outputs = self.read_out(self.encoder.final_layer_norm(hidden))
        forecasts: Tensor = self.layout.read(outputs)
        return forecasts

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Training loss ``[]``: the mean squared error of the forecasts of one pass."""
        forecasts: Tensor = self(x, y)
        return torch.mean((forecasts - y[:, -forecasts.shape[1] :]) ** 2)

    @torch.no_grad()
    def forecasts(self, prompts: RegressionPrompts, first: int = 0) -> Array:
        """``[B, T]``, of every point from its x and the examples before; 0 before ``first``.

        Where one pass forecasts the last point alone, there is one pass for every prefix.
        """
        device = self.read_in.weight.device
        x, y = (
            torch.as_tensor(a, dtype=torch.float32, device=device) for a in (prompts.x, prompts.y)
        )
        whole = self(x, y)
        if whole.shape[1] < y.shape[1]:
            before = [self(x[:, : t + 1], y[:, : t + 1]) for t in range(first, y.shape[1] - 1)]
            whole = torch.cat([torch.zeros_like(y[:, :first]), *before, whole], dim=1)
        return np.asarray(whole.double().cpu().numpy())


# --------------------------------------------------------------------------------------------------
# Looped
# --------------------------------------------------------------------------------------------------


class LoopedTransformer(nn.Module):
    """The same blocks applied ``loops`` times to tokens (z, x, y t, t), t = 0 at the query.

    Every token attends to every other, and there are no positions: the order of examples does not
    matter. The forecast is read at the query, the last token (Liang et al., 2025, section 4; they
    do not state read-in, masks or positions).
    """

    def __init__(
        self, p: int, q: int, *, width: int, heads: int, layers: int = 2, loops: int = 10
    ) -> None:
        super().__init__()
        self.loops = loops
        self.read_in = nn.Linear(q + p + 2, width)
        blocks = [Block.of(width, heads, "full") for _ in range(layers)]
        self.encoder = Encoder(blocks, nn.LayerNorm(width))
        self.read_out = nn.Linear(width, 1)
        _initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Forecasts ``[B]`` of tokens ``[B, n + 1, q + p + 2]``."""
        hidden = self.read_in(tokens)
        for _ in range(self.loops):
            hidden = self.encoder(hidden)
        last = self.encoder.final_layer_norm(hidden[:, -1])
        forecasts: Tensor = self.read_out(last)[:, 0]
        return forecasts

    @torch.no_grad()
    def predict(self, prompts: InstrumentPrompts) -> Array:
        """Forecasts ``[B]`` of the queries' outcomes."""
        tokens = instrument_tokens(prompts).to(self.read_in.weight.device)
        return np.asarray(self(tokens).double().cpu().numpy())


def instrument_tokens(prompts: InstrumentPrompts) -> Tensor:
    """``[B, n + 1, q + p + 2]``: instruments, regressors, outcome or 0, and 1 but at the query."""
    examples = np.concatenate(
        [prompts.z, prompts.x, prompts.y[..., None], np.ones_like(prompts.y)[..., None]], axis=-1
    )
    empty = np.zeros((len(examples), 2))
    query = np.concatenate([prompts.query_z, prompts.query_x, empty], axis=-1)[:, None]
    return torch.as_tensor(np.concatenate([examples, query], axis=1), dtype=torch.float32)


def _initialise(model: nn.Module) -> None:
    """Weights as of GPT-2: standard deviation 0.02, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
