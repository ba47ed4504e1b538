"""Make tensors inside a graph visible as outputs, and count the values of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import prod

from onnx import ModelProto, TensorProto, helper

from engines.errors import EngineError
from engines.graph.topology import graph_inputs, is_float, tensor_types


def expose(reference: ModelProto, taps: Sequence[str]) -> ModelProto:
    """Return the graph with the taps as further outputs, except those that are inputs or outputs already.

    Raises EngineError (`observer.tap`) for what is no float32 tensor of the graph.
    """
    graph = deepcopy(reference)
    types = tensor_types(reference)
    present = {value.name for value in (*graph.graph.input, *graph.graph.output)}
    for tap in taps:
        if not is_float(types, tap):
            raise EngineError(
                "observer.tap",
                f"tap '{tap}'",
                "a float32 tensor of the reference graph",
                "place the taps on this very graph",
            )
        if tap not in present:
            graph.graph.output.append(helper.make_tensor_value_info(tap, TensorProto.FLOAT, None))
    return graph


def element_counts(reference: ModelProto, input_shape: Sequence[int], taps: Sequence[str]) -> Mapping[str, int | None]:
    """Return the number of values in each tap for an input of a shape; None where ONNX cannot infer it."""
    graph = deepcopy(reference)
    image = graph_inputs(graph)[0]
    for dimension, size in zip(image.type.tensor_type.shape.dim, input_shape, strict=True):
        dimension.dim_value = size
    for output in graph.graph.output:  # they may declare by name dimensions that are fixed now
        output.type.tensor_type.ClearField("shape")
    types = tensor_types(graph)
    shapes = {tap: types[tap].shape for tap in taps}
    return {
        tap: prod(size for size in shape if isinstance(size, int))
        if shape is not None and all(isinstance(size, int) for size in shape)
        else None
        for tap, shape in shapes.items()
    }
