"""The interface of a model family.

:class:`Family` is for profiling; :class:`LayeredFamily` adds compressing layers in memory, and
:class:`ForecastFamily` forecasting, recovery and checkpoints. Adapters have no state: there is one
of each, in :mod:`tscompress.families.registry`, and models and pipelines are arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import transformers
from chronos import BaseChronosPipeline
from torch import Tensor, nn
from transformers import AutoConfig

from tscompress.errors import UsageError
from tscompress.families.covariates import JointForecasts
from tscompress.families.defaults import FamilyDefaults
from tscompress.families.empty import without_weights
from tscompress.families.graphs import Exportable
from tscompress.families.opening import Openable
from tscompress.plan.architecture import Architecture, AttentionBlock, FeedForward

# --------------------------------------------------------------------------------------------------
# Arguments and results of adapters
# --------------------------------------------------------------------------------------------------


class Windows(Protocol):
    """Contexts and targets, for calibration and recovery."""

    @property
    def context(self) -> Tensor:
        """``[B, T]``, NaN where missing."""

    @property
    def target(self) -> Tensor:
        """``[B, H]``, NaN where missing."""

    @property
    def group_ids(self) -> Tensor | None:
        """``[B]``; series of one group attend to each other. None: no groups."""

    @property
    def future(self) -> Tensor | None:
        """``[B, H]``, known future values (covariates); None: nothing is known."""


class PredictCall(Protocol):
    """The size of one ``predict`` call."""

    @property
    def batch_size(self) -> int:
        """Series per call."""

    @property
    def context_length(self) -> int:
        """Time steps of each series."""

    @property
    def horizon(self) -> int:
        """Time steps to forecast."""

    @property
    def num_samples(self) -> int | None:
        """Sample paths; None: the model's own number."""


class ModelShape(Protocol):
    """Sizes of a model to pretrain."""

    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    context_length: int
    prediction_length: int
    vocab_size: int
    patch_size: int
    quantiles: tuple[float, ...]
    top_k: int


@dataclass(frozen=True)
class Pass:
    """Tokens of one pass through encoder and decoder.

    Attributes
    ----------
    series
        Rows of the encoder.
    encoder_tokens
        Of each series.
    input_patches
        Of each series, through the input patch embedding; 0 without one.
    paths
        Rows of the decoder for each series. The decoder, including cross-attention keys, runs for
        every path.
    outputs
        Tokens decoded sequentially in each path; Chronos-2: patches forecast at once.
    """

    series: int
    encoder_tokens: int
    input_patches: int
    paths: int
    outputs: int


class EmbeddingTable(NamedTuple):
    """The rows that are looked up, or weighted, to embed an input.

    Attributes
    ----------
    rows
        ``[V, d_model]``.
    name, order
        Names of the rows and of their order, for figures.
    """

    rows: Tensor
    name: str
    order: str


# --------------------------------------------------------------------------------------------------
# The adapters
# --------------------------------------------------------------------------------------------------


def projections_of(
    layer: nn.Module, name: str, children: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Role to dotted name of a projection, for :meth:`Family.describe`.

    Parameters
    ----------
    layer, name
        A layer and its dotted name.
    children
        Role to the names of the child across versions. The first that ``layer`` has is used; roles
        without one are omitted.
    """
    there = {child for child, _ in layer.named_modules()}
    found = {role: [one for one in names if one in there] for role, names in children.items()}
    return {role: f"{name}.{names[0]}" for role, names in found.items() if names}


def describe_encoder(
    family: str,
    model: nn.Module,
    attention: Mapping[str, Sequence[str]],
    feed_forward: Mapping[str, Sequence[str]],
    inside: str = "",
) -> Architecture:
    """Layers of one encoder, each an attention block and a feed-forward.

    Parameters
    ----------
    attention, feed_forward
        Role to names of the child of a layer, see :func:`projections_of`. A layer is a module with
        every role of ``attention``.
    inside
        Path of the feed-forward within a layer, such as ``.mlp``.
    """
    config: Any = model.config
    blocks: list[AttentionBlock] = []
    units: list[FeedForward] = []
    for name, layer in model.named_modules():
        projections = projections_of(layer, name, attention)
        if projections.keys() != attention.keys():
            continue
        depth = len(blocks)
        blocks.append(
            AttentionBlock(
                name=f"{name}.attention",
                stack="encoder",
                layer=depth,
                sublayer=0,
                kind="encoder",
                depth=depth,
                num_heads=config.num_attention_heads,
                projections=projections,
            )
        )
        units.append(
            FeedForward(
                name=f"{name}{inside}",
                stack="encoder",
                layer=depth,
                sublayer=1,
                projections=projections_of(layer, name, feed_forward),
            )
        )
    return Architecture(family, tuple(blocks), tuple(units))


class Family(ABC):
    """A model family that can be profiled.

    Attributes
    ----------
    names_kept
        Whether checkpoints have the names of weights of the installed transformers.
    """

    name: ClassVar[str]
    names_kept: ClassVar[bool] = True

    @abstractmethod
    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` belongs to this family."""

    @abstractmethod
    def describe(self, model: nn.Module) -> Architecture:
        """The attention blocks and feed-forwards of a model.

        Raises
        ------
        UnsupportedModelError
            It has unsupported parts.
        """

    def model_class(self, config: Mapping[str, Any]) -> Any:
        """The class that wrote the checkpoint, so that an encoder gains no random decoder."""
        name = (config.get("architectures") or [""])[0]
        found = getattr(transformers, str(name), None)
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        return found if is_model else transformers.AutoModel

    def empty_model(self, config: Mapping[str, Any]) -> nn.Module:
        """A model of ``config`` on the meta device: no memory, no initialisation."""
        settings = {key: value for key, value in config.items() if key != "model_type"}
        own_config = AutoConfig.for_model(config["model_type"], **settings)
        found = self.model_class(config)
        with without_weights():
            automatic = found is transformers.AutoModel
            model: nn.Module = found.from_config(own_config) if automatic else found(own_config)
        return model

    def embedding_table(self, model: nn.Module, config: Mapping[str, Any]) -> EmbeddingTable | None:
        """The token table without special tokens; None: patches of a series are embedded."""
        rows: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
        return EmbeddingTable(rows.detach(), "tokens", "token id")

    def patch_features(self, model: nn.Module, contexts: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the input patch embedding for ``contexts`` ``[B, T]``.

        Returns
        -------
        tuple
            Features ``[B, S, n]``, and the mask of patches with data, bool ``[B, S]``.
        """
        raise NotImplementedError(f"{self.name} models embed no patches of series.")


class LayeredFamily(Family):
    """A family whose layers compression walks (:mod:`tscompress.families.stacks`).

    Attributes
    ----------
    draws_samples
        Whether forecasts are sample paths of tokens, decoded sequentially; otherwise quantiles.
    fold_damping
        Of the fit of output projections, by default.
    even_rows
        Whether feed-forwards are fitted on rows at even steps: of a series that gives two, its
        first, middle or last position. Otherwise on scattered ones.
    """

    draws_samples: ClassVar[bool] = False
    fold_damping: ClassVar[float] = 1e-2
    even_rows: ClassVar[bool] = False

    @abstractmethod
    def inputs(self, pipeline: Any, batch: Any) -> dict[str, Any]:
        """Arguments of the model's ``forward`` on a batch, targets included if it reads them.

        Tensors are on the device of the batch.
        """

    def positions_ahead(self, model: nn.Module, batch: Any) -> int | None:
        """How many of the last positions of the last stack the model makes its output of.

        Of the others its last layer needs keys and values, and nothing more. None: all are read.
        """
        return None


class ForecastFamily(JointForecasts, Exportable, Openable, LayeredFamily):
    """A family that forecasts: it can be calibrated, compressed, recovered and evaluated.

    Attributes
    ----------
    stock_class, pipeline_class
        Classes of transformers or chronos: the model, and the pipeline around it.
    group_size
        Series in a calibration group, which attend to each other; 1: no groups.
    needed_settings
        Keys of ``config.json`` without which a model loads, but is not forecast with or folded.
    """

    stock_class: ClassVar[Any]
    pipeline_class: ClassVar[type[BaseChronosPipeline]]
    group_size: ClassVar[int] = 1
    needed_settings: ClassVar[tuple[str, ...]] = ("d_model",)
    defaults: ClassVar[FamilyDefaults]

    # Building

    def model_class(self, config: Mapping[str, Any]) -> Any:
        return self.stock_class

    def empty_model(self, config: Mapping[str, Any]) -> nn.Module:
        settings = {key: value for key, value in config.items() if key != "model_type"}
        own_config = self.stock_class.config_class(**settings)
        with without_weights():
            model: nn.Module = self.stock_class(own_config)
        return model

    def pipeline(self, model: nn.Module) -> BaseChronosPipeline:
        """The stock pipeline around a model in memory."""
        return self.pipeline_class(model=model)

    def complete_config(
        self, model: nn.Module, config: Mapping[str, Any], stored: Collection[str]
    ) -> Mapping[str, Any]:
        """``config`` of a loaded model, readable by every supported version of transformers.

        Parameters
        ----------
        stored
            Names of the tensors on disk.

        Raises
        ------
        UnsupportedModelError
            The installed transformers does not load the model as it was saved.
        """
        return config

    def config_in_memory(self, pipeline: BaseChronosPipeline) -> dict[str, Any]:
        """What ``config.json`` of the pipeline's model would hold.

        Empty for a subclass of the pipeline around a model of its own: that forecasts and can be
        measured, and has no layers that are known here.

        Raises
        ------
        UsageError
            The stock pipeline is around another model, such as one with adapters of peft.
        """
        model: Any = pipeline.inner_model
        if not isinstance(model, self.stock_class):
            if type(pipeline) is not self.pipeline_class:
                return {}
            raise UsageError(
                f"the {type(pipeline).__name__} is around a {type(model).__name__}, not a "
                f"{self.stock_class.__name__}; merge adapters into the model, or save it and give "
                "the directory."
            )
        content: dict[str, Any] = model.config.to_dict()
        return content

    # Running

    @abstractmethod
    def inputs(self, pipeline: BaseChronosPipeline, batch: Windows) -> dict[str, Any]:
        """As of :class:`LayeredFamily`, of windows of series."""

    @abstractmethod
    def targets(self, pipeline: BaseChronosPipeline, batch: Windows) -> tuple[Tensor, Tensor]:
        """Targets in the model's output space, and the mask of observed steps.

        Returns
        -------
        tuple
            Tokens or scaled values ``[B, H]``, and bool ``[B, H]``, on the device of the batch.
        """

    @abstractmethod
    def forecast_loss(
        self, pipeline: BaseChronosPipeline, output: Any, batch: Windows
    ) -> tuple[float, int]:
        """Summed loss of the model's ``output`` on a batch, and the number of steps."""

    def steps_per_position(self, model: nn.Module) -> int | None:
        """Steps of a context that a position reads; missing ones before a series are masked.

        None: forecasts depend on how many of those there are.
        """
        return 1

    def cut_loss(
        self, pipeline: BaseChronosPipeline, output: Any, batch: Windows, original: Tensor | None
    ) -> tuple[float, int]:
        """As :meth:`forecast_loss`, for comparing sizes of parts of a model.

        Parameters
        ----------
        original
            :meth:`compared_with` of the uncut model's output on the batch.
        """
        return self.forecast_loss(pipeline, output, batch)

    def relative_cut_loss(
        self, pipeline: BaseChronosPipeline, output: Any, batch: Windows, original: Tensor | None
    ) -> tuple[float, int]:
        """As :meth:`cut_loss`, for comparing sizes of a whole model.

        In units of the spread of the original's forecast of each series, where the family has them.
        """
        return self.cut_loss(pipeline, output, batch, original)

    def compared_with(self, output: Any) -> Tensor | None:
        """What of the uncut model's ``output`` cuts are compared with; None: with the truth."""
        return None

    def predict(
        self,
        pipeline: BaseChronosPipeline,
        contexts: Tensor | Sequence[Tensor],
        horizon: int,
        num_samples: int | None = None,
    ) -> Any:
        """One stock ``predict`` call.

        Parameters
        ----------
        contexts
            ``[B, T]``, or B series ``[T_i]``.
        num_samples
            Number of sample paths, if the family samples; None: the model's default.

        Returns
        -------
        Tensor
            Sample paths ``[B, num_samples, horizon]``, or the model's quantiles.
        """
        return pipeline.predict(contexts, prediction_length=horizon)

    def quantiles(
        self,
        pipeline: BaseChronosPipeline,
        contexts: Tensor | Sequence[Tensor],
        horizon: int,
        levels: Sequence[float],
        group_ids: Tensor | None = None,
        future: Tensor | None = None,
    ) -> Tensor:
        """Forecast quantiles ``[B, horizon, Q]`` at ``levels``, as stock ``predict_quantiles``.

        Parameters
        ----------
        contexts
            ``[B, T]``, or B series ``[T_i]``.
        group_ids
            ``[B]``; series of one group are forecast as variates of one task. Of series with
            covariates, see :meth:`joint_quantiles`.
        future
            ``[B, horizon]``, with ``group_ids``: steps ahead of covariates that are known, NaN of
            the others. Forecasts of the known ones are NaN.
        """
        found: Tensor
        found, _ = pipeline.predict_quantiles(
            contexts, prediction_length=horizon, quantile_levels=list(levels)
        )
        return found

    # Compressing

    def allows_head_size(self, head_size: int, size: int) -> bool:
        """Whether a stock config of head size ``size`` can represent heads of ``head_size``."""
        return True

    def layers_refused(self, counts: Mapping[str, int]) -> str | None:
        """Why a stock model cannot have these numbers of layers per stack; None: it can."""
        return None

    def untie_(self, model: nn.Module) -> dict[str, Any]:
        """Untie weights that a rotation of the residual stream separates; the changed config."""
        return {}

    #: Config keys of a model whose residual stream was rotated.
    rotated_config: ClassVar[Mapping[str, Any]] = {}

    def one_embedding(self, config: Any) -> bool:
        """Whether encoder and decoder read the same rows of the token table."""
        return True

    def attended_patches(self, features: Tensor) -> Tensor:
        """Mask, bool ``[N]``, of the rows ``[N, n]`` of patch features that are attended to."""
        return torch.ones(len(features), dtype=torch.bool, device=features.device)

    # Counting

    @abstractmethod
    def passes(self, settings: Mapping[str, Any], call: PredictCall) -> Iterator[Pass]:
        """Passes of one ``predict`` call; ``settings`` is the model's ``chronos_config``."""

    # Pretraining

    def stock_config(self, shape: ModelShape) -> Any:
        """The stock config of a fresh model.

        Raises
        ------
        RecipeError
            The family has no models of such a shape.
        """
        raise NotImplementedError(f"{self.name} models are not pretrained here.")

    def stock_loss(self, model: nn.Module, batch: Windows) -> Tensor:
        """The loss of the official training code ``[]``, over observed target steps.

        A mean over levels of Chronos-2 and over steps; that of Chronos-Bolt sums over the steps
        that it forecasts at once, 64 of them: its loss and gradients are as much larger.

        Families that draw samples have a loss on tokens instead
        (:class:`tscompress.training.pretrain_losses.TokenLoss`).

        Parameters
        ----------
        model
            Of this family, or a wrapper around it.
        """
        raise NotImplementedError(f"{self.name} models have no loss of their own.")
