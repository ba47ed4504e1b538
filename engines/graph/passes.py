"""From any model to the FP32 *master graph*, on which quantisation is decided and expressed. Q/DQ of the model's own
stays in it.

Each pass takes a model it may change and returns the result; `prepare` runs them on a copy, and after each
one checks the model and its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray
from onnx import AttributeProto, ModelProto, TensorProto, ValueInfoProto, numpy_helper

from engines.backend import Array, EngineError
from engines.fold import fold_batch_norms, fold_integer_biases
from engines.graph import trial_image
from engines.image_cast import cast_image_first
from engines.own_quantisation import check_own_quantisation
from engines.topology import TensorType, Topology, all_nodes, value_type

MIN_OPSET = 13  # the first with per-channel Q/DQ
MIN_IR_VERSION = 8  # initialisers need not be inputs (4), and every opset up to 17 may be declared
TOLERANCE = 1e-4  # of an output's largest magnitude: folding changes the order of float32 sums
_REORDERING_OPS = {"TopK", "NonMaxSuppression", "ArgMax"}  # near ties may come out in another order

Run = Callable[[ModelProto, Array], dict[str, Array]]
Pass = Callable[[ModelProto], ModelProto]


def prepare(model: ModelProto, run: Run, input_shape: Sequence[int] | None = None) -> ModelProto:
    """The FP32 master graph of a model that `load_model` has accepted; the model itself is not changed.

    run: executes a graph on one image batch and returns its outputs by name; master and model must agree on a
    random image within `TOLERANCE`. Raises EngineError: `model.opset` (cannot be raised to opset 13),
    `model.pass` (a pass broke the graph or changed its results), `model.quantised` (as `check_own_quantisation`).
    """
    master = ModelProto()
    master.CopyFrom(model)
    signature = _signature(model)
    for step in PASSES:
        master = step(master)
        _check_step(master, signature, step)
    check_own_quantisation(master)
    reference = ModelProto()
    reference.CopyFrom(model)
    _check_equivalent(name_nodes(reference), master, run, input_shape)  # runtimes refuse repeated node names
    return master


def inline_functions(model: ModelProto) -> ModelProto:
    """Replace calls of model-local functions by their bodies: rules look at operators."""
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def drop_initializer_inputs(model: ModelProto) -> ModelProto:
    """Initialisers leave the graph inputs, where IR < 4 demanded them: they are constants here."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in initializers]
    del model.graph.input[:]
    model.graph.input.extend(kept)
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
    del graph.node[:]
    graph.node.extend(kept)
    return model


def _constant(value: AttributeProto) -> TensorProto | None:
    """The tensor of a Constant's attribute; None for strings and sparse tensors, which stay nodes."""
    if value.name == "value":
        tensor = TensorProto()
        tensor.CopyFrom(value.t)
        return tensor
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
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def _is_identity(node: onnx.NodeProto, topology: Topology) -> bool:
    if node.op_type == "Identity":
        return True
    training = len(node.input) > 2 and node.input[2] != ""
    return node.op_type == "Dropout" and not training and not any(map(topology.readers, node.output[1:]))


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
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(initializers)
    return model


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
    initializers = {tensor.name for tensor in model.graph.initializer}
    values: list[ValueInfoProto] = [v for v in model.graph.input if v.name not in initializers]
    return [(value.name, value_type(value)) for value in (*values, *model.graph.output)]


def _check_step(model: ModelProto, signature: list[tuple[str, TensorType]], step: Pass) -> None:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise _broken(step.__name__, str(error)) from error
    if _signature(model) != signature:
        raise _broken(step.__name__, "other inputs or outputs than before")


def _check_equivalent(model: ModelProto, master: ModelProto, run: Run, input_shape: Sequence[int] | None) -> None:
    image = trial_image(model, input_shape)
    expected, found = run(model, image), run(master, image)
    reorders = any(node.op_type in _REORDERING_OPS for node in all_nodes(master.graph))
    for name, values in expected.items():
        error = _relative_error(values, found[name], reorders)
        if not error <= TOLERANCE:
            raise _broken("prepare", f"output '{name}' that differs by {error:.2g} of its largest value")


def _relative_error(expected: Array, found: Array, reorders: bool) -> float:
    """Largest difference over largest magnitude; infinite where shapes or non-finite values differ."""
    if expected.shape != found.shape:
        return float("inf")
    a, b = expected.astype(np.float64).ravel(), found.astype(np.float64).ravel()
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
