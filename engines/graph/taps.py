"""Tensors inside a graph made visible, and how many values each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from onnx import ModelProto, TensorProto, helper

from engines.errors import EngineError
from engines.graph.topology import tensor_types


def expose(reference: ModelProto, taps: Sequence[str]) -> ModelProto:
    """The graph with the taps as further outputs, those that are inputs or outputs already excepted.

    Raises EngineError (`observer.tap`) for what is no float32 tensor of the graph.
    """
    graph = ModelProto()
    graph.CopyFrom(reference)
    types = tensor_types(reference)
    present = {value.name for value in (*graph.graph.input, *graph.graph.output)}
    for tap in taps:
        found = types.get(tap)
        if found is None or found.elem_type != TensorProto.FLOAT:
            raise EngineError(
                "observer.tap",
                f"tap '{tap}'",
                "a float32 tensor of the reference graph",
                "place the taps on this very graph",
            )
        if tap not in present:
            graph.graph.output.append(helper.make_tensor_value_info(tap, found.elem_type, None))
    return graph


def element_counts(reference: ModelProto, input_shape: Sequence[int], taps: Sequence[str]) -> Mapping[str, int | None]:
    """Values in each tap for an input of a shape, by ONNX's shape inference; None where that cannot tell."""
    graph = ModelProto()
    graph.CopyFrom(reference)
    constants = {tensor.name for tensor in graph.graph.initializer}
    image = next(value for value in graph.graph.input if value.name not in constants)
    for dimension, size in zip(image.type.tensor_type.shape.dim, input_shape, strict=True):
        dimension.dim_value = size
    for output in graph.graph.output:  # what they declare may name dimensions that are settled now
        output.type.tensor_type.ClearField("shape")
    types = tensor_types(graph)
    shapes = {tap: types[tap].shape for tap in taps}
    return {
        tap: prod(size for size in shape if isinstance(size, int))
        if shape is not None and all(isinstance(size, int) for size in shape)
        else None
        for tap, shape in shapes.items()
    }
