"""Checkpoints that were opened before are copied: transformers takes fifteen times as long."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chronos import BaseChronosPipeline

from tscompress.checkpoints.integrity import source_files
from tscompress.families.opening import Openable

#: Bytes of a checkpoint beyond which it is opened each time, and checkpoints that are remembered.
_MOST_BYTES, _MOST = 2**20, 64

_Open = Callable[..., BaseChronosPipeline]


def opened_once(open_stock: _Open, *, by_place: bool = True) -> _Open:
    """``Openable.open_stock`` that copies what it made of the same bytes in the same folder with
    the same options. A checkpoint that changed is opened again, and so is one that failed.

    Without ``by_place`` one that lies elsewhere is the same, whatever else is beside the configs
    and weights. A copy names the place that was opened first.
    """
    opened: OrderedDict[tuple[object, ...], _Kept] = OrderedDict()

    @functools.wraps(open_stock)
    def open_or_copy(
        family: Openable, directory: Path, config: Mapping[str, Any], **options: Any
    ) -> BaseChronosPipeline:
        place = Path(directory)
        beside = sorted(path for path in place.iterdir() if path.is_file())
        files = beside if by_place else source_files(place)
        if sum(path.stat().st_size for path in files) > _MOST_BYTES:
            return open_stock(family, directory, config, **options)
        content = tuple((path.name, hashlib.blake2b(path.read_bytes()).digest()) for path in files)
        where = str(directory) if by_place else ""
        key = (where, content, repr(sorted(options.items())))
        if key not in opened:
            opened[key] = _Kept(open_stock(family, directory, config, **options))
            if len(opened) > _MOST:
                opened.popitem(last=False)
        opened.move_to_end(key)
        return opened[key].copy()

    return open_or_copy


class _Kept:
    """A pipeline in memory, to make copies of: in a quarter of the time of ``copy.deepcopy``."""

    def __init__(self, pipeline: BaseChronosPipeline) -> None:
        seen: list[torch.Tensor] = []
        places: dict[int, int] = {}

        class Pickler(pickle.Pickler):
            def persistent_id(_, part: object) -> int | None:
                if not isinstance(part, torch.Tensor):
                    return None
                if id(part) not in places:
                    places[id(part)] = len(seen)
                    seen.append(part)
                return places[id(part)]

        written = io.BytesIO()
        Pickler(written, protocol=5).dump(pipeline)
        self.rest = written.getvalue()
        # Not those in the file, which may be written to.
        self.tensors = [_laid_alike(tensor) for tensor in seen]

    def copy(self) -> BaseChronosPipeline:
        tensors = [_laid_alike(tensor) for tensor in self.tensors]

        class Unpickler(pickle.Unpickler):
            def persistent_load(_, place: int) -> torch.Tensor:
                return tensors[place]

        copied: BaseChronosPipeline = Unpickler(io.BytesIO(self.rest)).load()
        return copied


def _laid_alike(tensor: torch.Tensor, alignment: int = 64) -> torch.Tensor:
    """A copy with an address of the same remainder by ``alignment``.

    MKL rounds by where a tensor lies: on processors with AVX2 alone, forecasts of a copy that lies
    elsewhere than the weights in a file differ in the last bit.
    """
    assert tensor.is_contiguous()
    assert isinstance(tensor, torch.nn.Parameter) or not tensor.requires_grad
    room = np.empty(tensor.nbytes + alignment, dtype=np.uint8)
    start = (tensor.data_ptr() - room.ctypes.data) % alignment
    laid = torch.from_numpy(room[start : start + tensor.nbytes]).view(tensor.dtype)
    laid = laid.view(tensor.shape).copy_(tensor.detach())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(laid, tensor.requires_grad)
    return laid
