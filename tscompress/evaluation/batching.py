"""Batches of series, their random numbers, and their split into parts and among processes.

Random numbers depend only on the batches: a batch too large for the memory is computed in parts,
and processes share the batches, with the same random numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, release_memory
from accelerate.utils.memory import should_reduce_batch_size
from chronos import BaseChronosPipeline
from chronos.utils import left_pad_and_stack_1D
from pydantic import BeforeValidator
from torch.overrides import TorchFunctionMode

from tscompress.benchmark.sizes import kv_cache_bytes
from tscompress.benchmark.workload import Workload
from tscompress.errors import NotEnoughMemoryError, UsageError
from tscompress.families.exported import draws_as_source
from tscompress.families.registry import adapter_of_pipeline
from tscompress.io.memory import available_bytes
from tscompress.io.seeds import seeded
from tscompress.layers.shared_cross_attention import shares_cross_attention

T = TypeVar("T")

#: As many series as fit into the memory, by an estimate.
AUTO: Literal["auto"] = "auto"
BatchSize = int | Literal["auto"]

#: Default number of series that share random numbers; as in the published scores.
DEFAULT_BATCH_SIZE = 32
#: Beyond any memory.
_MOST_SERIES = 10**6
_ALLOWED = f"give 1 to {_MOST_SERIES:,}, or {AUTO!r}"
#: Larger batches are no faster.
_LARGEST_BATCH = 256
#: Share of the free memory to use: the estimate is rough, and other processes need memory too.
_USABLE = 0.5


# --------------------------------------------------------------------------------------------------
# Batches and their random numbers
# --------------------------------------------------------------------------------------------------


def batches_by_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Indices in batches, shortest series first; equal lengths keep their order."""
    order = np.argsort(np.asarray(lengths), kind="stable").tolist()
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]


@contextlib.contextmanager
def common_random_numbers(pipeline: BaseChronosPipeline, key: str) -> Iterator[None]:
    """Seed torch from ``key`` inside the block, and restore its generators after it.

    An exported model draws with the same numbers as its source, see
    :class:`tscompress.families.exported.ExportedT5Pipeline`.
    """
    digest = hashlib.sha256(key.encode()).digest()
    seed = int.from_bytes(digest[:8], "big") >> 1  # 63 bits: seeds are signed
    with seeded(seed, model_device(pipeline)), draws_as_source(pipeline):
        yield


class DrawsOfPart(TorchFunctionMode):
    """Sample some rows of a batch with the random numbers that they have in the whole batch.

    ``torch.multinomial`` samples one token per row as the argmax of p / q with exponential q, for
    all rows at once; here q is drawn for the whole batch and sliced.
    """

    def __init__(self, rows: slice, whole: int) -> None:
        super().__init__()
        self.rows, self.whole = rows, whole

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.multinomial:
            return func(*args, **(kwargs or {}))
        probabilities = args[0]  # [series * paths, V]
        paths = len(probabilities) // (self.rows.stop - self.rows.start)
        noise = probabilities.new_empty(self.whole * paths, probabilities.shape[1]).exponential_()
        ours = noise[self.rows.start * paths : self.rows.stop * paths]
        return (probabilities / ours).argmax(-1, keepdim=True)


def part_of_batch(contexts: Sequence[torch.Tensor], rows: slice) -> list[torch.Tensor]:
    """Some series of a batch, padded to the length of the whole batch."""
    if rows.stop - rows.start == len(contexts):
        return list(contexts)
    return list(left_pad_and_stack_1D(list(contexts))[rows].unbind())


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """Computes batches in parts of at most ``at_once`` series, fewer after memory ran out.

    Batches come shortest first, so a size that did not fit is not tried again.
    """

    at_once: int

    def compute(
        self, count: int, compute: Callable[[slice], npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32]:
        """Results of ``compute`` for all of ``count`` series, ``[count, ...]``.

        Raises
        ------
        NotEnoughMemoryError
            A single series does not fit.
        """
        parts: list[npt.NDArray[np.float32]] = []
        first = 0
        while first < count:
            rows = slice(first, min(first + self.at_once, count))
            part = self._attempt(rows, compute)
            if part is None:
                # Outside the handler: an error keeps its frames' tensors alive.
                release_memory()
                self.at_once = (rows.stop - rows.start + 1) // 2
                continue
            parts.append(part)
            first = rows.stop
        return np.concatenate(parts)

    @staticmethod
    def _attempt(
        rows: slice, compute: Callable[[slice], npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32] | None:
        """None if memory ran out."""
        try:
            return compute(rows)
        except (RuntimeError, MemoryError) as error:
            if not memory_ran_out(error):
                raise
            if rows.stop - rows.start == 1:
                raise NotEnoughMemoryError(
                    "there is not enough memory to forecast one series; take fewer samples, a "
                    "smaller dtype such as bfloat16, or another device."
                ) from None
            return None


def memory_ran_out(error: BaseException) -> bool:
    """Whether an allocation on the CPU or an accelerator failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, Exception):
        return False
    # The words of torch on Windows, which accelerate does not know.
    return "DefaultCPUAllocator: not enough memory" in str(error) or should_reduce_batch_size(error)


def series_that_fit(
    pipeline: BaseChronosPipeline, context_length: int, horizon: int, num_samples: int | None
) -> int:
    """Estimated number of series that fit into the free memory, at least 1."""
    free = _USABLE * free_bytes(model_device(pipeline))
    needed = forecast_bytes(pipeline, context_length, horizon, num_samples)
    return max(1, min(_LARGEST_BATCH, int(free / needed)))


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, divided among the processes of this machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + int(held)
    return available_bytes() // Processes.count_here()


def forecast_bytes(
    pipeline: BaseChronosPipeline, context_length: int, horizon: int, num_samples: int | None
) -> int:
    """Estimated memory for the forecast of one series, without weights.

    The widest layer, its attention scores, and the key-value cache; for Chronos-T5 also the
    encoder's output and the logits of each sample path.
    """
    model: Any = pipeline.inner_model
    config, settings = model.config, model.config.chronos_config
    workload = Workload(
        batch_size=1, context_length=context_length, horizon=horizon, num_samples=num_samples
    )
    itemsize = next(model.parameters()).itemsize
    family = adapter_of_pipeline(pipeline)
    passes = family.passes(settings, workload)
    largest = max(passes, key=lambda one: one.series * one.encoder_tokens)
    tokens, paths = largest.encoder_tokens, largest.paths
    layer = tokens * (8 * config.d_model + 4 * config.num_heads * config.d_kv + 2 * config.d_ff)
    numbers = largest.series * (layer + 4 * config.num_heads * tokens**2)
    if family.draws_samples:
        # For each path, softmax, top-k and sampling hold several copies of the logits.
        numbers += paths * (tokens * (config.d_model + 2 * config.num_heads))
        numbers += 8 * paths * config.vocab_size
    shared = shares_cross_attention(pipeline)
    cache = kv_cache_bytes(model, workload, shared_cross_attention=shared)
    return int(numbers * itemsize) + cache


def batch_sizes(
    pipeline: BaseChronosPipeline,
    lengths: Sequence[int],
    horizon: int,
    batch_size: BatchSize,
    num_samples: int | None,
    rows: int = 1,
) -> tuple[int, int]:
    """Number of series in a batch, and of those to compute at once.

    With ``auto``, Chronos-T5 keeps its batches, on which its random numbers depend, and computes
    them in parts that fit; quantile models have batches that fit.

    Parameters
    ----------
    rows
        Of the model's input for each series: itself and its covariates.
    """
    if batch_size != AUTO:
        return batch_size, batch_size
    fit = series_that_fit(pipeline, max(lengths, default=1), horizon, num_samples)
    fit = max(1, fit // rows)
    if adapter_of_pipeline(pipeline).draws_samples:
        return DEFAULT_BATCH_SIZE, min(fit, DEFAULT_BATCH_SIZE)
    return fit, fit


def check_batch_size(batch_size: BatchSize) -> None:
    """Refuse anything but ``auto`` and integers from 1 to a million.

    Raises
    ------
    UsageError
    """
    if not _is_batch_size(batch_size):
        raise UsageError(f"batch_size is {batch_size}; {_ALLOWED}.")


def parse_batch_size(text: str) -> BatchSize:
    """Read ``32`` or ``auto``; UsageError as in :func:`check_batch_size`."""
    size = _read(text)
    check_batch_size(size)  # type: ignore[arg-type]
    return size  # type: ignore[return-value]


def _read(value: object) -> object:
    """Digits as a number, anything else as it is."""
    digits = isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 20
    return int(value) if digits else value  # type: ignore[call-overload]


def _is_batch_size(value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value == AUTO or (is_number and 1 <= value <= _MOST_SERIES)  # type: ignore[operator]


def _checked(value: object) -> object:
    """For pydantic, whose own message would name a branch of the type."""
    found = _read(value)
    if not _is_batch_size(found):
        raise ValueError(_ALLOWED)
    return found


#: As a setting is given.
GivenBatchSize = Annotated[BatchSize, BeforeValidator(_checked)]


# --------------------------------------------------------------------------------------------------
# Processes
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Processes:
    """The processes that ``torchrun`` started for one evaluation, from the view of one of them.

    They share the batches of each dataset and gather all results. They exchange only plain objects,
    through the CPU.
    """

    index: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    count: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))

    @staticmethod
    def count_here() -> int:
        """Number of processes on this machine, which share its memory."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.index == 0

    def check_alone(self, command: str) -> None:
        """Refuse several processes for a command of which each would write the output.

        Raises
        ------
        UsageError
        """
        if self.count > 1:
            raise UsageError(
                f"{command} runs in one process; start it without torchrun or accelerate."
            )

    def device(self, name: str) -> str:
        """The device of this process; ``cuda`` becomes a separate GPU for each."""
        if self.count == 1 or name != "cuda":
            return name
        return f"cuda:{os.environ.get('LOCAL_RANK', self.index)}"

    def leave(self) -> None:
        """Leave the process group, if there is one."""
        if self.count > 1:
            PartialState(cpu=True).destroy_process_group()

    def has(self, position: int) -> bool:
        """Whether this process computes the batch at ``position``."""
        return position % self.count == self.index

    def gather(self, found: dict[int, T]) -> dict[int, T]:
        """Results of all processes."""
        if self.count == 1:
            return found
        PartialState(cpu=True)
        return dict(gather_object(list(found.items())))

    def agree(self, decide: Callable[[], T]) -> T:
        """The main process's decision: files and free memory may differ a moment later."""
        if self.count == 1:
            return decide()
        PartialState(cpu=True)
        decision = [decide() if self.is_main else None]
        broadcast_object_list(decision)
        return decision[0]  # type: ignore[return-value]


def model_device(pipeline: BaseChronosPipeline) -> torch.device:
    """Device of the weights."""
    device: torch.device = next(pipeline.inner_model.parameters()).device
    return device
