"""Turn amax into INT8 scales: symmetric, zero point 0, integers in [-127, 127]; unsigned in [0, 255].

The scales are float32; a float16 form of the graph rounds them. Two guards make every scale survive that:

- `MIN_SCALE`: below 2**-14 float16 is subnormal with spacing 2**-24, so rounding a scale s moves 127 * s by
  up to 127 * 2**-25. From s = 2**-17 on, that is less than half an INT8 step, s / 2. Smaller scales are
  raised to 2**-17: a range under 9.7e-4 keeps its values, in fewer steps.
- `MAX_SCALE`: the largest float16. An activation that needs more than 127 * 65504 has diverged, and is
  refused.

That is about the scale. The values, up to 127 * s, may still be beyond float16: the layers that read such a tensor have
to stay float32.

A range that is exactly zero gets `UNUSED_SCALE`. Any scale represents zeros. This one

- leaves the range [-0.99, 0.99] to a tensor that is no longer zero after calibration, which is not clipped to nothing;
- keeps bias / (input scale * weight scale) inside int32 for the dead channels that pruning and batch normalisation
  leave behind;
- is a power of two, for the calibrations that ask for those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calibrate.errors import CalibrationError

QMAX = 127  # -128 is left out: symmetric, and a product of two INT8 values then fits 15 bits
UNSIGNED_QMAX = 255  # the largest value of uint8
MIN_SCALE = 2.0**-17
MAX_SCALE = 65504.0
UNUSED_SCALE = 2.0**-7


def activation_scale(amax: float, tensor: str, unsigned: bool = False) -> float:
    """Return the scale of an activation tensor, in its units for each step: a float32 value.

    Args:
        amax: End of the range: [-amax, amax], or [0, amax] if unsigned.
        tensor: Name of the tensor in errors.
        unsigned: True for uint8, False for int8.

    Raises CalibrationError:
        scale.amax   amax is NaN, infinite or negative
        scale.range  amax is beyond the reach of a float16 scale

    >>> round(activation_scale(12.7, "conv1"), 3), activation_scale(0.0, "a dead channel")
    (0.1, 0.0078125)
    """
    if not (np.isfinite(amax) and amax >= 0.0):
        raise CalibrationError(
            "scale.amax",
            f"amax {amax} for tensor '{tensor}'",
            "a finite amax, zero or more",
            "check the model and the calibration images for values that are not numbers",
        )
    if not has_scale(amax):
        raise CalibrationError(
            "scale.range",
            f"amax {amax:.3g} for tensor '{tensor}'",
            f"at most {QMAX * MAX_SCALE:.3g}, the reach of a float16 scale",
            "keep the layers that read it float, or look for the layer that diverges",
        )
    largest = UNSIGNED_QMAX if unsigned else QMAX
    return float(np.float32(max(amax / largest, MIN_SCALE) if amax > 0.0 else UNUSED_SCALE))


def has_scale(amax: float) -> bool:
    """Return True if a tensor with this finite amax can be INT8 at all: see `MAX_SCALE`.

    >>> has_scale(6.0), has_scale(1e9)
    (True, False)
    """
    return amax <= QMAX * MAX_SCALE


def power_of_two(scale: float) -> float:
    """Return the power of two nearest to `scale` > 0 by ratio, ties up, within the guards above.

    As PPQ's POWER_OF_2 policy has it, for hardware that rescales by shifts. It costs up to a factor sqrt(2) of range or
    of resolution.

    >>> power_of_two(0.1), power_of_two(0.2)
    (0.125, 0.25)
    """
    exponent = math.floor(math.log2(scale) + 0.5)
    return 2.0 ** min(max(exponent, math.ceil(math.log2(MIN_SCALE))), math.floor(math.log2(MAX_SCALE)))


def weight_scales(weight: NDArray[np.float32], axis: int, tensor: str) -> NDArray[np.float32]:
    """Return one scale for each output channel: float32 (weight.shape[axis],).

    amax is each channel's maximum, as in Wu et al., arXiv:2004.09602, section 4.1.

    Args:
        weight: float32, of any shape.
        axis: The axis of the output channels.
        tensor: Name of the weight in errors.

    Raises CalibrationError (`scale.amax`, `scale.range`) as `activation_scale` does.

    >>> weight_scales(np.float32([[127.0, 1.0], [-254.0, 0.0]]), axis=0, tensor="conv1.weight").tolist()
    [1.0, 2.0]
    """
    others = tuple(i for i in range(weight.ndim) if i != axis)
    amax = np.abs(weight).max(axis=others)
    return np.array([activation_scale(float(channel), tensor) for channel in amax], np.float32)


def clipped(scales: NDArray[np.float32], fractions: Sequence[float]) -> NDArray[np.float32]:
    """Return scales (channels,) that reach a fraction of the range only.

    Args:
        scales: float32 (channels,).
        fractions: In (0, 1]: one for each channel, or one for all.

    >>> clipped(np.float32([0.5, 0.25]), [0.5, 1.0]).tolist()
    [0.25, 0.25]
    """
    narrowed: NDArray[np.float32] = np.maximum(scales * np.asarray(fractions, np.float32), np.float32(MIN_SCALE))
    return narrowed


def quantise(weight: NDArray[np.float32], scales: NDArray[np.float32], axis: int, most: int = QMAX) -> NDArray[np.int8]:
    """Return round(weight / scale), ties to even as in ONNX QuantizeLinear, saturated to [-most, most]: int8.

    Args:
        weight: float32, of any shape.
        scales: float32 (weight.shape[axis],).
        axis: The axis of the output channels.
        most: The largest integer, at most 127.

    Returns:
        int8, of the weight's shape.

    >>> quantise(np.float32([[0.5, -1.0], [9.0, 0.1]]), np.float32([0.5, 0.05]), axis=0).tolist()
    [[1, -2], [127, 2]]
    """
    along = [1] * weight.ndim
    along[axis] = -1
    steps: NDArray[np.float32] = np.rint(weight / scales.reshape(along))
    return steps.clip(-most, most).astype(np.int8)
