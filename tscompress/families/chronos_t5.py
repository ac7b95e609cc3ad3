"""Chronos-T5: an encoder-decoder of tokens that samples paths."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from chronos import BaseChronosPipeline, ChronosPipeline
from chronos.chronos import ChronosConfig, ChronosModel
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from tscompress.errors import UnsupportedModelError
from tscompress.families.base import (
    EmbeddingTable,
    ForecastFamily,
    ModelShape,
    Pass,
    PredictCall,
    Windows,
)
from tscompress.families.calibration_sizes import LOSS_OF_TOKENS, OF_TOKENS
from tscompress.families.defaults import BatchShape, FamilyDefaults
from tscompress.families.graphs import GraphSource
from tscompress.families.opening import is_converted
from tscompress.families.t5_graphs import NOTES, compared_logits, t5_sources
from tscompress.families.t5_stack import UNTIED, describe_t5, has_own_head, shape_settings
from tscompress.io.untrusted import shown
from tscompress.plan.architecture import Architecture
from tscompress.runtime.quantiles import FloatArray
from tscompress.runtime.tokens import TOKENIZER


class ChronosT5(ForecastFamily):
    """Adapter of Chronos-T5."""

    name = "chronos-t5"
    stock_class = T5ForConditionalGeneration
    pipeline_class = ChronosPipeline
    draws_samples = True
    needed_settings = ("d_model", "decoder_start_token_id")
    rotated_config = UNTIED
    compared_values = "logits"
    # eval/notes has the measurements.
    defaults = FamilyDefaults(
        calibration_windows=OF_TOKENS,
        loss_windows=LOSS_OF_TOKENS,
        calibration_length_power=0.0,
        # Every step is a token, and synthetic series have long contexts: windows of this length
        # suffice, with half the positions of longer ones.
        collection_steps=320,
        # Long contexts and horizons take many times as long as short ones.
        batch_shapes=(
            BatchShape(64, 24, 32, 0.4),
            BatchShape(128, 24, 32, 0.35),
            BatchShape(256, 64, 16, 0.15),
            BatchShape(512, 64, 8, 0.1),
        ),
        target_weight=1.0,
        held_out_series=64,
        real_weight=1.8,  # beside 1.8 of synthetic series
        # Without, a recovered model loses its trends.
        trend_weight=0.4,
        learning_rates={"adamw": 3e-4, "muon": 6e-4},
        learning_rate_when_small=1e-3,
        learning_rate_by_distance=4e-3,
        recovery_scheme=4,
    )

    def recognises(self, config: Mapping[str, Any]) -> bool:
        # The first checkpoints have a chronos_config and no pipeline class.
        first = "chronos_config" in config and not is_converted(config)
        without = "ChronosPipeline" if first else None
        if str(config.get("chronos_pipeline_class", without)) != "ChronosPipeline":
            return False
        return bool(config.get("chronos_config", {}).get("model_type", "seq2seq") == "seq2seq")

    def describe(self, model: nn.Module) -> Architecture:
        return describe_t5(self.name, model)

    def pipeline(self, model: nn.Module) -> BaseChronosPipeline:
        settings: Any = model.config
        config = ChronosConfig(**settings.chronos_config)
        return ChronosPipeline(
            tokenizer=config.create_tokenizer(), model=ChronosModel(config=config, model=model)
        )

    def complete_config(
        self, model: nn.Module, config: Mapping[str, Any], stored: Collection[str]
    ) -> Mapping[str, Any]:
        loaded: Any = model
        if not has_own_head(loaded.config):
            # Transformers 5 ties no two tensors that are both stored and differ; 4 does.
            own = "lm_head.weight" in stored and isinstance(loaded.shared, nn.Embedding)
            if own and loaded.lm_head.weight is not loaded.shared.weight:
                raise UnsupportedModelError(
                    "the checkpoint has an output head of its own, which its config.json ties to "
                    "the token embedding; save it with tie_word_embeddings false, and the head "
                    "times d_model ** -0.5, which only a tied head is scaled by."
                )
            return config
        if "lm_head.weight" in stored and loaded.lm_head.weight is loaded.shared.weight:
            raise UnsupportedModelError(
                "the checkpoint has an untied output head, which its config.json ties to the token "
                "embedding in this version of transformers; set tie_word_embeddings to false."
            )
        # transformers 5 saves another value, which transformers 4 would follow.
        return {**config, **UNTIED}

    def config_in_memory(self, pipeline: BaseChronosPipeline) -> dict[str, Any]:
        content = super().config_in_memory(pipeline)
        return content | (UNTIED if has_own_head(pipeline.inner_model.config) else {})

    def embedding_table(self, model: nn.Module, config: Mapping[str, Any]) -> EmbeddingTable:
        special = int(config.get("chronos_config", {}).get("n_special_tokens", 0))
        rows: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
        return EmbeddingTable(rows.detach()[special:], "tokens", "value")

    def inputs(self, pipeline: BaseChronosPipeline, batch: Windows) -> dict[str, Any]:
        input_ids, mask, labels, _ = _tokens(pipeline, batch)
        start = torch.full_like(labels[:, :1], pipeline.inner_model.config.decoder_start_token_id)
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "decoder_input_ids": torch.cat([start, labels[:, :-1]], dim=1),
            "use_cache": False,  # one pass needs no cache
        }

    def targets(self, pipeline: BaseChronosPipeline, batch: Windows) -> tuple[Tensor, Tensor]:
        _, _, labels, observed = _tokens(pipeline, batch)
        return labels, observed

    def forecast_loss(
        self, pipeline: BaseChronosPipeline, output: Any, batch: Windows
    ) -> tuple[float, int]:
        """Negative log-likelihood of the target's tokens, in nats."""
        log_likelihood = output.logits.double().log_softmax(-1)  # [B, H, V]
        labels, observed = (x.to(log_likelihood.device) for x in self.targets(pipeline, batch))
        losses = -log_likelihood.gather(-1, labels[..., None])[..., 0]
        return float(losses[observed].sum()), int(observed.sum())

    def cut_loss(
        self, pipeline: BaseChronosPipeline, output: Any, batch: Windows, original: Tensor | None
    ) -> tuple[float, int]:
        """Cross entropy with the original's distribution of tokens, least for the original; nats.

        Sizes by layer chosen by it keep more of the skill at a third of the parameters than those
        chosen by the truth (eval/notes/folding.md).
        """
        if original is None:
            return self.forecast_loss(pipeline, output, batch)
        _, observed = self.targets(pipeline, batch)
        log_likelihood = output.logits.float().log_softmax(-1)  # [B, H, V]
        losses = -torch.einsum("bhv,bhv->bh", log_likelihood, original)
        observed = observed.to(losses.device)
        return float(losses[observed].double().sum()), int(observed.sum())

    def compared_with(self, output: Any) -> Tensor | None:
        probabilities: Tensor = output.logits.float().softmax(-1)  # [B, H, V]
        return probabilities

    def predict(
        self,
        pipeline: BaseChronosPipeline,
        contexts: Tensor | Sequence[Tensor],
        horizon: int,
        num_samples: int | None = None,
    ) -> Any:
        return pipeline.predict(contexts, prediction_length=horizon, num_samples=num_samples)

    def layers_refused(self, counts: Mapping[str, int]) -> str | None:
        if counts["encoder"] >= counts["decoder"]:
            return None
        return (
            f"a Chronos-T5 of {counts['encoder']} encoder and {counts['decoder']} decoder layers "
            "cannot generate with transformers 5, which sizes the decoder's cache by the encoder; "
            "keep as many in the encoder."
        )

    def untie_(self, model: nn.Module) -> dict[str, Any]:
        """Untie the output head, which then needs no scaled inputs."""
        rotated: Any = model
        config, head = rotated.config, rotated.lm_head
        if has_own_head(config):
            return {}
        scaled = head.weight.detach() * config.d_model**-0.5
        head.weight = nn.Parameter(scaled, requires_grad=head.weight.requires_grad)
        for name, value in UNTIED.items():
            if hasattr(config, name):
                setattr(config, name, value)
        return dict(UNTIED)

    def graph_sources(self, model: nn.Module) -> Mapping[str, GraphSource]:
        config: Any = model.config
        kind = config.chronos_config["tokenizer_class"]
        if kind != TOKENIZER:
            raise UnsupportedModelError(
                f"a Chronos-T5 of the tokenizer {shown(kind)} cannot be exported; {TOKENIZER} can."
            )
        return t5_sources(model)

    def card_notes(self, settings: Mapping[str, Any]) -> str:
        return NOTES

    def compared(
        self, pipeline: Any, forecaster: Any, contexts: Sequence[FloatArray]
    ) -> tuple[FloatArray, FloatArray]:
        return compared_logits(pipeline, forecaster, contexts)

    def passes(self, settings: Mapping[str, Any], call: PredictCall) -> Iterator[Pass]:
        # A series is encoded once; the encoder's output is repeated for each sample path.
        block = settings["prediction_length"]
        for done in range(0, call.horizon, block):
            context = min(call.context_length + done, settings["context_length"])
            yield Pass(
                series=call.batch_size,
                encoder_tokens=context + settings["use_eos_token"],
                input_patches=0,
                paths=call.num_samples or settings["num_samples"],
                outputs=min(block, call.horizon - done),
            )

    def stock_config(self, shape: ModelShape) -> T5Config:
        return T5Config(
            **shape_settings(shape),
            vocab_size=shape.vocab_size,
            chronos_config={
                "tokenizer_class": "MeanScaleUniformBins",
                "tokenizer_kwargs": {"low_limit": -15.0, "high_limit": 15.0},
                "n_tokens": shape.vocab_size,
                "n_special_tokens": 2,
                "pad_token_id": 0,
                "eos_token_id": 1,
                "use_eos_token": True,
                "model_type": "seq2seq",
                "context_length": shape.context_length,
                "prediction_length": shape.prediction_length,
                "num_samples": 20,
                "temperature": 1.0,
                "top_k": shape.top_k,
                "top_p": 1.0,
            },
            chronos_pipeline_class="ChronosPipeline",
            architectures=["T5ForConditionalGeneration"],
        )


def _tokens(pipeline: BaseChronosPipeline, batch: Windows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of the context and their mask, ``[B, T]``; the same of the target, ``[B, H]``."""
    device = batch.context.device
    tokenizer = pipeline.tokenizer  # its bin edges are on the CPU
    input_ids, mask, scale = tokenizer.context_input_transform(batch.context.cpu())
    labels, observed, _ = tokenizer._input_transform(batch.target.cpu(), scale=scale)
    found: tuple[Tensor, ...] = (input_ids, mask, labels, observed)
    input_ids, mask, labels, observed = (tensor.to(device) for tensor in found)
    return input_ids, mask, labels, observed
