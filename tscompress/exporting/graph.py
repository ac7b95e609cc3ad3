"""From a module of torch to an ONNX graph of a given precision."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from tscompress.errors import UnsupportedModelError, UsageError
from tscompress.families.graphs import GraphSource
from tscompress.io.untrusted import single_line

Precision = Literal["float32", "float16", "int8", "int8-weights"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

#: An ONNX file is one protocol buffer, which holds at most 2 GiB.
_LARGEST_BYTES = 2**31 - 2**24
#: Where the exporter records the module of a node; removed from the file.
_SCOPES = "pkg.torch.onnx.name_scopes"
_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export", "torch.fx")


def onnx_graph(source: GraphSource, precision: Precision) -> bytes:
    """An ONNX file of a module, with the weights in it.

    ``float16`` stores and multiplies in half precision, but scales series in float32; a source of
    ``weights_only`` is stored so, and multiplied in float32. ``int8`` stores the matrices of the
    layers in 8 bits, of which 7 are used, with a scale for each output, and quantizes their inputs
    as they come (dynamic); the part that writes the outputs stays in float32. ``int8-weights``
    stores matrices in all 8, and token embeddings with a scale for each token, and multiplies in
    float32.

    Parameters
    ----------
    source
        From an adapter's ``graph_sources``; its module is changed.

    Raises
    ------
    UnsupportedModelError
        torch cannot export the module.
    UsageError
        The graph would be too large for one file.
    """
    _check_size(source, precision)
    if precision == "float16" and not source.weights_only:
        for parameter in source.module.parameters():
            parameter.data = parameter.data.half()
    model = _exported(source)
    whole = [n.name for n in model.graph.node if any(_is_of(n, part) for part in source.whole)]
    _strip(model)
    if precision == "float16" and source.weights_only:
        _halve_weights(model)
    if precision == "int8":
        model = _quantized(model, whole)
        _strip(model)
    if precision == "int8-weights":
        _quantize_weights(model, whole)
    content: bytes = model.SerializeToString()
    return content


def opset_of(graph: bytes) -> int:
    """Version of ONNX's own operators in a graph."""
    import onnx

    model = onnx.load_from_string(graph)
    return next(int(one.version) for one in model.opset_import if one.domain in ("", "ai.onnx"))


def _check_size(source: GraphSource, precision: Precision) -> None:
    each = 2 if precision == "float16" else 4  # 8 bits are made of float32
    needed = each * sum(parameter.numel() for parameter in source.module.parameters())
    if needed > _LARGEST_BYTES:
        raise UsageError(
            f"the {precision} graph would have {needed / 1e9:.1f} GB, and an ONNX file "
            "at most 2.1; try --precision float16, or compress the model first."
        )


def _exported(source: GraphSource) -> Any:
    """The graph as a message of ``onnx``, with the names of modules at its nodes."""
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                source.module,
                _arguments(list(source.inputs.values()), source.listed),
                dynamo=True,
                input_names=list(source.inputs),
                output_names=list(source.outputs),
                dynamic_shapes=_dynamic_shapes(source),
                external_data=False,
                verbose=False,
            )
        return program.model_proto  # type: ignore[union-attr]
    except Exception as error:  # torch.export has an error for each way in which it fails
        raise UnsupportedModelError(
            f"torch {torch.__version__} cannot export the model ({single_line(error)}); a folded "
            "checkpoint of the same model can be exported."
        ) from error


def _dynamic_shapes(source: GraphSource) -> tuple[Any, ...]:
    names = {name for sizes in source.sizes.values() for name in sizes.values()}
    free: dict[str, Any] = {name: torch.export.Dim(name, min=1, max=2**20) for name in names}
    patches = {name: source.patch_size * free[name] for name in names if name.endswith("patches")}
    found = free | patches
    free_of = [
        {dim: found[name] for dim, name in source.sizes[given].items()} for given in source.inputs
    ]
    return _arguments(free_of, source.listed)


def _arguments(given: list[Any], listed: int) -> tuple[Any, ...]:
    """The arguments of a module: one for each input, the last ones in a list."""
    plain = len(given) - listed
    return (*given[:plain], given[plain:]) if listed else tuple(given)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes on its steps and on libraries that are not installed."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _is_of(node: Any, module: str) -> bool:
    """Whether a node was exported of a module or of something in it."""
    scopes = next((one.value for one in node.metadata_props if one.key == _SCOPES), "")
    return any(f"'{name}" in scopes for name in (f"{module}'", f"{module}."))


def _strip(model: Any) -> None:
    """Remove text for people: places in the source, docs, shapes of intermediate results."""
    graph = model.graph
    del graph.value_info[:], model.metadata_props[:], graph.metadata_props[:]
    model.doc_string = graph.doc_string = ""
    described = [*graph.input, *graph.output, *graph.initializer, *graph.node, *model.functions]
    nodes = [node for function in model.functions for node in function.node]
    for part in [*described, *nodes]:
        part.doc_string = ""
        del part.metadata_props[:]


def _halve_weights(model: Any) -> None:
    """Store matrices in half precision; a cast, which runtimes fold, makes them float32 again."""
    import onnx

    graph, casts = model.graph, []
    for tensor in graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        name = tensor.name
        halves = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(halves, f"{name}_float16"))
        to = onnx.TensorProto.FLOAT
        casts.append(onnx.helper.make_node("Cast", [tensor.name], [name], to=to))
    nodes = [*casts, *graph.node]  # a node comes after what it reads
    del graph.node[:]
    graph.node.extend(nodes)


def _quantize_weights(model: Any, excluded: list[str]) -> None:
    """Store what matrix products and look-ups read in 8 bits; a product with the scales, which
    runtimes fold, makes it float32 again.
    """
    import onnx

    graph, scaled = model.graph, []
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for tensor in list(graph.initializer):
        if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) != 2:
            continue
        axis = _scaled_axis(tensor.name, readers.get(tensor.name, []), excluded)
        if axis is None:
            continue
        name = tensor.name
        levels, scales = _in_8_bits(onnx.numpy_helper.to_array(tensor), axis)
        parts = f"{name}_int8", f"{name}_scales"
        tensor.CopyFrom(onnx.numpy_helper.from_array(levels, parts[0]))
        graph.initializer.append(onnx.numpy_helper.from_array(scales, parts[1]))
        scaled.append(onnx.helper.make_node("DequantizeLinear", parts, [name], axis=axis))
    nodes = [*scaled, *graph.node]  # a node comes after what it reads
    del graph.node[:]
    graph.node.extend(nodes)


def _scaled_axis(name: str, readers: list[Any], excluded: list[str]) -> int | None:
    """Which axis of a matrix has a scale each: rows that are looked up, or columns of a product;
    None: it stays as it is.
    """
    if any(node.name in excluded for node in readers):
        return None
    axes = {_output_axis(node, list(node.input).index(name)) for node in readers}
    return axes.pop() if len(axes) == 1 else None


def _output_axis(node: Any, place: int) -> int | None:
    """The axis of outputs of a matrix, which is the input ``place`` of ``node``."""
    if node.op_type == "Gemm" and place == 1:
        return 0 if any(one.name == "transB" and one.i for one in node.attribute) else 1
    return {("Gather", 0): 0, ("MatMul", 1): 1}.get((node.op_type, place))


def _in_8_bits(matrix: npt.NDArray[np.float32], axis: int) -> tuple[npt.NDArray[Any], ...]:
    """The nearest of 255 levels, and scales: ``levels * scales`` along ``axis``."""
    largest = np.abs(matrix).max(axis=1 - axis, keepdims=True)
    scales = np.where(largest > 0, largest, 1) / 127
    levels = np.clip(np.rint(matrix / scales), -127, 127).astype(np.int8)
    return levels, scales.ravel().astype(np.float32)


def _quantized(model: Any, excluded: list[str]) -> Any:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, _quiet(), _without_advice():
        given, written = Path(folder, "float32.onnx"), Path(folder, "int8.onnx")
        onnx.save_model(model, str(given))
        quantize_dynamic(
            str(given),
            str(written),
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,  # 7 bits: with 8, sums saturate on processors without VNNI
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=excluded,
            extra_options={"MatMulConstBOnly": True},
        )
        return onnx.load_model(str(written))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Without the root logger's advice to prepare the graph, which an exported one needs not."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
