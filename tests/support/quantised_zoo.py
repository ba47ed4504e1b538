"""Networks that bring Q/DQ of their own, and ours added to them."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto
from zoo import Net

from engines.quantise.apply_plan import insert_qdq
from engines.quantise.placement import place


class QuantisedNet(Net):
    """A net whose builder quantises."""

    def int8(self, x: str, scale: float | NDArray[np.float32] = 0.03, zero: int = 0, **attributes: int) -> str:
        """Q and DQ, each with constants of its own, as PyTorch exports them."""
        q = self.node("QuantizeLinear", x, *self._scale(scale, zero), **attributes)
        return self.node("DequantizeLinear", q, *self._scale(scale, zero), **attributes)

    def stored(self, shape: tuple[int, ...], axis: int = 0) -> str:
        """Weights as INT8, a scale per channel."""
        weight = self.constant(self.rng.integers(-127, 128, shape).astype(np.int8))
        scale = self.rng.uniform(0.001, 0.01, shape[axis]).astype(np.float32)
        return self.node("DequantizeLinear", weight, *self._scale(scale, 0), axis=axis)

    def int8_conv(self, x: str, inputs: int, outputs: int) -> str:
        """A convolution of what has been quantised already."""
        weight = self.stored((outputs, inputs, 3, 3))
        return self.node("Conv", x, weight, self.weight(outputs), pads=[1, 1, 1, 1])

    def _scale(self, scale: float | NDArray[np.float32], zero: int) -> tuple[str, str]:
        values = np.asarray(scale, np.float32)
        return self.constant(values), self.constant(np.full(values.shape, zero, np.int8))


def net(channels: int = 4) -> QuantisedNet:
    return QuantisedNet((1, channels, 8, 8))


def qat_net() -> ModelProto:
    """Two layers of the model's own, the second with float weights behind Q/DQ; then a float one."""
    n = QuantisedNet((1, 3, 8, 8))
    x = n.node("Relu", n.int8_conv(n.int8("image"), 3, 4))
    weight = n.int8(n.weight(4, 4, 3, 3), n.rng.uniform(0.01, 0.03, 4).astype(np.float32), axis=-4)
    x = n.node("Relu", n.node("Conv", n.int8(x, 0.3), weight, n.weight(4), pads=[1, 1, 1, 1]))
    return n.model(n.conv(x, 4, 2))


def quantised(model: ModelProto, amax: float = 4.0) -> ModelProto:
    placement = place(model)
    graph = insert_qdq(model, placement, dict.fromkeys(placement.taps, amax))
    onnx.checker.check_model(graph, full_check=True)
    return graph
