"""Checkpoints that were opened before are copied: transformers takes five times as long."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronos import BaseChronosPipeline

from tscompress.families.opening import Openable

#: Bytes of a checkpoint beyond which it is opened each time, and checkpoints that are remembered.
_MOST_BYTES, _MOST = 2**20, 64


class OpenedOnce:
    """Stands in for ``Openable.open_stock``.

    What it returns is a copy of what transformers made of the same bytes in the same folder with
    the same options. A checkpoint that changed is opened again, and so is one that failed.
    """

    def __init__(self) -> None:
        self._open = Openable.open_stock
        self._opened: OrderedDict[tuple[object, ...], BaseChronosPipeline] = OrderedDict()

    def __call__(
        self, family: Openable, directory: Path, config: Mapping[str, Any], **options: Any
    ) -> BaseChronosPipeline:
        files = sorted(path for path in Path(directory).iterdir() if path.is_file())
        if sum(path.stat().st_size for path in files) > _MOST_BYTES:
            return self._open(family, directory, config, **options)
        content = tuple((path.name, hashlib.blake2b(path.read_bytes()).digest()) for path in files)
        key = (str(directory), content, repr(sorted(options.items())))
        if key not in self._opened:
            self._opened[key] = self._open(family, directory, config, **options)
            if len(self._opened) > _MOST:
                self._opened.popitem(last=False)
        self._opened.move_to_end(key)
        return copy.deepcopy(self._opened[key])
