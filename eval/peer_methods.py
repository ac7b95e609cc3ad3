"""Others' ways to a smaller model, each written from its description or done by its library.

Single letters are those of the papers: a Linear layer y = W x, ``W`` ``[m, n]``, becomes L (R x)
with ``L`` ``[m, r]`` and ``R`` ``[r, n]``. Decompositions are in float64. The models are T5 stacks:
Chronos-T5 and Chronos-Bolt.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from testbed import LITTLE, Size, Testbed, as_stored, mean_loss
from torch import Tensor, nn

from tscompress.benchmark.sizes import parameter_count
from tscompress.checkpoints.format import replace_module_
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.apply import keep_layers_
from tscompress.compression.calibration import calibration_batches, small_batches
from tscompress.compression.layer_walk import Step, walk
from tscompress.compression.recording import Recording, record
from tscompress.data.batch import ForecastBatch
from tscompress.errors import FactorizationError, UsageError
from tscompress.families.stacks import stack_layers
from tscompress.layers.low_rank import LowRankLinear
from tscompress.linalg import truncated_svd

Factors = tuple[Tensor, Tensor]
#: Directions with less than this share of the most energy were not seen.
_UNSEEN = 1e-10

# --------------------------------------------------------------------------------------------------
# What the layers see
# --------------------------------------------------------------------------------------------------


@dataclass
class InputStatistics:
    """Of the inputs x of a Linear layer, over all real positions.

    Attributes
    ----------
    gram
        Sum of x x^T, float64 ``[n, n]``.
    magnitude
        Sum of |x|, float64 ``[n]``.
    """

    gram: Tensor
    magnitude: Tensor
    count: int = 0

    @classmethod
    def empty(cls, width: int) -> InputStatistics:
        zeros = torch.zeros(width, dtype=torch.float64)
        return cls(torch.diag(zeros), zeros)

    def add(self, rows: Tensor) -> None:
        """Take in rows ``[N, n]``."""
        rows = rows.to(torch.float64)
        self.gram += rows.T @ rows
        self.magnitude += rows.abs().sum(0)
        self.count += len(rows)


def record_all(loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> Recording:
    """A recording by which every position of the last layer counts, read or not, as published."""
    recording = record(loaded, batches)
    recording.ahead, recording.forecast = [], []
    return recording


def input_statistics(
    loaded: LoadedModel, batches: Sequence[ForecastBatch]
) -> dict[str, InputStatistics]:
    """Of every Linear in attention and feed-forwards of the original; readers of one input share
    theirs."""
    found: dict[str, InputStatistics] = {}
    recording = record_all(loaded, batches)
    steps = walk(loaded, recording, on_compressed=False, residual_targets=False)
    for step in steps:
        for names, rows in seen_rows(loaded, step):
            if names[0] not in found:
                found |= dict.fromkeys(names, InputStatistics.empty(rows.shape[1]))
            found[names[0]].add(rows)
    return found


def seen_rows(loaded: LoadedModel, step: Step) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Inputs ``[N, n]`` of the Linear layers of a sublayer at real positions, batch by batch.

    Layers that read the same input come together.
    """
    seen: dict[str, Tensor] = {}
    projections = step.block.projections

    def keep(name: str) -> Any:
        return lambda _, args: seen.__setitem__(name, args[0])

    with ExitStack() as hooks:
        for name in projections.values():
            module = loaded.model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(keep(name)).remove)
        for index in range(len(step.inputs)):
            step.run(index)
            readers: dict[int, list[str]] = {}
            for name in projections.values():
                readers.setdefault(id(seen[name]), []).append(name)
            for names in readers.values():
                of_keys = names[0] in (projections.get("k"), projections.get("v"))
                valid = (step.key_valid if of_keys else step.valid)[index]
                inputs = seen[names[0]]  # [B, S, n], or [S, B, n] across series
                if getattr(step.block, "across_series", False):
                    inputs = inputs.transpose(0, 1)
                yield tuple(names), inputs.flatten(0, 1) if valid is None else inputs[valid]


# --------------------------------------------------------------------------------------------------
# Two factors a layer
# --------------------------------------------------------------------------------------------------


def linears(loaded: LoadedModel) -> dict[str, nn.Linear]:
    """Every Linear in attention and feed-forwards, not those of patch and token embeddings."""
    architecture = loaded.architecture
    names = [name for _, _, name in architecture.attention_projections()]
    names += [name for _, _, name in architecture.feed_forward_projections()]
    found: dict[str, Any] = {name: loaded.model.get_submodule(name) for name in names}
    return found


def ranks_within(loaded: LoadedModel, parameter_ratio: float) -> dict[str, int]:
    """Ranks at which the whole model keeps at most this share of its parameters.

    Every matrix keeps the same share of its own, as SVD-LLM and ASVD without its search have it.

    Raises
    ------
    UsageError
        What is not factored is already larger.
    """
    shapes = {name: tuple(linear.weight.shape) for name, linear in linears(loaded).items()}
    total = parameter_count(loaded.model)
    matrices = sum(m * n for m, n in shapes.values())
    share = (parameter_ratio * total - (total - matrices)) / matrices
    ranks = {name: math.floor(share * m * n / (m + n)) for name, (m, n) in shapes.items()}
    if min(ranks.values()) < 1:
        raise UsageError(
            f"{parameter_ratio:.1%} of the parameters leave some matrix no rank; what stays dense "
            f"has {1 - matrices / total:.1%}. Ask for more."
        )
    return ranks


def cholesky_root(gram: Tensor) -> Tensor:
    """Lower triangular ``S`` with S S^T the Gram matrix ``[n, n]``.

    As SVD-LLM does it: a Gram matrix that is not positive definite gets its most negative
    eigenvalue, and a little more, added to all. The little is relative here; the inputs of these
    models have fewer directions than numbers, which that of large language models rarely have.

    Raises
    ------
    FactorizationError
        The Gram matrix is not finite.
    """
    if not bool(torch.isfinite(gram).all()):
        raise FactorizationError("a Gram matrix of inputs is not finite; check the series.")
    root, failed = torch.linalg.cholesky_ex(gram)
    if not failed:
        return root
    eigenvalues = torch.linalg.eigvalsh(gram)
    largest = float(eigenvalues[-1])
    damping = max(0.0, -float(eigenvalues[0])) + 1e-9 * (largest if largest > 0 else 1.0)
    return torch.linalg.cholesky(gram + damping * torch.eye(len(gram), dtype=gram.dtype))


def whitened_factors(W: Tensor, gram: Tensor, rank: int) -> Factors:
    """Factors that lose least of W x: the SVD of W S, truncated, and S undone.

    Truncation-aware data whitening of SVD-LLM (Wang et al., 2024), S by Cholesky.
    """
    S = cholesky_root(gram)
    L, R = truncated_svd(W.detach().double() @ S, rank)
    return L, torch.linalg.solve_triangular(S, R, upper=False, left=False)


def scaled_factors(W: Tensor, magnitude: Tensor, alpha: float, rank: int) -> Factors:
    """Factors from the SVD of W diag(s), s the mean |x| to the power alpha, with s undone.

    The scaling of ASVD (Yuan et al., 2023). ``magnitude`` ``[n]``; alpha 0: a plain SVD.
    """
    # Inputs that are never other than zero would be divided by it.
    s = magnitude.clamp_min(1e-6 * float(magnitude.max()) or 1.0) ** alpha
    L, R = truncated_svd(W.detach().double() * s, rank)
    return L, R / s


def updated_left(W: Tensor, L: Tensor, R: Tensor, cross: Tensor) -> Tensor:
    """The ``L`` that brings L R x nearest to W x, on the inputs that are seen now.

    SVD-LLM's update in closed form. ``cross`` ``[n, r]`` is the sum of x (R x)^T. Directions of
    R x that were not seen keep what ``L`` says of them.
    """
    W = W.detach().double()
    seen = R @ cross  # [r, r]
    inverse = torch.linalg.pinv((seen + seen.T) / 2, rtol=_UNSEEN, hermitian=True)
    return L + (W - L @ R) @ cross @ inverse


def asvd_(
    loaded: LoadedModel,
    parameter_ratio: float,
    statistics: Mapping[str, InputStatistics],
    alpha: float = 0.5,
) -> None:
    """Two factors for each Linear, scaled as in ASVD; its search for ranks is left out."""
    ranks = ranks_within(loaded, parameter_ratio)
    for name, linear in linears(loaded).items():
        seen = statistics[name]
        factors = scaled_factors(linear.weight, seen.magnitude / seen.count, alpha, ranks[name])
        replace_module_(loaded.model, name, LowRankLinear.from_factors(linear, *factors))


def svd_llm_(
    loaded: LoadedModel,
    parameter_ratio: float,
    statistics: Mapping[str, InputStatistics],
    batches: Sequence[ForecastBatch] | None = None,
) -> None:
    """Two factors for each Linear by truncation-aware whitening.

    With ``batches`` the left one is then updated, sublayer by sublayer, on what the layers before
    it, already compressed, pass on.
    """
    ranks = ranks_within(loaded, parameter_ratio)
    factors = {
        name: whitened_factors(linear.weight, statistics[name].gram, ranks[name])
        for name, linear in linears(loaded).items()
    }
    if batches is None:
        for name, linear in linears(loaded).items():
            replace_module_(loaded.model, name, LowRankLinear.from_factors(linear, *factors[name]))
        return
    recording = record_all(loaded, batches)
    for step in walk(loaded, recording, on_compressed=True, residual_targets=False):
        names = step.block.projections.values()
        crosses: dict[str, Any] = dict.fromkeys(names, 0.0)
        for readers, rows in seen_rows(loaded, step):
            x = rows.double()
            for name in readers:
                crosses[name] = crosses[name] + x.T @ (x @ factors[name][1].T)
        for name in names:
            linear: Any = loaded.model.get_submodule(name)
            L, R = factors[name]
            left = updated_left(linear.weight, L, R, crosses[name])
            replace_module_(loaded.model, name, LowRankLinear.from_factors(linear, left, R))


class PeerTestbed(Testbed):
    """A testbed with what peers look at, and peers as large as a folded model."""

    @cached_property
    def _shares(self) -> dict[Size, float]:
        return {}

    @cached_property
    def batches(self) -> list[ForecastBatch]:
        """Calibration series as folding sees them."""
        return small_batches(self.original, calibration_batches(self.original, self.calibration))

    @cached_property
    def statistics(self) -> dict[str, InputStatistics]:
        """Of what the layers of the original see."""
        return input_statistics(self.original, self.batches)

    def share_of(self, size: Size) -> float:
        """Parameters of a folded model, as a share of the original's."""
        if size not in self._shares:
            folded = self.folded(size, LITTLE)
            count = parameter_count(folded.model)
            self._shares[size] = count / parameter_count(self.original.model)
        return self._shares[size]

    def svd_llm(self, size: Size, *, update: bool = True) -> LoadedModel:
        """SVD-LLM with the parameters of a folded model; weights as they are stored."""
        loaded = self.dense()
        batches = self.batches if update else None
        svd_llm_(loaded, self.share_of(size), self.statistics, batches)
        return as_stored(loaded)

    def asvd(self, size: Size) -> LoadedModel:
        """ASVD with the parameters of a folded model; weights as they are stored."""
        loaded = self.dense()
        asvd_(loaded, self.share_of(size), self.statistics)
        return as_stored(loaded)


def multiply_back_(loaded: LoadedModel) -> None:
    """Dense layers in place of their two factors, as in the paper's own code: nothing is saved."""
    pairs = [(n, m) for n, m in loaded.model.named_modules() if isinstance(m, LowRankLinear)]
    for name, pair in pairs:
        dense = nn.Linear(pair.in_features, pair.out_features, bias=pair.left.bias is not None)
        dense = dense.to(pair.weight)
        with torch.no_grad():
            dense.weight.copy_(pair.left.weight @ pair.right.weight)
            if pair.left.bias is not None:
                dense.bias.copy_(pair.left.bias)
        replace_module_(loaded.model, name, dense)
    loaded.plan = None


# --------------------------------------------------------------------------------------------------
# Fewer layers
# --------------------------------------------------------------------------------------------------

#: Stack to the layers of it that stay.
Kept = dict[str, tuple[int, ...]]


def every_second(loaded: LoadedModel) -> Kept:
    """The first layer of each stack, the third, and so on."""
    return {stack: layers[::2] for stack, layers in _all_layers(loaded).items()}


def least_needed_gone(loaded: LoadedModel, batches: Sequence[ForecastBatch]) -> Kept:
    """Half the layers of each stack, dropped one by one: always the one without which the forecast
    loss on ``batches`` is least."""
    kept = _all_layers(loaded)
    goal = {stack: -(-len(layers) // 2) for stack, layers in kept.items()}
    while any(len(layers) > goal[stack] for stack, layers in kept.items()):
        trials = [
            {**kept, stack: tuple(other for other in layers if other != layer)}
            for stack, layers in kept.items()
            if len(layers) > goal[stack]
            for layer in layers
        ]
        if loaded.family == "chronos-t5":  # transformers cannot generate with more in the decoder
            trials = [t for t in trials if len(t["encoder"]) >= len(t["decoder"])]
        losses = [mean_loss(with_layers(loaded, trial), batches) for trial in trials]
        kept = trials[losses.index(min(losses))]
    return kept


def _all_layers(loaded: LoadedModel) -> Kept:
    return {name: tuple(range(len(layers))) for name, layers in stack_layers(loaded.model).items()}


def with_layers(loaded: LoadedModel, kept: Kept) -> LoadedModel:
    """A copy of the model with the layers ``kept`` alone."""
    fewer = replace(loaded, model=copy.deepcopy(loaded.model))
    keep_layers_(fewer, kept)
    return fewer


# --------------------------------------------------------------------------------------------------
# Fewer bits
# --------------------------------------------------------------------------------------------------


def int8_(model: nn.Module, *, dynamic: bool) -> None:
    """Weights of all Linear layers in int8, a scale for each output; torchao does it.

    Parameters
    ----------
    dynamic
        Products in int8 too, with a scale for each position's input that is found as it comes;
        otherwise the weights alone, which are multiplied in the model's own dtype.

    Raises
    ------
    UsageError
        torchao is not installed.
    """
    try:
        from torchao.quantization import (
            Int8DynamicActivationInt8WeightConfig,
            Int8WeightOnlyConfig,
            quantize_,
        )
        from torchao.utils import should_reduce_range
    except ImportError:
        raise UsageError("int8 needs torchao; pip install 'tscompress[peers]'.") from None
    config: Any = Int8WeightOnlyConfig(set_inductor_config=False)
    if dynamic:
        # Without VNNI, sums of products of full range overflow on a CPU.
        narrow = should_reduce_range(next(model.parameters()).device)
        config = Int8DynamicActivationInt8WeightConfig(
            set_inductor_config=False, reduce_range=narrow
        )

    def wanted(module: nn.Module, name: str) -> bool:
        # T5's output layer is its token table. Quantized, it would be held twice.
        return isinstance(module, nn.Linear) and name != "lm_head"

    quantize_(model, config, filter_fn=wanted)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor holds; of a quantized one those of its integers and scales."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(tensor_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.itemsize


def held_bytes(model: nn.Module) -> int:
    """Bytes of the weights in memory; a tied one counts once."""
    return sum(tensor_bytes(parameter) for parameter in model.parameters())


def stored_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the weights in a file, where those that are not quantized have ``dtype``."""
    return sum(
        tensor_bytes(p) if hasattr(p, "__tensor_flatten__") else p.numel() * dtype.itemsize
        for p in model.parameters()
    )
