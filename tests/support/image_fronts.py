"""Models that take their image as exporters for quantisation have it: channels last, as bytes, scaled in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from engines.preprocessing import Layout, PixelType


def fronted(
    model: ModelProto,
    layout: Layout = "NCHW",
    dtype: PixelType = "float32",
    gain: Sequence[float] = (),
    bias: Sequence[float] = (),
    moves_bytes: bool = False,
) -> ModelProto:
    """A float NCHW model behind an image of another layout and type, which its graph turns and scales itself.

    gain, bias: of each channel, or of all; none, no node. moves_bytes: the graph turns the image before it casts it.
    """
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    constants = {tensor.name for tensor in graph.initializer}
    image = next(value for value in graph.input if value.name not in constants)
    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    if dtype == "uint8":
        steps.append(("Cast", [], {"to": TensorProto.FLOAT}))
    if layout == "NHWC":
        steps.insert(0 if moves_bytes else len(steps), ("Transpose", [], {"perm": [0, 3, 1, 2]}))
    for operator, values in (("Mul", gain), ("Add", bias)):
        if values:
            constant = np.array(values, np.float32).reshape(1, -1, 1, 1)
            graph.initializer.append(numpy_helper.from_array(constant, f"front.{operator}"))
            steps.append((operator, [f"front.{operator}"], {}))
    source, nodes = image.name, []
    for number, (operator, inputs, attributes) in enumerate(steps):
        result = f"front.{number}"
        nodes.append(helper.make_node(operator, [source, *inputs], [result], name=f"front/{operator}", **attributes))
        source = result
    for node in graph.node:
        node.input[:] = [source if name == image.name else name for name in node.input]
    nodes.extend(graph.node)
    del graph.node[:]
    graph.node.extend(nodes)
    shape = [side.dim_param or side.dim_value for side in image.type.tensor_type.shape.dim]
    if layout == "NHWC":
        shape = [shape[0], *shape[2:], shape[1]]
    elem_type = TensorProto.UINT8 if dtype == "uint8" else TensorProto.FLOAT
    image.CopyFrom(helper.make_tensor_value_info(image.name, elem_type, shape))
    return made
