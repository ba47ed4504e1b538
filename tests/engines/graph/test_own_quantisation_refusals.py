"""A model's own Q/DQ is refused where it is no symmetric INT8, or where runtimes would read it differently."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from quantised_zoo import QuantisedNet, net
from zoo import run

from engines.errors import EngineError
from engines.graph.passes import prepare


def with_zero_point(value: NDArray[np.generic] | None) -> ModelProto:
    n = net()
    inputs = [n.constant(np.array(0.1, np.float32)), *([] if value is None else [n.constant(value)])]
    return n.model(n.node("DequantizeLinear", n.node("QuantizeLinear", "image", *inputs), *inputs))


@pytest.mark.parametrize(
    ("zero_point", "found"),
    [
        (None, "without a zero point, which stands for uint8"),
        (np.array(0, np.uint8), "with a zero point of type uint8"),
        (np.array(3, np.int8), "with zero point 3"),
    ],
)
def test_refuses_what_is_not_symmetric_int8(zero_point: NDArray[np.generic] | None, found: str) -> None:
    with pytest.raises(EngineError, match=rf"model\.quantised: QuantizeLinear 'QuantizeLinear_t0' {found}.*QInt8"):
        prepare(with_zero_point(zero_point), run)


@pytest.mark.parametrize("scale", [0.0, -0.1, np.nan, np.inf, 1e-40])
def test_refuses_scales_that_are_none(scale: float) -> None:
    n = net()
    with pytest.raises(EngineError, match=rf"model\.quantised: QuantizeLinear .* with scale {scale:.3g}"):
        prepare(n.model(n.int8("image", scale)), run)


def computed_scale(n: QuantisedNet) -> str:
    scale = n.node("GlobalMaxPool", "image")
    zero = n.constant(np.array(0, np.int8))
    return n.node("DequantizeLinear", n.node("QuantizeLinear", "image", scale, zero), scale, zero)


def integer_pooling(n: QuantisedNet) -> str:
    scale, zero = n.constant(np.array(0.1, np.float32)), n.constant(np.array(0, np.int8))
    pooled = n.node("MaxPool", n.node("QuantizeLinear", "image", scale, zero), kernel_shape=[2, 2])
    return n.node("DequantizeLinear", pooled, scale, zero)


def two_scales(n: QuantisedNet) -> str:
    zero = n.constant(np.array(0, np.int8))
    scales = [n.constant(np.array(value, np.float32)) for value in (0.1, 0.2)]
    return n.node("DequantizeLinear", n.node("QuantizeLinear", "image", scales[0], zero), scales[1], zero)


def wrong_axis(n: QuantisedNet) -> str:
    return n.node("Conv", n.int8("image"), n.stored((4, 4, 3, 3), axis=1))


def wrong_axis_behind_a_transpose(n: QuantisedNet) -> str:
    weight = n.node("Transpose", n.stored((8, 8), axis=1), perm=[1, 0])
    return n.node("MatMul", n.int8("image"), weight)


def two_axes(n: QuantisedNet) -> str:
    constants = n._scale(np.full(4, 0.1, np.float32), 0)
    q = n.node("QuantizeLinear", n.weight(4, 4, 1, 1), *constants, axis=0)
    return n.node("Conv", n.int8("image"), n.node("DequantizeLinear", q, *constants, axis=1))


def no_such_axis(n: QuantisedNet) -> str:
    constants = n._scale(np.full(4, 0.1, np.float32), 0)
    bias = n.node("DequantizeLinear", n.constant(np.ones(4, np.int8)), *constants)  # ONNX's default is axis 1
    return n.node("Conv", n.int8("image"), n.stored((4, 4, 3, 3)), bias)


def no_q(n: QuantisedNet) -> str:
    return n.node("DequantizeLinear", n.node("Cast", "image", to=TensorProto.INT8), *n._scale(0.1, 0))


def wrong_count(n: QuantisedNet) -> str:
    weight = n.int8(n.weight(4, 4, 3, 3), np.full(3, 0.1, np.float32), axis=0)
    return n.node("Conv", n.int8("image"), weight)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (computed_scale, "QuantizeLinear 'QuantizeLinear_t1' with a computed scale"),
        (integer_pooling, "QuantizeLinear 'QuantizeLinear_t0' read by MaxPool"),
        (no_q, "DequantizeLinear 'DequantizeLinear_t1' that reads Cast"),
        (two_axes, "read by 'DequantizeLinear_t3' under another scale"),
        (no_such_axis, r"with 4 scales along axis 1 of a weight of shape \[4\]"),
        (lambda n: n.int8("image", np.full((1, 1), 0.1, np.float32)), r"with a float scale of shape \[1, 1\]"),
        (two_scales, "read by 'DequantizeLinear_t1' under another scale"),
        (lambda n: n.int8("image", np.full(4, 0.1, np.float32), axis=1), "with a vector of scales for an activation"),
        (wrong_axis, "along axis 1 of the weight of Conv 'Conv_t3'.*axis 0"),
        (wrong_axis_behind_a_transpose, "along axis 0 of the weight of MatMul"),
        (wrong_count, r"with 3 scales along axis 0 of a weight of shape \[4, 4, 3, 3\]"),
        (lambda n: n.node("Add", "image", n.stored((4, 8, 8))), "with scales per channel, read by Add"),
    ],
)
def test_refuses_what_runtimes_read_differently(make: Callable[[QuantisedNet], str], found: str) -> None:
    n = net()
    with pytest.raises(EngineError, match=rf"model\.quantised: .*{found}"):
        prepare(n.model(make(n)), run)


def test_refuses_integers_as_a_result() -> None:
    n = net()
    model = n.model(n.int8("image"))
    model.graph.output.append(helper.make_tensor_value_info("t0", TensorProto.INT8, [1, 4, 8, 8]))
    with pytest.raises(EngineError, match=r"model\.quantised.*read by others than nodes"):
        prepare(model, run)


def test_refuses_integers_that_are_no_bias() -> None:
    n = net()
    constants = n.constant(np.array(0.1, np.float32)), n.constant(np.array(0, np.int32))
    table = n.node("DequantizeLinear", n.constant(np.ones(4, np.int32)), *constants)
    with pytest.raises(EngineError, match=r"model\.quantised: DequantizeLinear .* zero point of type int32"):
        prepare(n.model(n.node("Relu", "image"), table), run)


def test_refuses_q_dq_in_control_flow() -> None:
    n = net()
    scale, zero = n._scale(0.1, 0)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    q = helper.make_node("QuantizeLinear", ["image", scale, zero], ["q"], name="inner")
    body = helper.make_graph([q, helper.make_node("DequantizeLinear", ["q", scale, zero], ["y"])], "body", [], [result])
    chosen = n.node("If", n.constant(np.array(True)), then_branch=body, else_branch=body)
    model = n.model(n.node("Relu", chosen))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("t1", TensorProto.FLOAT, [1, 4, 8, 8]))
    with pytest.raises(
        EngineError, match=r"model\.quantised: QuantizeLinear 'inner' in the body of a control-flow node"
    ):
        prepare(model, run)
