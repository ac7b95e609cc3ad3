"""Chronos-Bolt: T5 stacks that read patches and forecast all quantiles in one decoder step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from chronos import BaseChronosPipeline, ChronosBoltPipeline
from chronos.chronos_bolt import ChronosBoltModelForForecasting
from torch import Tensor, nn
from transformers import T5Config

from tscompress.families.base import ModelShape, Pass, PredictCall, Windows
from tscompress.families.graphs import BoltGraph, GraphSource, exportable_copy
from tscompress.families.patches import (
    PATCH_DEFAULTS,
    PatchFamily,
    patch_count,
    patch_size,
    per_observed_step,
)
from tscompress.families.t5_stack import describe_t5, shape_settings
from tscompress.plan.architecture import Architecture
from tscompress.runtime.record import GRAPH_FILE


class ChronosBolt(PatchFamily):
    """Adapter of Chronos-Bolt."""

    name = "chronos-bolt"
    page_name = "Chronos-Bolt"
    stock_class = ChronosBoltModelForForecasting
    pipeline_class = ChronosBoltPipeline
    needed_settings = ("d_model", "decoder_start_token_id")
    even_rows = True  # sizes by layer keep more so (eval/notes/folding.md)
    # With norms as large as the teacher's it learns faster, and without plain trends in its corpus
    # it loses trends (eval/notes/recovery.md).
    defaults = replace(
        PATCH_DEFAULTS,
        trend_weight=0.4,
        learning_rate_by_distance=5e-3,
        keeps_norm_sizes=True,
        recovery_scheme=3,
    )

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("chronos_pipeline_class") == "ChronosBoltPipeline")

    def describe(self, model: nn.Module) -> Architecture:
        return describe_t5(self.name, model, single_token=True)

    def patch_features(self, model: nn.Module, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised values and mask ``[B, S, 2 P]``, and which patches have data ``[B, S]``."""
        bolt: Any = model
        scaled, _ = bolt.instance_norm(contexts)
        values = bolt.patch(scaled)
        mask = torch.isfinite(values)
        features = torch.cat([values.nan_to_num(), mask.to(values.dtype)], dim=-1)
        return features, mask.any(dim=-1)

    def inputs(self, pipeline: BaseChronosPipeline, batch: Windows) -> dict[str, Any]:
        return {"context": batch.context}

    def stock_loss(self, model: nn.Module, batch: Windows) -> Tensor:
        observed = torch.isfinite(batch.target)
        output = model(
            context=batch.context, target=torch.nan_to_num(batch.target), target_mask=observed
        )
        return per_observed_step(output.loss, observed, output.quantile_preds)

    def graph_sources(self, model: nn.Module) -> Mapping[str, GraphSource]:
        size = patch_size(model)
        steps = torch.zeros(2, 2 * size)
        free = {0: "batch", 1: "patches"}
        source = GraphSource(
            module=BoltGraph(exportable_copy(model)),
            inputs={"context": steps, "observed": torch.ones_like(steps)},
            sizes={"context": free, "observed": free},
            patch_size=size,
        )
        return {GRAPH_FILE: source}

    def one_embedding(self, config: Any) -> bool:
        return bool(config.decoder_start_token_id == getattr(config, "reg_token_id", None))

    def attended_patches(self, features: Tensor) -> Tensor:
        # A patch ends with its mask; an all-zero mask is padding or a gap.
        return (features[:, features.shape[1] // 2 :] > 0).any(1)

    def passes(self, settings: Mapping[str, Any], call: PredictCall) -> Iterator[Pass]:
        # From the second pass on, each quantile continues its own path.
        for done in range(0, call.horizon, settings["prediction_length"]):
            context = min(call.context_length + done, settings["context_length"])
            patches = patch_count(settings, context)
            yield Pass(
                series=call.batch_size * (len(settings["quantiles"]) if done else 1),
                encoder_tokens=patches + settings.get("use_reg_token", False),
                input_patches=patches,
                paths=1,
                outputs=1,
            )

    def stock_config(self, shape: ModelShape) -> T5Config:
        return T5Config(
            **shape_settings(shape),
            initializer_factor=0.05,
            chronos_config={
                "context_length": shape.context_length,
                "prediction_length": shape.prediction_length,
                "input_patch_size": shape.patch_size,
                "input_patch_stride": shape.patch_size,
                "quantiles": list(shape.quantiles),
                "use_reg_token": True,
            },
            chronos_pipeline_class="ChronosBoltPipeline",
            reg_token_id=1,
            vocab_size=2,
            architectures=["ChronosBoltModelForForecasting"],
        )
