"""Chronos-2: an encoder that attends over time, with rotary embeddings, and across series."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from chronos import BaseChronosPipeline, Chronos2Pipeline
from chronos.chronos2 import Chronos2Model
from chronos.chronos2.config import Chronos2CoreConfig
from torch import Tensor, nn

from tscompress.errors import RecipeError
from tscompress.families.base import ModelShape, Pass, PredictCall, Windows
from tscompress.families.chronos2_tasks import cross_learning_option, encoded, stock_task
from tscompress.families.covariates import Covariates, Joint, JointSeries
from tscompress.families.graphs import Chronos2Graph, GraphSource, exportable_copy
from tscompress.families.opening import CHRONOS2_NAMES, is_converted
from tscompress.families.patches import (
    PATCH_DEFAULTS,
    PatchFamily,
    patch_count,
    patch_size,
    per_observed_step,
)
from tscompress.families.stacks import stack_layers, sublayer_name
from tscompress.families.univariate import UnivariateChronos2Pipeline, univariate_source
from tscompress.layers.univariate import OwnValues, is_univariate
from tscompress.plan.architecture import Architecture, AttentionBlock, BlockKind, FeedForward
from tscompress.plan.layer_plans import stock_frequencies
from tscompress.runtime.record import GRAPH_FILE

_KINDS: tuple[BlockKind, ...] = ("time", "group")
#: It attends over as many patches ahead as it is asked for: recovery asks for one, two and four
#: (horizon, share of batches; eval/notes/recovery.md).
_HORIZONS = ((16, 0.4), (32, 0.3), (64, 0.3))
#: Quantiles whose paths go on beyond one call.
_UNROLLED = 9
_SHAPES = tuple(
    shape._replace(horizon=horizon, weight=round(share * shape.weight, 4))
    for shape in PATCH_DEFAULTS.batch_shapes
    for horizon, share in _HORIZONS
)


class Chronos2(PatchFamily):
    """Adapter of Chronos-2."""

    name = "chronos-2"
    page_name = "Chronos-2"
    stock_class = Chronos2Model
    pipeline_class = Chronos2Pipeline
    group_size = 4
    fold_damping = 0.1  # it keeps scores better (eval/notes/folding.md)
    # The loss on targets brings use of covariates back (eval/notes/recovery.md).
    defaults = replace(PATCH_DEFAULTS, batch_shapes=_SHAPES, target_weight=1.0, recovery_scheme=4)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return is_converted(config) or config.get("chronos_pipeline_class") == "Chronos2Pipeline"

    def stock_settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, **CHRONOS2_NAMES} if is_converted(config) else config

    def open_stock(
        self, directory: Path, config: Mapping[str, Any], **options: Any
    ) -> BaseChronosPipeline:
        if not is_converted(config):
            return super().open_stock(directory, config, **options)
        settings = {key: x for key, x in self.stock_settings(config).items() if key != "model_type"}
        own = Chronos2CoreConfig(**settings)
        return self.pipeline(Chronos2Model.from_pretrained(directory, config=own, **options))

    def pipeline(self, model: nn.Module) -> BaseChronosPipeline:
        found = UnivariateChronos2Pipeline if is_univariate(model) else self.pipeline_class
        return found(model=model)

    def describe(self, model: nn.Module) -> Architecture:
        attention: list[AttentionBlock] = []
        feed_forward: list[FeedForward] = []
        for depth, layer in enumerate(stack_layers(model)["encoder"]):
            parts: Any = layer.layer
            for index, kind in enumerate(_KINDS):
                name = f"{sublayer_name('encoder', depth, index)}.self_attention"
                part = parts[index].self_attention
                own = isinstance(part, OwnValues)  # those of one head, whatever the heads were
                roles = [role for role in ("v", "o", "vo") if getattr(part, role, None)]
                block = AttentionBlock(
                    name=name,
                    stack="encoder",
                    layer=depth,
                    sublayer=index,
                    kind=kind,
                    depth=depth,
                    num_heads=1 if own else part.n_heads,
                    projections={role: f"{name}.{role}" for role in (roles if own else "qkvo")},
                )
                attention.append(block)
            index = len(_KINDS)
            name = f"{sublayer_name('encoder', depth, index)}.mlp"
            projections = {role: f"{name}.{role}" for role in ("wi", "wo")}
            feed_forward.append(
                FeedForward(
                    name=name,
                    stack="encoder",
                    layer=depth,
                    sublayer=index,
                    projections=projections,
                )
            )
        return Architecture(self.name, tuple(attention), tuple(feed_forward))

    def patch_features(self, model: nn.Module, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Time, normalised values and mask ``[B, S, 3 P]``; which patches have data ``[B, S]``."""
        chronos2: Any = model
        features, observed, _ = chronos2._prepare_patched_context(contexts)
        return features, observed

    def inputs(self, pipeline: BaseChronosPipeline, batch: Windows) -> dict[str, Any]:
        return {
            "context": batch.context,
            "group_ids": batch.group_ids,
            "future_covariates": batch.future,
            "num_output_patches": self.positions_ahead(pipeline.inner_model, batch),
        }

    def positions_ahead(self, model: nn.Module, batch: Windows) -> int:
        return -(-batch.target.shape[1] // self._patch_size(model))

    def cut_loss(
        self, pipeline: BaseChronosPipeline, output: Any, batch: Windows, original: Tensor | None
    ) -> tuple[float, int]:
        """Mean loss at the original's quantiles, which is least for the original.

        At the truth it falls where a cut forgets covariates that a series has in vain, and so
        hides what is lost where they help (eval/notes/folding.md).
        """
        if original is None:
            return self.forecast_loss(pipeline, output, batch)
        return self._loss(pipeline, output, batch, original)

    def relative_cut_loss(
        self, pipeline: BaseChronosPipeline, output: Any, batch: Windows, original: Tensor | None
    ) -> tuple[float, int]:
        """In units of the context's spread a trend, whose future is nearly certain, hardly counts
        (eval/notes/folding.md)."""
        if original is None:
            return self.forecast_loss(pipeline, output, batch)
        return self._loss(pipeline, output, batch, original, relative=True)

    def compared_with(self, output: Any) -> Tensor | None:
        quantiles: Tensor = output.quantile_preds
        return quantiles

    def graph_sources(self, model: nn.Module) -> Mapping[str, GraphSource]:
        source = univariate_source if is_univariate(model) else _grouped_source
        return {GRAPH_FILE: source(model)}

    def stock_loss(self, model: nn.Module, batch: Windows) -> Tensor:
        target = batch.target
        output = model(
            context=batch.context,
            group_ids=batch.group_ids,
            future_covariates=batch.future,
            num_output_patches=self.positions_ahead(model, batch),
            future_target=target,
        )
        levels = output.quantile_preds.shape[1]  # the stock loss is a sum over them
        observed = torch.isfinite(target)
        return per_observed_step(output.loss / levels, observed, output.quantile_preds)

    @staticmethod
    def _patch_size(model: Any) -> int:
        return int(model.chronos_config.output_patch_size)

    def predict(
        self,
        pipeline: BaseChronosPipeline,
        contexts: Tensor | Sequence[Tensor],
        horizon: int,
        num_samples: int | None = None,
    ) -> Any:
        # The pipeline splits its input into batches of its own size.
        count = len(contexts)
        series = contexts[:, None] if isinstance(contexts, Tensor) else contexts  # univariate
        return pipeline.predict(series, prediction_length=horizon, batch_size=count)

    def quantiles(
        self,
        pipeline: BaseChronosPipeline,
        contexts: Tensor | Sequence[Tensor],
        horizon: int,
        levels: Sequence[float],
        group_ids: Tensor | None = None,
        future: Tensor | None = None,
    ) -> Tensor:
        order = rows = torch.arange(len(contexts))
        tasks: list[Any] = list(contexts)
        if group_ids is not None:
            groups = [rows[group_ids == group] for group in sorted(set(group_ids.tolist()))]
            if future is not None:
                return self._quantiles_of_groups(pipeline, contexts, future, groups, levels)
            tasks = [torch.stack([contexts[row] for row in group]) for group in groups]
            order = torch.cat(groups).argsort()
        found, _ = pipeline.predict_quantiles(
            tasks,
            prediction_length=horizon,
            quantile_levels=list(levels),
            batch_size=len(rows),
        )
        return torch.cat(list(found))[order]

    def _quantiles_of_groups(
        self,
        pipeline: BaseChronosPipeline,
        contexts: Tensor | Sequence[Tensor],
        future: Tensor,
        groups: Sequence[Tensor],
        levels: Sequence[float],
    ) -> Tensor:
        """``[B, H, Q]``; NaN of covariates that ``future`` ``[B, H]`` knows."""
        known = torch.isfinite(future).any(1)
        # Stock tasks of one call have equally many targets and covariates.
        alike: dict[tuple[int, int], tuple[list[Tensor], list[Joint]]] = {}
        for group in groups:
            asked, given = group[~known[group]], group[known[group]]
            past, targets = (
                torch.stack([contexts[row] for row in part]) if len(part) else contexts[0][None][:0]
                for part in (given, asked)
            )
            rows, tasks = alike.setdefault((len(asked), len(given)), ([], []))
            rows.append(asked)
            tasks.append(Joint(targets, Covariates(past, future[given])))
        found = torch.full((*future.shape, len(levels)), math.nan)
        for (count, _), (rows, tasks) in alike.items():
            if count:
                forecasts = self.joint_quantiles(pipeline, tasks, future.shape[1], levels)
                found[torch.cat(rows)] = forecasts.flatten(0, 1)
        return found

    def encoded(self, tasks: Sequence[JointSeries], horizon: int) -> list[Joint]:
        return encoded(tasks, horizon)

    def predict_together(self, pipeline: Any, contexts: Tensor, horizon: int) -> Any:
        return pipeline.predict(
            contexts[:, None],
            prediction_length=horizon,
            batch_size=len(contexts),
            **cross_learning_option(pipeline),
        )

    def joint_quantiles(
        self,
        pipeline: Any,
        tasks: Sequence[Joint],
        horizon: int,
        levels: Sequence[float],
        *,
        cross_learning: bool = False,
    ) -> Tensor:
        found, _ = pipeline.predict_quantiles(
            [stock_task(one.targets, one.covariates) for one in tasks],
            prediction_length=horizon,
            quantile_levels=list(levels),
            batch_size=sum(one.rows for one in tasks),  # rows of the model's input
            **(cross_learning_option(pipeline) if cross_learning else {}),
        )
        return torch.stack(list(found))

    def allows_head_size(self, head_size: int, size: int) -> bool:
        return stock_frequencies(head_size, size) is not None

    def attended_patches(self, features: Tensor) -> Tensor:
        # Features start with the time, which is negative in the past. Unknown patches of the future
        # are embedded on purpose.
        patch_size = features.shape[1] // 3
        return (features[:, -patch_size:] > 0).any(1) | (features[:, 0] >= 0)

    def passes(self, settings: Mapping[str, Any], call: PredictCall) -> Iterator[Pass]:
        size, most = settings["output_patch_size"], settings.get("max_output_patches", 1)
        outputs = math.ceil(call.horizon / size)
        # From the second pass on, each of these quantiles continues its own path.
        for done in range(0, outputs, most):
            ahead = min(most, outputs - done)
            context = min(call.context_length + done * size, settings["context_length"])
            # The future is embedded too, as patches without values.
            patches = patch_count(settings, context) + ahead
            yield Pass(
                series=call.batch_size * (_UNROLLED if done else 1),
                encoder_tokens=patches + settings.get("use_reg_token", False),
                input_patches=patches,
                paths=1,
                outputs=ahead,
            )

    def stock_config(self, shape: ModelShape) -> Chronos2CoreConfig:
        if shape.num_decoder_layers:
            raise RecipeError(
                f"architecture: num_decoder_layers is {shape.num_decoder_layers}; {self.name} has "
                "no decoder, leave it out."
            )
        if shape.prediction_length % shape.patch_size:
            raise RecipeError(
                f"architecture: prediction_length is {shape.prediction_length}; give a multiple of "
                f"patch_size, {shape.patch_size}."
            )
        if shape.d_kv % 2:
            raise RecipeError(
                f"architecture: d_kv is {shape.d_kv}; {self.name} turns pairs of dimensions, give "
                "an even one."
            )
        return Chronos2CoreConfig(
            d_model=shape.d_model,
            d_kv=shape.d_kv,
            d_ff=shape.d_ff,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            dropout_rate=0.0,
            chronos_config={
                "context_length": shape.context_length,
                "input_patch_size": shape.patch_size,
                "input_patch_stride": shape.patch_size,
                "output_patch_size": shape.patch_size,
                "max_output_patches": shape.prediction_length // shape.patch_size,
                "quantiles": list(shape.quantiles),
                "time_encoding_scale": shape.context_length,
                "use_arcsinh": True,
                "use_reg_token": True,
            },
            chronos_pipeline_class="Chronos2Pipeline",
            architectures=["Chronos2Model"],
        )


def _grouped_source(model: nn.Module) -> GraphSource:
    """What is exported of a model with group attention."""
    size = patch_size(model)
    past, ahead = torch.zeros(3, 2 * size), torch.zeros(3, 2 * size)
    free, free_ahead = {0: "batch", 1: "patches"}, {0: "batch", 1: "future_patches"}
    return GraphSource(
        module=Chronos2Graph(exportable_copy(model)),
        inputs={
            "context": past,
            "observed": torch.ones_like(past),
            "group_ids": torch.tensor([0, 0, 1]),
            "future": ahead,
            "future_observed": torch.zeros_like(ahead),
        },
        sizes={
            "context": free,
            "observed": free,
            "group_ids": {0: "batch"},
            "future": free_ahead,
            "future_observed": free_ahead,
        },
        patch_size=size,
    )
