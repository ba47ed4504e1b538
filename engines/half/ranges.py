"""Bound |x| of every tensor, and find the nodes that read or make values that float16 cannot hold.

The bounds follow node by node from the largest magnitudes that a calibration measured, and from the weights.
`bound_of_inputs` and `absolute_sums` know the operators, `_Bounds` one graph, and `beyond_half` what float16 holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from calibrate.scale import MIN_SCALE
from engines.graph.topology import AVERAGE_OPS, COMPUTE_OPS, MOVEMENT_OPS, QDQ_OPS, Topology, attribute, number
from engines.graph.weights import dequantised, to_matrix

Floats = NDArray[np.float64]

HALF_MAX = 65504.0
HALF_MIN_NORMAL = 2.0**-14
HEADROOM = 4.0  # frames to come may be brighter than those measured
INT8_REACH = 128  # QuantizeLinear saturates to [-128, 127]

UNIT_OPS = {"Sigmoid", "HardSigmoid", "Tanh", "Erf", "Softsign", "Softmax", "Hardmax", "Sign", "Sin", "Cos"}
NO_LARGER_OPS = {  # |f(x)| <= |x|
    *(MOVEMENT_OPS - {"Concat", "Pad", "Resize"}), *AVERAGE_OPS, "Relu", "ThresholdedRelu", "HardSwish", "Mish", "Gelu",
    "Swish", "Abs", "Neg", "Identity", "Dropout", "Cast", "Expand", "Tile", "GatherElements", "GatherND", "TopK",
    "GlobalMaxPool", "ReduceMax", "ReduceMin", "Trilu",
}  # fmt: skip
LARGEST_OPS = {"Concat", "Max", "Min", "Mean", "Where", "Pad"}
SUM_OPS = {"Add", "Sub", "Sum"}


def beyond_half(model: ModelProto, amax: Mapping[str, float]) -> dict[str, str]:
    """Return, per node that reads or makes values that float16 cannot hold, the reason, which names the tensor.

    1. Values that can exceed 65504.
    2. Tensors measured to stay below 2**-14, and constants that do.
    3. INT8 tensors with a scale s that float16 does not hold: below `calibrate.scale.MIN_SCALE`, or 128 s beyond 65504.

    Q/DQ nodes are not judged themselves.
    """
    bounds = _Bounds(model, amax)
    unfit = {name: bounds.overflow(name) for name, bound in bounds.known.items() if not bound <= HALF_MAX}
    unfit |= {
        name: f"'{name}' was measured at {largest:.3g}, below float16's full precision"
        for name, largest in amax.items()
        if 0.0 < largest < HALF_MIN_NORMAL
    }
    unfit |= dict(bounds.unfit_scales())
    unfit |= {
        name: f"'{name}' reaches {least:.5g} or more, beyond float16: a value made from it was measured so large"
        for name, least in bounds.reached().items()
        if name not in bounds.known and not least <= HALF_MAX
    }
    reasons = {}
    for node in bounds.topology.nodes:
        if node.op_type not in QDQ_OPS:
            # A limit of Clip beyond float16 is no limit there: it is written as the largest float16.
            inputs = node.input[:1] if node.op_type == "Clip" else node.input
            found = [unfit[name] for name in (*inputs, *node.output) if name in unfit]
            found += bounds.vanishing_constants(node)
            if found:
                reasons[node.name] = found[0]
    return reasons


def scale_fits(scale: NDArray[np.float32]) -> bool:
    """Return True if float16 holds the INT8 scales of a tensor, and all values that they dequantise to."""
    return bool(scale.min() >= MIN_SCALE and INT8_REACH * scale.max() <= HALF_MAX)


class _Bounds:
    """Upper bounds on |x| of the float tensors of one graph, derived node by node in its order.

    amax: the largest |x| measured, of all tensors or of some; the bounds hold while the measured tensors stay within
        `HEADROOM` times that. NaN stands for a failed measurement, and fits no limit.
    known: the bounds; a tensor without one is missing.
    """

    def __init__(self, model: ModelProto, amax: Mapping[str, float]) -> None:
        self.topology = Topology(model)
        self.amax = amax
        self.constants = {
            name: numpy_helper.to_array(tensor)
            for name, tensor in self.topology.initializers.items()
            if tensor.data_type in (TensorProto.FLOAT, TensorProto.INT8)
        }
        self.known: dict[str, float] = {}
        for name, values in self.constants.items():
            if values.dtype == np.float32:
                self._learn(name, _largest(values[~np.isinf(values)]))  # float16 has infinities too
        for name in self.topology.inputs:
            self._learn(name, None)
        for node in self.topology.nodes:
            bound = self._derive(node)
            for name in filter(None, node.output):
                self._learn(name, bound)

    def overflow(self, name: str) -> str:
        """Return why a tensor counts as beyond 65504."""
        if name in self.constants:
            return f"constant '{name}' holds {self.known[name]:.5g}, beyond float16"
        if name in self.amax and not self.amax[name] * HEADROOM <= HALF_MAX:
            return f"'{name}' was measured at {self.amax[name]:.5g}, and {HEADROOM:g} times that is beyond float16"
        return f"'{name}' can reach {self.known[name]:.5g}, beyond float16"

    def vanishing_constants(self, node: NodeProto) -> Iterator[str]:
        """Yield the constants of a node that float16 makes subnormal or zero: the largest value, of a divisor any."""
        # A term that is added to a product vanishes beside it: bias (2), and shift and mean of a BatchNormalization.
        added = (2, 3) if node.op_type in COMPUTE_OPS | {"BatchNormalization"} else ()
        for index, name in enumerate(node.input):
            values = self.constants.get(name)
            if values is None or values.dtype != np.float32 or index in added or not values.any():
                continue
            sizes = np.abs(values[values != 0])
            size = sizes.min() if node.op_type == "Div" and index == 1 else sizes.max()
            if size < HALF_MIN_NORMAL:
                yield f"its constant '{name}' is {size:.3g}, below float16's full precision"

    def unfit_scales(self) -> Iterator[tuple[str, str]]:
        """Yield the tensors that such a scale quantises or dequantises, with the reason."""
        for node in self.topology.nodes:
            scale = self.constants.get(node.input[1]) if node.op_type in QDQ_OPS else None
            if scale is not None and not scale_fits(scale):
                extreme = scale.max() if scale.min() >= MIN_SCALE else scale.min()
                name = node.input[0] if node.op_type == "QuantizeLinear" else node.output[0]
                yield name, f"'{name}' has an INT8 scale of {extreme:.3g}, out of float16's reach"

    def reached(self) -> dict[str, float]:
        """Return the size that an unmeasured tensor must reach for a measured tensor behind it to get so large."""
        least = {name: largest * HEADROOM for name, largest in self.amax.items()}
        for node in reversed(self.topology.nodes):
            values = [least[name] for name in node.output if name in least]
            read = node.input if node.op_type in SUM_OPS | {"Mul"} else node.input[:1]
            unknown = {name for name in read if name not in self.known}
            if not values or len(unknown) != 1:
                continue
            others = [self.known[name] for name in read if name in self.known]
            if node.op_type in NO_LARGER_OPS | {"Clip", "LeakyRelu", "Resize"}:
                value = max(values)
            elif node.op_type in SUM_OPS:
                value = max(values) - sum(others)
            elif node.op_type == "Mul" and math.prod(others) > 0.0:
                value = max(values) / math.prod(others)
            else:
                continue
            name = unknown.pop()
            least[name] = max(value, least.get(name, 0.0))
        return least

    def _learn(self, name: str, derived: float | None) -> None:
        found = [] if derived is None or math.isnan(derived) else [derived]
        if name in self.amax:
            found.append(self.amax[name] * HEADROOM)
        if found:
            self.known[name] = min(found, key=lambda bound: -math.inf if math.isnan(bound) else bound)

    def _derive(self, node: NodeProto) -> float | None:
        """Return the bound on a node's outputs that follows from its inputs; None when none does."""
        operator = node.op_type
        if operator in UNIT_OPS:
            return 1.0
        if operator in COMPUTE_OPS:
            return self._product(node)
        if operator == "DequantizeLinear":
            return self._dequantised(node)
        if operator == "BatchNormalization":
            return self._normalised(node)
        if operator == "Clip":
            return self._clipped(node)
        if operator in LARGEST_OPS | SUM_OPS | {"Mul", "PRelu"}:
            read = {"Where": node.input[1:], "Pad": node.input[0:3:2]}.get(operator, node.input)
        else:
            read = node.input[:1]
        bounds = [self.known[name] for name in read if name in self.known]
        if not bounds or len(bounds) < sum(name != "" for name in read):
            return None
        if operator == "Div":
            divisor = self.constants.get(node.input[1])
            smallest = 0.0 if divisor is None else float(np.abs(divisor).min(initial=math.inf))
            return bounds[0] / smallest if smallest > 0.0 else None
        return bound_of_inputs(node, bounds)

    def _product(self, node: NodeProto) -> float | None:
        """Return Hoelder's bound, over the rows of the constant operand; it bounds every partial sum, too."""
        constant = 0 if node.op_type == "MatMul" and self._weight(node.input[1]) is None else 1
        weight, other = self._weight(node.input[constant]), self.known.get(node.input[1 - constant])
        if weight is None or other is None:
            return None
        alpha, beta = (number(node, name, 1.0) if node.op_type == "Gemm" else 1.0 for name in ("alpha", "beta"))
        rows = absolute_sums(node, weight, constant) * other * abs(alpha)
        bias = node.input[2] if len(node.input) > 2 else ""
        if bias and bias not in self.known:
            return None
        added = np.abs(self.constants[bias]) if bias in self.constants else self.known.get(bias, 0.0)
        return float((rows + abs(beta) * added).max(initial=0.0))

    def _weight(self, name: str) -> Floats | None:
        """Return a constant operand, dequantised if it is stored as INT8."""
        if name in self.constants:
            return self.constants[name].astype(np.float64)
        maker = self.topology.producers.get(name)
        values = dequantised(maker, self.topology) if maker and maker.op_type == "DequantizeLinear" else None
        return None if values is None else values.astype(np.float64)

    def _dequantised(self, node: NodeProto) -> float | None:
        weight, scale = self._weight(node.output[0]), self.constants.get(node.input[1])
        if weight is not None:
            return _largest(weight)
        return None if scale is None else INT8_REACH * _largest(scale)

    def _normalised(self, node: NodeProto) -> float | None:
        bound, parameters = self.known.get(node.input[0]), [self.constants.get(name) for name in node.input[1:5]]
        gamma, beta, mean, variance = (None if p is None else p.astype(np.float64) for p in parameters)
        if bound is None or gamma is None or beta is None or mean is None or variance is None:
            return None
        gain = gamma / np.sqrt(variance + number(node, "epsilon", 1e-5))
        return float((np.abs(gain) * bound + np.abs(beta - gain * mean)).max(initial=0.0))

    def _clipped(self, node: NodeProto) -> float | None:
        """Return the bound of Clip: both limits, and the input's bound unless a limit pushes outwards.

        Limits beyond float16 are ignored: exporters write the largest float32 for none.
        """
        names = [*node.input[1:3], "", ""][:2]
        if any(name and name not in self.constants for name in names):
            return None
        low, high = (float(self.constants[name]) if name else None for name in names)
        found = [] if low is None or high is None else [max(abs(low), abs(high))]
        found = [limit for limit in found if limit <= HALF_MAX]
        if node.input[0] in self.known:
            found.append(max(self.known[node.input[0]], low or 0.0, -(high or 0.0)))
        return min(found, default=None)


def _largest(values: NDArray[np.generic]) -> float:
    return float(np.abs(values.astype(np.float64)).max(initial=0.0))


def bound_of_inputs(node: NodeProto, bounds: Sequence[float]) -> float | None:
    """Return a bound on |x| of a node's outputs; None for an operator that is not known to have one.

    bounds: on |x| of the inputs that count, at least one, in the operator's order.
    """
    operator, largest = node.op_type, max(bounds)
    if operator in NO_LARGER_OPS | LARGEST_OPS:
        return largest
    if operator in SUM_OPS:
        return sum(bounds)
    if operator == "Mul":
        return math.prod(bounds)
    if operator == "Resize":  # cubic interpolation overshoots, and cropping fills in a value of its own
        mode = attribute(node, "mode", b"nearest"), attribute(node, "coordinate_transformation_mode")
        return None if mode[0] == b"cubic" or mode[1] == b"tf_crop_and_resize" else largest
    if operator == "PRelu":
        return bounds[0] * max(1.0, bounds[1])
    functions = {
        "LeakyRelu": lambda x: x * max(1.0, abs(number(node, "alpha", 0.01))),
        "Elu": lambda x: max(x, abs(number(node, "alpha", 1.0))),
        "Celu": lambda x: max(x, abs(number(node, "alpha", 1.0))),
        "Selu": lambda x: max(x, abs(number(node, "alpha", 1.67326))) * abs(number(node, "gamma", 1.0507)),
        "Softplus": lambda x: x + math.log(2.0),
        "Exp": lambda x: math.exp(min(x, 700.0)),
        "Sqrt": math.sqrt,
    }
    return functions[operator](largest) if operator in functions else None


def absolute_sums(node: NodeProto, weight: Floats, constant: int) -> Floats:
    """Return the sum of |w| over all products that one output value adds up: float64, one per output channel.

    weight: the constant operand of a Conv, ConvTranspose, Gemm or MatMul, in ONNX's layout; constant: which input it
    is, 0 or 1.
    """
    sizes = np.abs(weight)
    if node.op_type == "MatMul":  # its weights may have any rank
        return np.asarray(sizes.sum(axis=-1 if constant == 0 or weight.ndim == 1 else -2))
    return np.asarray(to_matrix(node, sizes).sum(axis=(2, 3))).ravel()
