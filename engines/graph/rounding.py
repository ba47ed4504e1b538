"""Emulate arithmetic of fewer bits: round the factors of all products, as TF32 and FP16 kernels do.

So ONNX Runtime shows the noise that a runtime of such arithmetic may have, separately for each input.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from engines.graph.topology import fresh_name, is_float, replace_nodes, tensor_types

_MANTISSA_BITS = 24  # bits of FP32's mantissa, with the implicit one
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Operators whose outputs jump where an input changes a little: noise says nothing of what comes after them. So do all
# that make integers or booleans of floats, such as Greater and ArgMax, but for those that read the shape alone.
_JUMPING = frozenset(
    {"Ceil", "Floor", "Hardmax", "If", "Loop", "Mod", "QuantizeLinear", "Round", "Scan", "Sign", "TopK", "Unique"}
)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_SHAPE_ALONE = frozenset({"Shape", "Size"})


def rounded(values: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Round FP32 values to `bits` bits of mantissa, to nearest: 11 for TF32 and FP16, the range stays that of FP32.

    Source: Dekker, "A floating-point technique for extending the available precision" (Numerische Mathematik 1971),
    the splitting of a number by one product.
    """
    product = np.multiply(values, _splitter(bits), dtype=np.float32)
    return np.subtract(product, product - values, dtype=np.float32)


def round_products(model: ModelProto, bits: int) -> ModelProto:
    """Return the FP32 graph with both factors of every convolution and matrix product rounded to `bits` bits.

    It shows for each input how much noise a runtime may have whose products keep so many bits. Sums stay FP32.
    """
    graph = deepcopy(model)
    types = tensor_types(model)
    weights = {tensor.name: tensor for tensor in graph.graph.initializer}
    taken = {name for node in graph.graph.node for name in (*node.input, *node.output)}
    splitter = fresh_name("rounding", taken)
    names: dict[str, str] = {}
    nodes = []
    for node in graph.graph.node:
        factors = range(min(2, len(node.input))) if node.op_type in _PRODUCTS else ()
        for index in factors:
            name = node.input[index]
            if name not in names and name in weights and weights[name].data_type == TensorProto.FLOAT:
                names[name] = fresh_name(f"{name}/rounded", taken)
                values = rounded(numpy_helper.to_array(weights[name]), bits)
                graph.graph.initializer.append(numpy_helper.from_array(values, names[name]))
            elif name not in names and is_float(types, name):
                names[name] = fresh_name(f"{name}/rounded", taken)
                product, rest = (fresh_name(f"{name}/{part}", taken) for part in ("product", "rest"))
                nodes.append(helper.make_node("Mul", [name, splitter], [product]))
                nodes.append(helper.make_node("Sub", [product, name], [rest]))
                nodes.append(helper.make_node("Sub", [product, rest], [names[name]]))
            node.input[index] = names.get(name, name)
        nodes.append(node)
    graph.graph.initializer.append(numpy_helper.from_array(np.array(_splitter(bits), np.float32), splitter))
    return replace_nodes(graph, nodes)


def _splitter(bits: int) -> float:
    return float((1 << _MANTISSA_BITS - bits) + 1)


def smooth_outputs(model: ModelProto) -> list[str]:
    """Return the float outputs that change little where the values before them do: no operator before them selects."""
    types = tensor_types(model)
    jumps: dict[str, bool] = {}
    for node in model.graph.node:  # in topological order, as ONNX demands
        made = types.get(node.output[0])
        decides = made is not None and made.elem_type not in _FLOATS and any(is_float(types, n) for n in node.input)
        jumping = node.op_type in _JUMPING or decides or any(jumps.get(name, False) for name in node.input)
        jumps |= dict.fromkeys(node.output, jumping and node.op_type not in _SHAPE_ALONE)
    return [value.name for value in model.graph.output if is_float(types, value.name) and not jumps.get(value.name)]
