"""Token embedding and output head of a Chronos-T5 as one table of lower rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tscompress.errors import PlanError
from tscompress.plan.layer_plans import EmbeddingPlan


class LowRankEmbedding(nn.Module):
    """Rows of a table ``[vocabulary, rank]``, projected to the residual stream."""

    def __init__(self, table: nn.Embedding, d_model: int) -> None:
        super().__init__()
        self.table = table
        self.up = _projection(table, table.embedding_dim, d_model)

    @property
    def weight(self) -> Tensor:
        """The embedding of each token, ``[vocabulary, d_model]``, computed."""
        return self.table.weight @ self.up.weight.T

    def forward(self, tokens: Tensor) -> Tensor:
        """``[..., T]`` to ``[..., T, d_model]``."""
        embedded: Tensor = self.up(self.table(tokens))
        return embedded


class LowRankHead(nn.Module):
    """Scores of tokens: their rows of the table, which the embedding has, times a projection."""

    def __init__(self, table: nn.Embedding, d_model: int) -> None:
        super().__init__()
        self.table = table
        self.down = _projection(table, d_model, table.embedding_dim)

    def forward(self, stream: Tensor) -> Tensor:
        """``[..., d_model]`` to ``[..., vocabulary]``."""
        return functional.linear(self.down(stream), self.table.weight)


def _projection(table: nn.Embedding, inputs: int, outputs: int) -> nn.Linear:
    weight = table.weight
    return nn.Linear(inputs, outputs, bias=False, device=weight.device, dtype=weight.dtype)


def replace_tokens_(model: nn.Module, plan: EmbeddingPlan) -> None:
    """Replace token embedding and output head by empty ones of the planned rank.

    Raises
    ------
    PlanError
        The model has no such table and head, or others than the plan's.
    """
    t5: Any = model
    old, head = getattr(model, plan.name, None), getattr(model, "lm_head", None)
    if not (isinstance(old, nn.Embedding) and isinstance(head, nn.Linear)):
        raise PlanError(
            "the plan has a token embedding of lower rank; only a Chronos-T5 that has none yet "
            "can have it."
        )
    found = (old.num_embeddings, old.embedding_dim)
    if found != (plan.vocabulary, plan.d_model):
        raise PlanError(
            f"the plan has a token embedding of {plan.vocabulary} tokens and d_model "
            f"{plan.d_model}; the model has {found[0]} and {found[1]}."
        )
    weight = old.weight
    table = nn.Embedding(plan.vocabulary, plan.rank, device=weight.device, dtype=weight.dtype)
    t5.shared = LowRankEmbedding(table, plan.d_model)
    t5.encoder.embed_tokens = t5.decoder.embed_tokens = t5.shared
    t5.lm_head = LowRankHead(table, plan.d_model)
