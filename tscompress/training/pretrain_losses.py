"""Losses of a pretraining: those of the official training code, with smoothed labels for T5.

Pinball loss on scaled targets for models of patches, cross-entropy on tokens for T5, with one
addition: ``label_smoothing_bins`` spreads a target token over its neighbours on the value axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from chronos.chronos import ChronosConfig, ChronosTokenizer
from torch import nn
from transformers import PreTrainedModel

from tscompress.data.batch import ForecastBatch
from tscompress.families.registry import adapter_of_model

#: Of a model, or a wrapper around it, on a batch.
Loss = Callable[[nn.Module, ForecastBatch], torch.Tensor]


class TokenLoss:
    """Cross-entropy on tokens, optionally smoothed over neighbouring bins.

    Parameters
    ----------
    prediction_length
        Targets of this many steps end with EOS.
    smoothing_bins
        See :func:`token_cross_entropy`.
    """

    def __init__(
        self, tokenizer: ChronosTokenizer, prediction_length: int, smoothing_bins: float = 0.0
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.prediction_length = prediction_length
        self.smoothing_bins = smoothing_bins

    def __call__(self, model: nn.Module, batch: ForecastBatch) -> torch.Tensor:
        if not torch.isfinite(batch.target).any():  # no targets, so no mean
            return 0.0 * next(model.parameters()).sum()
        device = batch.context.device
        # The tokenizer's bin edges are on the CPU.
        context, target = batch.context.cpu(), batch.target.cpu()
        input_ids, attention_mask, scale = self.tokenizer.context_input_transform(context)
        labels, observed, _ = self.tokenizer._input_transform(target, scale=scale)
        if batch.target.shape[-1] == self.prediction_length:
            labels, observed = self.tokenizer._append_eos_token(labels, observed)
        labels, observed = labels.to(device), observed.to(device)
        start = torch.zeros_like(labels[:, :1])
        logits = model(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            decoder_input_ids=torch.cat([start, labels[:, :-1]], dim=1),
        ).logits  # [B, H, V]
        return token_cross_entropy(logits[observed], labels[observed], self.smoothing_bins)


def token_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, smoothing_bins: float, n_special_tokens: int = 2
) -> torch.Tensor:
    """Mean cross-entropy of ``logits`` ``[N, V]`` against ``labels`` ``[N]``.

    With ``smoothing_bins`` s > 0 the target of a bin is a Gaussian of standard deviation s bins
    around it (cut at 3 s and at the ends of the vocabulary); special tokens stay one-hot.
    """
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    if smoothing_bins <= 0:
        return nn.functional.nll_loss(log_probabilities, labels)
    radius = math.ceil(3 * smoothing_bins)
    offset = torch.arange(-radius, radius + 1, device=labels.device)
    neighbours = labels[:, None] + offset[None, :]  # [N, 2 radius + 1]
    vocabulary = logits.shape[-1]
    weight = torch.exp(-0.5 * (offset / smoothing_bins) ** 2).expand_as(neighbours).clone()
    weight[(neighbours < n_special_tokens) | (neighbours >= vocabulary)] = 0.0
    special = labels < n_special_tokens
    weight[special] = (offset == 0).to(weight)
    weight = weight / weight.sum(dim=-1, keepdim=True)
    gathered = log_probabilities.gather(1, neighbours.clamp(0, vocabulary - 1))
    return -(weight * gathered).sum(dim=-1).mean()


def loss_function(model: PreTrainedModel, smoothing_bins: float = 0.0) -> Loss:
    """The training loss of the model's family; only Chronos-T5 has labels to smooth."""
    family = adapter_of_model(model)
    if not family.draws_samples:
        return family.stock_loss
    config = ChronosConfig(**model.config.chronos_config)
    return TokenLoss(config.create_tokenizer(), config.prediction_length, smoothing_bins)
