"""Whether an ONNX file names further files, found without the library ``onnx``.

A graph may hold a tensor's data in a file of any path, which a runtime would read. Graphs of
tscompress hold all data themselves. The file is walked as protocol buffers: keys and lengths, no
values; field numbers are those of ``onnx.proto``.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_NESTED = 64
#: Message to the fields that hold further messages in which tensors can be.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"
    },
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}  # fmt: skip
#: Of a tensor: the entries of its external data.
_EXTERNAL = 13


def external_files(graph: bytes) -> list[str]:
    """What the external data of a graph's tensors is called, in order; none in graphs of our own.

    Raises
    ------
    ValueError
        These are no protocol buffers.
    """
    return list(_walk(memoryview(graph), "model", 0))


def _walk(data: memoryview, kind: str, depth: int) -> Iterator[str]:
    if depth > _MOST_NESTED:
        raise ValueError("it is nested too deeply")
    for field, wire, value in _fields(data):
        if wire != _BYTES:
            continue
        if kind == "tensor" and field == _EXTERNAL:
            yield _entry(value)
        elif field in _INSIDE[kind]:
            yield from _walk(value, _INSIDE[kind][field], depth + 1)


def _entry(data: memoryview) -> str:
    """``KEY=VALUE`` of one entry of external data."""
    found = {field: bytes(value) for field, wire, value in _fields(data) if wire == _BYTES}
    key, value = (found.get(field, b"").decode(errors="replace") for field in (1, 2))
    return f"{key}={value}"


def _fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Number, wire type and content of each field of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            _, end = _varint(data, at)
        elif wire == _BYTES:
            length, at = _varint(data, at)
            end = at + length
        elif wire in (_FIXED32, _FIXED64):
            end = at + (4 if wire == _FIXED32 else 8)
        else:
            raise ValueError("it is no ONNX file")
        if not field or end > len(data):
            raise ValueError("it is no ONNX file, or was cut off")
        yield field, wire, data[at:end]
        at = end


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("it is no ONNX file, or was cut off")
