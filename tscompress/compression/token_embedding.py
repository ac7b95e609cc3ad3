"""A token embedding of lower rank: the rows that a Chronos-T5 reads and scores, projected.

Of quantized values the embedding has a low ε-rank (Yu et al., 2025, sec. 2), and lower still
where tokens count by how often they occur. The principal directions of the rows, so weighted, stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.calibration import fed_positions
from tscompress.data.batch import ForecastBatch
from tscompress.errors import FactorizationError
from tscompress.families.registry import adapter_of
from tscompress.io.untrusted import single_line
from tscompress.layers.token_embedding import replace_tokens_
from tscompress.plan.layer_plans import TOKENS, EmbeddingPlan

#: What a token that never occurs counts, as a share of the mean.
RARE = 0.1


def token_usage(loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> Tensor:
    """How often each token is read in the batches, by the encoder or the decoder, float64 ``[V]``.

    The mean is 1, and tokens that never occur have :data:`RARE`.
    """
    model: Any = loaded.model
    found = torch.zeros(int(model.config.vocab_size), dtype=torch.float64)
    adapter = adapter_of(loaded.family)
    for batch in batches:
        inputs = adapter.inputs(loaded.forecaster, batch)
        fed = fed_positions(loaded, batch)
        assert fed is not None  # families that have a table draw samples
        read = inputs["input_ids"][inputs["attention_mask"].bool()]
        for tokens in (read, inputs["decoder_input_ids"][fed.to(read.device)]):
            found += torch.bincount(tokens.cpu(), minlength=len(found))
    usage = found / found.mean() + RARE
    return usage / usage.mean()


@torch.no_grad()
def principal_rows(loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> Tensor:
    """Principal directions of the rows of embedding and head, side by side, float64 ``[D, D]``.

    Columns, in descending order of energy; ``D`` is ``d_model``, or twice that of a head of its
    own. Rows are weighted by :func:`token_usage`.

    Raises
    ------
    FactorizationError
        The weights are not finite.
    """
    rows = _rows(loaded.model)
    usage = token_usage(loaded, batches).to(rows.device)
    moment = rows.T @ (usage[:, None] * rows)
    return _directions(moment)


def _directions(moment: Tensor) -> Tensor:
    """Eigenvectors of a second moment ``[D, D]``, of most energy first."""
    if not bool(torch.isfinite(moment).all()):
        raise FactorizationError(f"{TOKENS}: the token embedding is not finite.")
    try:
        found: Tensor = torch.linalg.eigh(moment).eigenvectors.flip(1)
    except LinAlgError as error:
        raise FactorizationError(f"{TOKENS}: {single_line(error)}.") from None
    return found


def _tables(model: Any) -> list[Tensor]:
    """The embedding, and the head where it has a table of its own."""
    tables = [model.shared.weight]
    if model.lm_head.weight is not model.shared.weight:
        tables.append(model.lm_head.weight)
    return tables


def _rows(model: Any) -> Tensor:
    """Embedding and head side by side, each of unit mean square, float64 ``[V, D]``."""
    tables = [table.detach().to(torch.float64) for table in _tables(model)]
    return torch.cat([table / _scale(table) for table in tables], dim=1)


def _scale(table: Tensor) -> Tensor:
    return table.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)


@torch.no_grad()
def project_rows_(loaded: LoadedModel, directions: Tensor, rank: int) -> None:
    """Project the rows of embedding and head on the first ``rank`` principal ``directions``."""
    kept = directions[:, :rank]
    projected = _rows(loaded.model) @ kept @ kept.T
    tables = _tables(loaded.model)
    parts = projected.chunk(len(tables), dim=1)
    for table, part in zip(tables, parts, strict=True):
        table.copy_(part * _scale(table.to(torch.float64)))


@contextmanager
def projected_rows(loaded: LoadedModel, directions: Tensor, rank: int) -> Iterator[None]:
    """The same for a while."""
    before = [table.detach().clone() for table in _tables(loaded.model)]
    try:
        project_rows_(loaded, directions, rank)
        yield
    finally:
        with torch.no_grad():
            for table, old in zip(_tables(loaded.model), before, strict=True):
                table.copy_(old)


@torch.no_grad()
def factor_rows_(loaded: LoadedModel, plan: EmbeddingPlan) -> None:
    """Let the projected rows of embedding and head be one table and two projections; exact.

    Raises
    ------
    PlanError
        The model has no such table and head.
    FactorizationError
        The weights are not finite.
    """
    model: Any = loaded.model
    tables = _tables(model)
    scales = [_scale(table.to(torch.float64)) for table in tables]
    rows = _rows(model)
    kept = _directions(rows.T @ rows)[:, : plan.rank]  # [D, rank]
    parts = kept.chunk(len(tables), dim=0)
    trained = model.shared.weight.requires_grad
    replace_tokens_(model, plan)
    model.shared.table.weight.copy_(rows @ kept)
    model.shared.up.weight.copy_(parts[0] * scales[0])
    model.lm_head.down.weight.copy_((parts[-1] * scales[-1]).T)
    for module in (model.shared, model.lm_head):
        module.requires_grad_(trained)
