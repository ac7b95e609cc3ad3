"""A small in-context classifier of tables, of our own: the only tabular model here.

Rows are tokens, as in TabPFN (Hollmann et al., 2023): a row is mapped by one linear layer, the
label of a row of the context is added, and rows attend to those of the context. It is trained on
labels of random networks, so that nothing real is in it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from modality_training import kept, train_
from torch import Tensor, nn
from torch.nn import functional as F

D_MODEL, HEADS, LAYERS, FEATURES = 128, 4, 2, 20
BATCH, CONTEXT, QUERIES = 8, 60, 12


def random_tables(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tables ``[B, CONTEXT + QUERIES, FEATURES]`` and labels by a random network, half of them 1.

    Each table has 2 to 20 features; the others are 0.
    """
    rows = CONTEXT + QUERIES
    used = torch.randint(2, FEATURES + 1, (number, 1, 1), generator=generator)
    cells = torch.randn(number, rows, FEATURES, generator=generator)
    cells = cells * (torch.arange(FEATURES) < used)
    first = torch.randn(number, FEATURES, 16, generator=generator) / used.sqrt()
    second = torch.randn(number, 16, 1, generator=generator)
    score = (torch.tanh(2 * cells @ first) @ second)[..., 0]
    labels = (score > score.median(1, keepdim=True).values).long()
    return cells, labels


class TabularClassifier(nn.Module):
    """Rows as tokens; labels of the last ``QUERIES`` rows are not shown."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.row = nn.Linear(FEATURES, D_MODEL)
        self.label = nn.Embedding(2, D_MODEL)
        layer = nn.TransformerEncoderLayer(
            D_MODEL, HEADS, 4 * D_MODEL, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(D_MODEL, 2)

    def embedded(self, cells: Tensor, labels: Tensor) -> Tensor:
        """What the first layer reads, ``[B, rows, D_MODEL]``."""
        vectors = self.row(cells)
        return torch.cat(
            [vectors[:, :CONTEXT] + self.label(labels[:, :CONTEXT]), vectors[:, CONTEXT:]], dim=1
        )

    def mask(self, rows: int) -> Tensor:
        """True where a row is not read: nobody reads a query."""
        return (torch.arange(rows) >= CONTEXT).expand(rows, rows)

    def forward(self, cells: Tensor, labels: Tensor) -> Tensor:
        """Logits of the queries, ``[B, QUERIES, 2]``."""
        mask = self.mask(cells.shape[1])
        return self.head(self.layers(self.embedded(cells, labels), mask=mask)[:, CONTEXT:])


def trained_classifier(steps: int, directory: Path) -> TabularClassifier:
    """The classifier after ``steps`` steps, read from ``directory`` if it is there."""
    model, generator = TabularClassifier(), torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        cells, labels = random_tables(BATCH, generator)
        return F.cross_entropy(model(cells, labels).flatten(0, 1), labels[:, CONTEXT:].flatten())

    path = directory / f"tabular-{steps}.safetensors"
    return kept(model, path, lambda: train_(model, loss, steps, 1e-3, "tabular"))


@torch.no_grad()
def accuracy(model: TabularClassifier, tables: int = 200) -> tuple[float, float]:
    """Shares of new queries that the classifier and a ridge regression on the context get right."""
    cells, labels = random_tables(tables, torch.Generator().manual_seed(10**6))
    right = (model(cells, labels).argmax(-1) == labels[:, CONTEXT:]).double().mean()
    context, targets = cells[:, :CONTEXT], 2.0 * labels[:, :CONTEXT, None] - 1
    gram = context.mT @ context + torch.eye(FEATURES)
    weights = torch.linalg.solve(gram, context.mT @ targets)
    linear = ((cells[:, CONTEXT:] @ weights)[..., 0] > 0).long()
    return float(right), float((linear == labels[:, CONTEXT:]).double().mean())
