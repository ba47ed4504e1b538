from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibrate.errors import CalibrationError
from calibrate.scale import MAX_SCALE, MIN_SCALE, QMAX, activation_scale, power_of_two, quantise, weight_scales

WEIGHTS = hnp.arrays(
    np.float32, st.tuples(*[st.integers(1, 4)] * 3), elements=st.floats(-100, 100, width=32, allow_subnormal=False)
)


@given(st.floats(QMAX * MIN_SCALE, QMAX * MAX_SCALE))
def test_scale_is_amax_over_127(amax: float) -> None:
    assert activation_scale(amax, "x") == np.float32(amax / 127)


# Evenly over the orders of magnitude: the guards bite at the ends.
AMAX = st.floats(-160.0, np.log2(QMAX * MAX_SCALE)).map(lambda exponent: float(2.0**exponent))


@given(st.one_of(AMAX, st.just(0.0)))
def test_float16_keeps_the_scale_within_half_a_step_at_full_range(amax: float) -> None:
    scale = activation_scale(amax, "x")
    half = float(np.float16(scale))
    assert 0 < half < np.inf
    assert QMAX * abs(half - scale) <= scale / 2


def test_below_the_guard_half_a_step_would_be_lost() -> None:
    """Why MIN_SCALE is what it is: under it float16 moves some scale's full range by more than half a step."""
    scales = MIN_SCALE / np.linspace(1.0, 4.0, 1000)
    lost = QMAX * np.abs(scales.astype(np.float16).astype(np.float64) - scales) / scales
    assert lost.max() > 0.5


def test_an_unused_tensor_keeps_about_the_range_of_one() -> None:
    assert activation_scale(0.0, "x") == 2.0**-7


@given(AMAX)
def test_power_of_two_is_the_nearest_and_keeps_the_guards(amax: float) -> None:
    scale = activation_scale(amax, "x")
    rounded = power_of_two(scale)
    assert np.frexp(rounded)[0] == 0.5
    assert MIN_SCALE <= rounded <= MAX_SCALE
    assert activation_scale(QMAX * rounded, "x") == rounded
    if rounded < 2.0**15:
        assert abs(np.log2(rounded / scale)) <= 0.5


def test_ties_between_powers_of_two_go_up() -> None:
    assert power_of_two(2.0**-3.5 * (1 + 1e-12)) == 2.0**-3
    assert power_of_two(2.0**-3.5 * (1 - 1e-12)) == 2.0**-4


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), -1.0])
def test_refuses_what_is_no_amax(amax: float) -> None:
    with pytest.raises(CalibrationError, match=r"scale\.amax.*'conv1'"):
        activation_scale(amax, "conv1")


def test_refuses_a_range_beyond_float16() -> None:
    with pytest.raises(CalibrationError, match=r"scale\.range.*'conv1'"):
        activation_scale(1e7, "conv1")


@given(WEIGHTS, st.integers(0, 2))
def test_weights_come_back_within_half_a_step(weight: np.ndarray, axis: int) -> None:
    scales = weight_scales(weight, axis, "w")
    integers = quantise(weight, scales, axis)
    shape = [1, 1, 1]
    shape[axis] = -1
    steps = scales.reshape(shape)
    assert scales.shape == (weight.shape[axis],)
    assert integers.dtype == np.int8
    assert integers.min() >= -QMAX
    assert np.all(np.abs(integers * steps - weight) <= steps * 0.50001)


def test_rounds_ties_to_even_as_onnx_does() -> None:
    weight = np.array([[0.5, 1.5, 2.5, -0.5, 127.0]], np.float32)
    np.testing.assert_array_equal(quantise(weight, np.ones(1, np.float32), 0), [[0, 2, 2, 0, 127]])


def test_refuses_weights_that_are_not_finite() -> None:
    with pytest.raises(CalibrationError, match=r"scale\.amax.*'w'"):
        weight_scales(np.array([[1.0, np.nan]], np.float32), 0, "w")
