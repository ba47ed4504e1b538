"""Read a model, and refuse every unusable file before any runtime sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto, TensorProto, external_data_helper, helper

from engines.errors import EngineError
from engines.graph.constant_inputs import (
    NO_CONSTANTS,
    Constants,
    described,
    pin_inputs,
    proposed_constants,
)
from engines.graph.topology import (
    QDQ_OPS,
    all_nodes,
    graph_inputs,
    subgraphs,
    trial_shape,
    type_name,
    value_type,
)
from engines.interface import Array, TensorSpec
from engines.preprocessing import image_layout
from engines.store.files import read_regular

_MOST_BYTES = 2**31 - 1  # the limit of a protobuf message
_REEXPORT = "export the model again"
_INTEGER_OPS = ("DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "QGemm")


def load_model(path: Path, constants: Constants = NO_CONSTANTS) -> ModelProto:
    """Read an ONNX file, external data included, that takes one image: float32 or uint8, NCHW or NHWC.

    Args:
        constants: for every further input its value, as `pin_inputs` takes it.

    Raises EngineError:
        model.missing, model.empty
        model.unreadable     not ONNX, or truncated
        model.external-data  missing, or outside the model's folder
        model.operator       unknown to ONNX
        model.quantised      by other operators than Q/DQ
        model.invalid        refused by onnx.checker
        model.input          not one image
        model.constant       as `pin_inputs`
    """
    model = parse_model(path)
    _check_operators(model)
    _load_external_data(model, path.parent)
    _check_types(model, path)
    pin_inputs(model, constants)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise EngineError("model.invalid", f"{path}: {error}", "a graph that onnx accepts", _REEXPORT) from error
    _check_input(model)
    return model


def image_input(model: ModelProto) -> TensorSpec:
    """Return the one image input of a model that `load_model` has accepted; a dimension it leaves open is None."""
    value = graph_inputs(model)[0]
    shape = value_type(value).shape or ()
    dtype = helper.tensor_dtype_to_np_dtype(value_type(value).elem_type)
    return TensorSpec(value.name, dtype, tuple(d if isinstance(d, int) else None for d in shape))


def trial_image(model: ModelProto, shape: Sequence[int] | None = None) -> Array:
    """Return a random image of this shape, or of one that the model accepts: levels for uint8, else in [0, 1)."""
    image, random = image_input(model), np.random.default_rng(0)
    shape = shape or trial_shape(image.shape)
    return random.integers(0, 256, shape, np.uint8) if image.dtype == np.uint8 else random.random(shape, np.float32)


def canonical_hash(model: ModelProto) -> str:
    """Return the SHA-256 (hex) of a model's computation: without doc strings, producer, metadata, inferred shapes."""
    bare = deepcopy(model)
    for field in ("doc_string", "producer_name", "producer_version", "model_version", "metadata_props"):
        bare.ClearField(field)
    graph = bare.graph
    graph.ClearField("value_info")
    for part in (graph, *graph.input, *graph.output, *graph.initializer, *all_nodes(graph)):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()


def parse_model(path: Path) -> ModelProto:
    """Read an ONNX file as it is, without its external data, fit for us or not.

    Raises EngineError: `model.missing`, `model.empty`, `model.unreadable`.
    """
    try:
        content = read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise EngineError(
            "model.missing", f"{path}: {error.strerror}", "a readable ONNX file", "check the model's path"
        ) from error
    if not content:
        raise EngineError("model.empty", f"{path}: 0 bytes", "an ONNX file", "copy the model again")
    model = ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise _unreadable(path, f"{len(content)} bytes that are no ONNX model") from error
    _open_dimensions(model)
    if not model.graph.node:  # protobuf takes many a foreign byte string for a message of unknown fields
        raise _unreadable(path, "a model without nodes")
    broken = next((text for text in _strings(model) if isinstance(text, bytes)), None)
    if broken is not None:  # protobuf hands out bytes then, which are no name to anybody
        raise _unreadable(path, f"a name that is not UTF-8: {broken[:40]!r}")
    return model


def _open_dimensions(model: ModelProto) -> None:
    """Leave open what Paddle2ONNX writes as a dimension of -1, or as one named "?": equal names are equal sizes."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_value < 0 or dimension.dim_param == "?":
                dimension.ClearField("value")


def _strings(message: Message) -> Iterator[str | bytes]:
    """Yield all texts of a message, at any depth."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            yield from (value,) if isinstance(value, (str, bytes)) else value
        elif field.type == field.TYPE_MESSAGE:
            for each in (value,) if isinstance(value, Message) else value:
                yield from _strings(each)


def _unreadable(path: Path, found: str) -> EngineError:
    return EngineError(
        "model.unreadable", f"{path}: {found}", "a complete ONNX file", "copy it again, or export it again"
    )


def _check_operators(model: ModelProto) -> None:
    """Refuse an operator that ONNX does not define at the model's opset, or that computes with integers.

    ONNX's own Q/DQ passes; `engines.graph.existing_qdq` looks at its scales once they are all initialisers.
    """
    # ONNX's tables are asked for 32-bit versions; one beyond those names no opset either.
    opsets = {_domain(each.domain): max(-_MOST_BYTES, min(each.version, _MOST_BYTES)) for each in model.opset_import}
    local = {(_domain(function.domain), function.name) for function in model.functions}
    for node in all_nodes(model.graph):
        domain = _domain(node.domain)
        operator = f"{domain}.{node.op_type}" if domain else node.op_type
        where = f"operator {operator} in node '{node.name or next(iter(node.output), '')}'"
        integer = node.op_type in _INTEGER_OPS or node.op_type.startswith("QLinear")
        if integer or (node.op_type in QDQ_OPS and domain):
            raise EngineError(
                "model.quantised",
                where,
                "a float model, or one quantised by ONNX's own QuantizeLinear and DequantizeLinear",
                "export it in the Q/DQ format (ONNX Runtime: QuantFormat.QDQ), or give the model before quantisation",
            )
        known = onnx.defs.has(node.op_type, domain=domain, max_inclusive_version=opsets.get(domain, 1))
        if not known and (domain, node.op_type) not in local:
            raise EngineError(
                "model.operator",
                f"{where}, unknown at opset {opsets.get(domain, 'none')}",
                "operators of the ONNX standard",
                "export the model with standard operators, its custom steps moved into the decoder",
            )


def _check_types(model: ModelProto, path: Path) -> None:
    """Refuse a type that ONNX does not have: its checker accepts any number, and later readers do not."""
    graphs = [model.graph, *(body for node in all_nodes(model.graph) for body in subgraphs(node))]
    for graph in graphs:
        values = (*graph.input, *graph.output, *graph.value_info)
        used = [(value.name, value.type.tensor_type.elem_type) for value in values]
        used += [(tensor.name, tensor.data_type) for tensor in graph.initializer]
        for name, kind in used:
            if kind not in TensorProto.DataType.values():
                found = f"{path}: tensor '{name}' of {type_name(kind)}"
                raise EngineError("model.invalid", found, "a graph that onnx accepts", _REEXPORT)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _load_external_data(model: ModelProto, folder: Path) -> None:
    """Pull external tensors into the model, after every path has proved to lie inside the model's folder."""
    root = folder.resolve()
    external = [t for t in _tensors(model) if t.data_location == TensorProto.EXTERNAL]
    for tensor in external:
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        target = _resolved(root, location)
        if not location or target is None or root not in target.parents:
            raise EngineError(
                "model.external-data",
                f"tensor '{tensor.name}' stored in '{location}'",
                f"a file inside {root}",
                "keep the data files beside the model and export it with relative paths",
            )
        if not target.is_file():  # a pipe or a device would block, or never end
            raise EngineError(
                "model.external-data",
                f"no file '{location}' for tensor '{tensor.name}'",
                f"that file in {root}",
                "copy the model together with its data files",
            )
    try:
        for tensor in external:
            external_data_helper.load_external_data_for_tensor(tensor, str(root))
            tensor.ClearField("external_data")
            tensor.data_location = TensorProto.DEFAULT
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        remedy = "copy the model together with its data files"
        raise EngineError("model.external-data", str(error), "complete data files", remedy) from error


def _resolved(root: Path, location: str) -> Path | None:
    """Return where a name leads, with links followed, since one may lead out; None if no file can have the name."""
    try:
        target = (root / location).resolve()
        target.lstat()
    except FileNotFoundError:
        return target
    except (OSError, ValueError, RuntimeError):  # too long, with a null byte, or a circle of links
        return None
    return target


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor that a model stores: of the graph, of bodies of control flow, of nodes and of functions."""
    nodes = [*all_nodes(model.graph), *(node for function in model.functions for node in function.node)]
    graphs = [model.graph, *(body for node in nodes for body in subgraphs(node))]
    for graph in graphs:
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in nodes:
        for candidate in node.attribute:
            yield from (
                candidate.t,
                *candidate.tensors,
                candidate.sparse_tensor.values,
                candidate.sparse_tensor.indices,
            )


def _check_input(model: ModelProto) -> None:
    inputs = graph_inputs(model)
    if len(inputs) != 1:
        names = ", ".join(map(described, inputs)) or "none"
        raise _no_image(f"{len(inputs)} inputs ({names})", _without_further(model))
    declared, found = value_type(inputs[0]), f"input {described(inputs[0])}"
    if declared.elem_type not in (TensorProto.FLOAT, TensorProto.UINT8):
        raise _no_image(found, "export it with a float32 or uint8 input")
    if declared.shape is None or len(declared.shape) != 4:
        raise _no_image(found, "export it with an input of rank 4")
    if image_layout(declared.shape) is None:
        raise _no_image(found, "fix its channel dimension")


def _without_further(model: ModelProto) -> str:
    """Return the remedy for a model of more inputs than the image."""
    further = proposed_constants(model)
    if not further:
        return "export it with the image as its only input"
    values = ", ".join(f"{name}: {'...' if value is None else value}" for name, value in further.items())
    return f"add a constant for each input but the image to the spec, inputs: {{{values}}}, or export it without them"


def _no_image(found: str, remedy: str) -> EngineError:
    return EngineError(
        "model.input", found, "one float32 or uint8 image, NCHW or NHWC, with 1, 3 or 4 channels", remedy
    )
