"""Read from an ONNX graph what helps to guess its spec: its tensors, what makes its outputs, how it scales its image.

`read_facts` is the entry; it takes graphs of whatever inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from agent.inspection.graph_run import run_apart
from engines.errors import EngineError
from engines.graph.constant_inputs import Constants, image_and_others, pin_inputs, proposed_constants
from engines.graph.load import parse_model
from engines.graph.topology import Dim, Topology, tensor_types, type_name, value_type
from engines.preprocessing import IMAGE_CHANNELS, Layout, image_layout

_OPEN_SIDE = 640  # taken for an input of open size
_PASSING = (
    "Concat", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Identity", "Cast",
    "QuantizeLinear", "DequantizeLinear",
)  # fmt: skip
_ARITHMETIC = ("Add", "Sub", "Mul", "Div")
Values = NDArray[np.float64]


@dataclass(frozen=True)
class GraphTensor:
    """An input or output: its ONNX type, such as 'float32', and its declared shape, None where that is open."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class GraphOutput(GraphTensor):
    """An output of the graph.

    Args:
        closed: the shape for one image, of the graph's size or, where that is open, of the assumed one.
        made_by: the operators that compute it, behind those that only change shape or type, in the order in which their
            results are joined.
        are_boxes: as `RunOutput` has it; None where no run was needed, or none was possible.
    """

    closed: tuple[int | None, ...]
    made_by: tuple[str, ...]
    are_boxes: bool | None


@dataclass(frozen=True)
class Scaling:
    """The first thing that a graph does with its image: x * gain + bias, each of one value or one per channel."""

    gain: Values
    bias: Values


@dataclass(frozen=True)
class GraphFacts:
    """The facts of one graph.

    Args:
        inputs: the image first, where one input can be it.
        layout: of the image; None where neither fits.
        size: (height, width) of the image, the assumed one where it is open; None where no input is the image.
        constants: of each further input, the value that it is taken to have; None where nothing is known of it.
        scaling: None where the graph does not scale its image.
    """

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphOutput, ...]
    layout: Layout | None
    size: tuple[int, int] | None
    scaling: Scaling | None
    operators: frozenset[str]
    metadata: dict[str, str]
    producer: str
    opset: int
    constants: Mapping[str, Any]

    @property
    def channels(self) -> int | None:
        """The channels of the image; None where no input is the image, or it leaves them open."""
        return None if self.layout is None else self.inputs[0].shape[1 if self.layout == "NCHW" else 3]

    @property
    def is_open(self) -> bool:
        """True where the caller chooses height or width."""
        sides = slice(2, 4) if self.layout == "NCHW" else slice(1, 3)
        return self.layout is not None and None in self.inputs[0].shape[sides]


def read_facts(path: Path, constants: Constants | None = None) -> GraphFacts:
    """Read the facts of an ONNX file.

    Args:
        constants: the values of its further inputs; None: those that tared proposes.

    Raises EngineError as `parse_model` and `pin_inputs`, and `model.invalid` as `load_model`.
    """
    model = parse_model(path)
    image, others = image_and_others(model)
    inputs = tuple(map(_tensor, [*([] if image is None else [image]), *others]))
    layout = image_layout(inputs[0].shape) if image is not None else None
    size = _close_size(image, layout) if image is not None and layout else None
    further: Mapping[str, Any] = proposed_constants(model)
    if constants is not None:
        further = {value.name: constants.get(value.name) for value in others}
    pin_inputs(model, {name: value for name, value in further.items() if value is not None})
    topology = Topology(model)
    shapes = _inferred_shapes(model, path)
    can_run = image is not None and None not in further.values()
    ran = run_apart(model, *_image(image)) if image is not None and can_run and _needs_run(shapes) else {}
    shapes |= {name: output.shape for name, output in ran.items()}
    outputs = tuple(
        GraphOutput(
            *(tensor.name, tensor.dtype, tensor.shape),
            closed=shapes[tensor.name],
            made_by=tuple(_made_by(topology, tensor.name)),
            are_boxes=ran[tensor.name].are_boxes if tensor.name in ran else None,
        )
        for tensor in map(_tensor, model.graph.output)
    )
    return GraphFacts(
        inputs=inputs,
        outputs=outputs,
        layout=layout,
        size=size,
        scaling=_scaling(topology, inputs[0].name) if layout else None,
        operators=frozenset(node.op_type for node in topology.nodes),
        metadata={entry.key: entry.value for entry in model.metadata_props},
        producer=model.producer_name,
        opset=next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 0),
        constants=further,
    )


def _tensor(value: onnx.ValueInfoProto) -> GraphTensor:
    tensor = value_type(value)
    dtype = type_name(tensor.elem_type)
    return GraphTensor(value.name, "float32" if dtype == "float" else dtype, _sizes(tensor.shape))


def _sizes(shape: tuple[Dim, ...] | None) -> tuple[int | None, ...]:
    return tuple(dim if isinstance(dim, int) and dim > 0 else None for dim in shape or ())


def _close_size(image: onnx.ValueInfoProto, layout: Layout) -> tuple[int, int]:
    """Write a size into the model where its image input leaves it open, and return (height, width)."""
    batch, *rest = image.type.tensor_type.shape.dim
    batch.dim_value = 1
    sides = rest[1:] if layout == "NCHW" else rest[:2]
    for side in sides:
        side.dim_value = side.dim_value or _OPEN_SIDE
    height, width = (side.dim_value for side in sides)
    return height, width


def _inferred_shapes(model: ModelProto, path: Path) -> dict[str, tuple[int | None, ...]]:
    try:
        types = tensor_types(model)
    except (ValueError, RuntimeError, onnx.checker.ValidationError) as error:  # no checker has seen the graph
        raise EngineError(
            "model.invalid", f"{path}: {error}", "a graph that onnx accepts", "export the model again"
        ) from error
    return {value.name: _sizes(types[value.name].shape) for value in model.graph.output}


def _needs_run(shapes: Mapping[str, tuple[int | None, ...]]) -> bool:
    """Return whether a shape stays open, or boxes beside scores may be corners or offsets: the graph states neither."""
    is_open = any(not shape or None in shape for shape in shapes.values())
    return is_open or (len(shapes) == 2 and any(len(shape) == 3 and shape[2] == 4 for shape in shapes.values()))


def _image(value: onnx.ValueInfoProto) -> tuple[list[int], str]:
    image = _tensor(value)
    return [side or 1 for side in image.shape], image.dtype


def _made_by(topology: Topology, tensor: str) -> Iterator[str]:
    waiting, seen = [tensor], set[str]()
    while waiting:
        name = waiting.pop()
        node = topology.producers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.op_type in _PASSING:
            waiting.extend(reversed(node.input if node.op_type == "Concat" else node.input[:1]))
        else:
            yield node.op_type


def _scaling(topology: Topology, tensor: str) -> Scaling | None:
    """Follow the arithmetic with constants that the graph does with its input `tensor` first."""
    gain, bias = np.ones(1), np.zeros(1)
    steps = 0
    while len(readers := topology.readers(tensor)) == 1:
        node, index = readers[0]
        if node.op_type in _ARITHMETIC:
            constant = _constant(topology, node.input[1 - index])
            if constant is None or (node.op_type in ("Sub", "Div") and index == 1):
                break
            with np.errstate(all="ignore"):  # a graph may divide by zero
                if node.op_type == "Mul":
                    gain, bias = gain * constant, bias * constant
                elif node.op_type == "Div":
                    gain, bias = gain / constant, bias / constant
                else:
                    bias = bias + constant if node.op_type == "Add" else bias - constant
            steps += 1
        elif node.op_type not in ("Cast", "Identity", "Transpose"):
            break
        tensor = node.output[0]
    return Scaling(gain, bias) if steps else None


def _constant(topology: Topology, tensor: str) -> Values | None:
    """Return the value, or the values per channel, of a constant; None where a tensor is no such constant."""
    stored = topology.initializers.get(tensor)
    producer = topology.producers.get(tensor)
    if producer is not None and producer.op_type == "Constant":
        stored = next((attribute.t for attribute in producer.attribute if attribute.name == "value"), None)
    if stored is None or stored.data_location == onnx.TensorProto.EXTERNAL:
        return None
    values = numpy_helper.to_array(stored).astype(np.float64).ravel()
    return values if values.size in IMAGE_CHANNELS else None
