"""Make the FP32 master graph of a model: `prepare` runs the PASSES and checks each.

A pass takes a graph and returns one that computes the same. After each pass onnx.checker accepts the graph and its
inputs and outputs are unchanged; at the end model and master agree on a random image. Rules of placement then meet one
form of a graph only: constants are initialisers, BatchNormalization is folded, every node has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, numpy_helper

from engines.errors import EngineError
from engines.graph.existing_qdq import check_own_quantisation
from engines.graph.load import trial_image
from engines.graph.topology import (
    TensorType,
    Topology,
    all_nodes,
    attribute,
    graph_inputs,
    number,
    replace_items,
    replace_nodes,
    value_type,
)
from engines.graph.weights import by_output, dequantised, from_matrix, to_matrix
from engines.interface import Array

Floats = NDArray[np.float64]

_MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}  # they move values of any type


MIN_OPSET = 13  # the first with per-channel Q/DQ
MIN_IR_VERSION = 8  # initialisers need not be inputs (4), and every opset up to 17 may be declared
TOLERANCE = 1e-4  # share of an output's largest magnitude: folding changes the order of float32 sums
_REORDERING_OPS = {"TopK", "NonMaxSuppression", "ArgMax"}  # near ties may come out in another order

Run = Callable[[ModelProto, Array], dict[str, Array]]
Pass = Callable[[ModelProto], ModelProto]


def prepare(model: ModelProto, run: Run, input_shape: Sequence[int] | None = None) -> ModelProto:
    """Return the FP32 master graph of a model that `load_model` has accepted; the model itself is not changed.

    run: executes a graph on one image batch and returns its outputs by name. Master and model must agree on a random
        image within `TOLERANCE`.

    Raises EngineError:
        model.opset      onnx cannot raise the model to opset 13
        model.pass       a pass broke the graph or changed its results
        model.quantised  as `check_own_quantisation`
    """
    master = deepcopy(model)
    signature = _signature(model)
    for step in PASSES:
        master = step(master)
        try:
            onnx.checker.check_model(master)
        except onnx.checker.ValidationError as error:
            raise _broken(step.__name__, str(error)) from error
        if _signature(master) != signature:
            raise _broken(step.__name__, "other inputs or outputs than before")
    check_own_quantisation(master)
    _check_equivalent(name_nodes(deepcopy(model)), master, run, input_shape)  # runtimes refuse repeated node names
    return master


def inline_functions(model: ModelProto) -> ModelProto:
    """Replace calls of model-local functions by their bodies: rules look at operators."""
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def drop_initializer_inputs(model: ModelProto) -> ModelProto:
    """Initialisers leave the graph inputs, where IR < 4 demanded them: they are constants here."""
    replace_items(model.graph.input, graph_inputs(model))
    model.ir_version = max(model.ir_version, MIN_IR_VERSION)
    return model


def raise_opset(model: ModelProto, target: int = MIN_OPSET, otherwise: str = "") -> ModelProto:
    """Raise the standard opset with onnx.version_converter; models of the target opset or a newer one stay as they are.

    otherwise: what else helps, for the remedy. Raises EngineError: `model.opset` (onnx cannot convert the model).
    """
    version = standard_opset(model)
    if version >= target:
        return model
    try:
        raised = onnx.version_converter.convert_version(model, target)
        replace_items(raised.graph.output, model.graph.output)  # it names dimensions that are open
        onnx.checker.check_model(raised)
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise EngineError(
            "model.opset",
            f"opset {version}, which onnx cannot raise ({error})",
            f"opset {target} or later",
            f"export the model again with opset {target} or later{otherwise}",
        ) from error
    return raised


def standard_opset(model: ModelProto) -> int:
    """The version of ONNX's own operators that a model asks for."""
    return next(int(opset.version) for opset in model.opset_import if opset.domain in ("", "ai.onnx"))


def constants_to_initializers(model: ModelProto) -> ModelProto:
    """Constant nodes become initialisers, so that "has constant weights" is one look-up."""
    graph = model.graph
    kept = []
    for node in graph.node:
        tensor = _constant(node.attribute[0]) if node.op_type == "Constant" and node.attribute else None
        if tensor is None or node.output[0] in {output.name for output in graph.output}:
            kept.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
    return replace_nodes(model, kept)


def _constant(value: AttributeProto) -> TensorProto | None:
    """The tensor of a Constant's attribute; None for strings and sparse tensors, which stay nodes."""
    if value.name == "value":
        return deepcopy(value.t)
    dtype = {
        "value_float": np.float32,
        "value_floats": np.float32,
        "value_int": np.int64,
        "value_ints": np.int64,
    }
    if value.name not in dtype:
        return None
    return numpy_helper.from_array(np.array(onnx.helper.get_attribute_value(value), dtype[value.name]))


def drop_identities(model: ModelProto) -> ModelProto:
    """Remove Identity, and Dropout as inference sees it; one that makes a pinned tensor stays."""
    topology = Topology(model)
    aliases: dict[str, str] = {}
    kept = []
    for node in topology.nodes:
        if _is_identity(node, topology) and not any(name in topology.pinned for name in node.output):
            aliases[node.output[0]] = aliases.get(node.input[0], node.input[0])
        else:
            node.input[:] = [aliases.get(name, name) for name in node.input]
            kept.append(node)
    return replace_nodes(model, kept)


def _is_identity(node: onnx.NodeProto, topology: Topology) -> bool:
    if node.op_type == "Identity":
        return True
    training = len(node.input) > 2 and node.input[2] != ""
    return node.op_type == "Dropout" and not training and not any(map(topology.readers, node.output[1:]))


def cast_image_first(model: ModelProto) -> ModelProto:
    """Cast the bytes of an image before they are moved instead of behind: the same values.

    TensorRT knows no other operator on kUINT8 than the cast (NVIDIA, TensorRT API, DataType: "use the IdentityLayer to
    convert kUINT8 network-level inputs ... prior to use with other TensorRT layers").
    """
    topology = Topology(model)
    image = graph_inputs(model)[0]
    if value_type(image).elem_type != TensorProto.UINT8:
        return model
    moves: list[NodeProto] = []  # the nodes that alone move the image, one after the other
    cast = topology.sole_reader(image.name)
    while cast is not None and cast.op_type in _MOVES:
        moves.append(cast)
        cast = topology.sole_reader(cast.output[0])
    if not moves or cast is None or cast.op_type != "Cast":
        return model
    moved = moves[-1].output[0]
    moves[0].input[0], moves[-1].output[0] = moved, cast.output[0]
    cast.input[0], cast.output[0] = image.name, moved
    nodes = [node for node in topology.nodes if node is not cast]
    nodes.insert(next(index for index, node in enumerate(nodes) if node is moves[0]), cast)
    retyped = {node.output[0] for node in (*moves, cast)}
    replace_items(model.graph.value_info, [each for each in model.graph.value_info if each.name not in retyped])
    return replace_nodes(model, nodes)


def fold_batch_norms(model: ModelProto) -> ModelProto:
    """Fold each BatchNormalization whose input a Conv, ConvTranspose or Gemm makes for it alone."""
    topology = Topology(model)
    kept = []
    for node in topology.nodes:
        producer = topology.producers.get(node.input[0]) if node.op_type == "BatchNormalization" else None
        if producer is not None and _foldable(producer, node, topology):
            _fold(model, producer, node, topology)
        else:
            kept.append(node)
    return replace_nodes(model, kept)


def _foldable(producer: NodeProto, norm: NodeProto, topology: Topology) -> bool:
    """Return True for constant parameters, no other reader of the product, and inference mode."""
    if producer.op_type not in ("Conv", "ConvTranspose", "Gemm"):
        return False
    if topology.sole_reader(norm.input[0]) is not norm:
        return False
    if attribute(norm, "training_mode", 0) or any(map(topology.readers, norm.output[1:])):
        return False
    bias = producer.input[2] if len(producer.input) > 2 else ""
    constants = [producer.input[1], *norm.input[1:], *([bias] if bias else [])]
    if not all(name in topology.initializers for name in constants):
        return False
    channels = topology.initializers[norm.input[1]].dims[0]
    return not bias or list(topology.initializers[bias].dims) == [channels]


def _fold(model: ModelProto, producer: NodeProto, norm: NodeProto, topology: Topology) -> None:
    def value(name: str) -> Floats:
        return numpy_helper.to_array(topology.initializers[name]).astype(np.float64)

    gamma, beta, mean, variance = (value(name) for name in norm.input[1:5])
    gain = gamma / np.sqrt(variance + number(norm, "epsilon", 1e-5))
    has_bias = len(producer.input) > 2 and producer.input[2] != ""
    bias = value(producer.input[2]) if has_bias else np.zeros_like(mean)
    if producer.op_type == "Gemm":
        bias = bias * number(producer, "beta", 1.0)
        for candidate in producer.attribute:
            if candidate.name == "beta":
                candidate.f = 1.0
    weight = value(producer.input[1])
    matrix = to_matrix(producer, weight)
    scaled = from_matrix(producer, matrix * by_output(gain, matrix), weight.shape)
    # New initialisers: other nodes may share the old ones.
    names = (f"{norm.output[0]}.folded_weight", f"{norm.output[0]}.folded_bias")
    shifted = ((bias - mean) * gain + beta).astype(np.float32)
    for name, array in zip(names, (scaled, shifted), strict=True):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    producer.input[:] = [producer.input[0], *names]
    producer.output[0] = norm.output[0]


def fold_integer_biases(model: ModelProto) -> ModelProto:
    """Make a float32 initialiser of what DequantizeLinear makes of an int32 constant: the same values, to the bit.

    Quantising tools store biases so; TensorRT takes them in float alone.
    """
    topology = Topology(model)
    kept = []
    for node in topology.nodes:
        stored = topology.initializers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        integers = stored is not None and stored.data_type == TensorProto.INT32
        values = dequantised(node, topology) if integers and node.output[0] not in topology.outputs else None
        if values is not None:
            model.graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
        else:
            kept.append(node)
    return replace_nodes(model, kept)


def name_nodes(model: ModelProto) -> ModelProto:
    """Give every node a unique name: its own, else operator and first output; repeated ones are numbered."""
    taken: set[str] = set()
    for node in model.graph.node:
        base = node.name or f"{node.op_type}_{node.output[0]}"
        name, count = base, 1
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        taken.add(name)
        node.name = name
    return model


def drop_unused(model: ModelProto) -> ModelProto:
    """Remove nodes and initialisers that no output needs, and inferred shapes, which may be stale."""
    graph = model.graph
    needed = set(Topology(model).pinned)
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    replace_items(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in needed])
    replace_items(graph.value_info, ())
    return replace_nodes(model, reversed(kept))


PASSES: tuple[Pass, ...] = (
    inline_functions,
    drop_initializer_inputs,
    raise_opset,
    constants_to_initializers,
    drop_identities,
    cast_image_first,
    fold_integer_biases,
    fold_batch_norms,
    drop_unused,
    name_nodes,
)


def _signature(model: ModelProto) -> list[tuple[str, TensorType]]:
    return [(value.name, value_type(value)) for value in (*graph_inputs(model), *model.graph.output)]


def _check_equivalent(model: ModelProto, master: ModelProto, run: Run, input_shape: Sequence[int] | None) -> None:
    image = trial_image(model, input_shape)
    reorders = any(node.op_type in _REORDERING_OPS for node in all_nodes(master.graph))

    def differences(first: ModelProto, second: ModelProto) -> dict[str, float]:
        expected, results = run(first, image), run(second, image)
        return {name: _relative_error(values, results[name], reorders) for name, values in expected.items()}

    found = differences(model, master)
    if not all(error <= TOLERANCE for error in found.values()):
        found = differences(*map(_with_logits, (model, master)))
    for name, error in found.items():
        if not error <= TOLERANCE:
            raise _broken("prepare", f"output '{name}' that differs by {error:.2g} of its largest value")


def _with_logits(model: ModelProto) -> ModelProto:
    """Return the graph with logits in place of the outputs that a Sigmoid makes of them.

    A random image may show nothing. All probabilities are then small, and what float32 rounds of a logit is much of
    its probability.
    """
    changed = deepcopy(model)
    topology = Topology(changed)
    for node in topology.nodes:
        if node.op_type == "Sigmoid" and node.output[0] in topology.outputs and not topology.readers(node.output[0]):
            node.op_type = "Identity"
    return changed


def _relative_error(expected: Array, actual: Array, reorders: bool) -> float:
    """Return the largest difference over the largest magnitude; infinite if shapes or non-finite values differ."""
    if expected.shape != actual.shape:
        return float("inf")
    a, b = expected.astype(np.float64).ravel(), actual.astype(np.float64).ravel()
    if reorders:
        a, b = np.sort(a), np.sort(b)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    difference: NDArray[np.float64] = np.abs(a[finite] - b[finite])
    largest = np.abs(a[finite]).max(initial=np.finfo(np.float32).tiny)
    return float(difference.max(initial=0.0) / largest)


def _broken(step: str, found: str) -> EngineError:
    return EngineError(
        "model.pass",
        f"pass {step}: {found}",
        "the same results as the model's",
        "export the model with opset 13 or later, or report it with the model",
    )
