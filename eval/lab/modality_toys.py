"""Small forecasters of our own with the embeddings of others, to see what an embedding is alone.

Four maps from series to vectors, each before one causal layer that forecasts what comes next: a
table of uniform bins (Chronos), a table of quantile bins of wavelet coefficients (WaveToken), a
gated map of one value (Time-MoE), and a residual MLP of a patch (TimesFM). Widths, depths and
training are ours and seconds long: the maps are theirs, the weights are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from modality_training import kept, train_
from torch import Tensor, nn
from torch.nn import functional as F

D_MODEL, HEADS, LAYERS = 128, 4, 1
BATCH, BINS, LARGEST, LENGTH, LEVELS = 8, 1024, 5.0, 128, 3
KINDS = ("tokens", "wavelet tokens", "gated value", "patches")


# --------------------------------------------------------------------------------------------------
# Series
# --------------------------------------------------------------------------------------------------


def training_series(number: int, length: int, generator: torch.Generator) -> Tensor:
    """Sums of two waves, a trend and autocorrelated noise, in units of mean size: ``[B, T]``."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(number, 1, generator=generator)

    time = torch.arange(length)[None, :]
    waves = sum(
        uniform(0, 1) * torch.sin(2 * math.pi * (time / uniform(4, 64) + uniform(0, 1)))
        for _ in range(2)
    )
    steps = torch.randn(number, length, generator=generator)
    noise = F.conv1d(F.pad(steps, (15, 0))[:, None], 0.8 ** torch.arange(15, -1, -1.0)[None, None])
    series = waves + uniform(-1, 1) * time / length + uniform(0, 0.5) * noise[:, 0]
    return series / series.abs().mean(1, keepdim=True).clamp_min(1e-3)


def haar(series: Tensor, levels: int = LEVELS) -> Tensor:
    """Orthonormal wavelet coefficients of ``[B, T]``: approximation, then details, coarse first."""
    details = []
    for _ in range(levels):
        even, odd = series[:, ::2], series[:, 1::2]
        details.append((even - odd) / math.sqrt(2))
        series = (even + odd) / math.sqrt(2)
    return torch.cat([series, *reversed(details)], dim=1)


# --------------------------------------------------------------------------------------------------
# Embeddings
# --------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """Bins of values to rows of a table, small at first so that training shows in it."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)
        self.table = nn.Embedding(len(edges) + 1, D_MODEL)
        nn.init.normal_(self.table.weight, std=0.05)

    def ids(self, values: Tensor) -> Tensor:
        """The bin of each value."""
        return torch.bucketize(values.contiguous(), self.edges)

    def forward(self, values: Tensor) -> Tensor:
        return self.table(self.ids(values))


class GatedValue(nn.Module):
    """Time-MoE (Shi et al., 2025): component i of x is swish(w_i x) (v_i x)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = (nn.Linear(1, D_MODEL, bias=False) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        one = values[..., None]
        return F.silu(self.gate(one)) * self.value(one)


class Patches(nn.Module):
    """TimesFM (Das et al., 2024): a residual MLP of patches of 32 values."""

    size = 32

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(self.size, 2 * D_MODEL)
        self.outer = nn.Linear(2 * D_MODEL, D_MODEL)
        self.skip = nn.Linear(self.size, D_MODEL)

    def forward(self, values: Tensor) -> Tensor:
        patches = values.unfold(-1, self.size, self.size)  # [B, T / 32, 32]
        return self.outer(F.silu(self.inner(patches))) + self.skip(patches)


def wavelet_edges(generator: torch.Generator) -> Tensor:
    """Edges of equally likely bins of the coefficients of training series."""
    coefficients = haar(training_series(256, LENGTH, generator)).flatten()
    shares = torch.linspace(0, 1, BINS + 1)[1:-1]
    return torch.quantile(coefficients, shares)


class Toy(nn.Module):
    """An embedding, a causal layer, and a head for the next bin, value or patch."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        makers: dict[str, Callable[[], nn.Module]] = {
            "tokens": lambda: Table(torch.linspace(-LARGEST, LARGEST, BINS - 1)),
            "wavelet tokens": lambda: Table(wavelet_edges(torch.Generator().manual_seed(seed))),
            "gated value": GatedValue,
            "patches": Patches,
        }
        self.embedding = makers[kind]()
        layer = nn.TransformerEncoderLayer(
            D_MODEL, HEADS, 4 * D_MODEL, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, D_MODEL))
        outputs = {"gated value": 1, "patches": Patches.size}
        self.head = nn.Linear(D_MODEL, outputs.get(kind, BINS))

    def embedded(self, series: Tensor) -> Tensor:
        """Vectors of series in units of mean size, ``[B, T]`` to ``[B, L, D_MODEL]``."""
        return self.embedding(haar(series) if self.kind == "wavelet tokens" else series)

    def loss(self, series: Tensor) -> Tensor:
        """Of the next bin, value or patch at every position."""
        vectors = self.embedded(series)
        length = vectors.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.layers(vectors + self.place[:length], mask=mask, is_causal=True)
        found = self.head(states[:, :-1])
        if isinstance(self.embedding, Table):
            values = haar(series) if self.kind == "wavelet tokens" else series
            return F.cross_entropy(found.flatten(0, 1), self.embedding.ids(values)[:, 1:].flatten())
        wanted = series[..., None] if self.kind == "gated value" else None
        if wanted is None:
            wanted = series.unfold(-1, Patches.size, Patches.size)
        return F.smooth_l1_loss(found, wanted[:, 1:])


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------


def trained_toy(kind: str, steps: int, directory: Path) -> Toy:
    """A toy after ``steps`` steps, read from ``directory`` if it is there."""
    toy, generator = Toy(kind), torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        return toy.loss(training_series(BATCH, LENGTH, generator))

    path = directory / f"toy-{kind.replace(' ', '-')}-{steps}.safetensors"
    return kept(toy, path, lambda: train_(toy, loss, steps, 2e-3, kind))
