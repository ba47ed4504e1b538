"""The numerics of repairs: what they predict is what quantise-dequantise does at a layer's output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrate.repair import (
    Equalisation,
    LayerInput,
    activation_noise,
    best_clips,
    equalisation,
    output_shift,
    weight_noise,
)
from calibrate.scale import MIN_SCALE, QMAX, UNSIGNED_QMAX

Floats = NDArray[np.float64]


def layer_input(samples: Floats) -> LayerInput:
    return LayerInput(samples.astype(np.float32), samples.min(axis=1), samples.max(axis=1))


def equalised(matrix: Floats, read: LayerInput, centred: bool) -> Equalisation:
    """Of a calibration that has seen these samples, without headroom."""
    (found,) = equalisation(matrix, read, np.stack((read.low, read.high)).astype(np.float32), centred, (1.0,))
    return found


def quantised(values: Floats, scale: float | Floats) -> Floats:
    return np.clip(np.rint(values / scale), -QMAX, QMAX) * scale


def quantised_weights(matrix: Floats, clips: Floats | float = 1.0) -> Floats:
    reach = np.broadcast_to(clips, matrix.shape[0] * matrix.shape[1]).reshape(*matrix.shape[:2], 1, 1)
    return quantised(matrix, np.abs(matrix).max(axis=(2, 3), keepdims=True) * reach / QMAX)


def outputs(matrix: Floats, samples: Floats) -> Floats:
    """(groups * outputs, n) of a layer without taps."""
    grouped = samples.reshape(matrix.shape[0], matrix.shape[2], -1)
    return np.asarray(np.einsum("goi,gin->gon", matrix[..., 0], grouped)).reshape(-1, samples.shape[1])


def noise_with(matrix: Floats, samples: Floats, found: Equalisation) -> float:
    """Measured, of the layer that reads (x - offset) / divisor, with its INT8 weights and a corrected bias."""
    column = found.divisors[:, np.newaxis]
    scaled = matrix * found.divisors.reshape(matrix.shape[0], 1, matrix.shape[2], 1)
    read = quantised((samples - found.offsets[:, np.newaxis]) / column, max(found.amax / QMAX, MIN_SCALE))
    error = outputs(quantised_weights(scaled), read) - outputs(
        scaled, (samples - found.offsets[:, np.newaxis]) / column
    )
    return float(error.var(axis=1).sum())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(("groups", "out", "inputs"), [(1, 8, 16), (4, 2, 4), (16, 1, 1)])
def test_predicted_noise_is_what_quantising_makes(rng: np.random.Generator, groups: int, out: int, inputs: int) -> None:
    matrix = rng.normal(size=(groups, out, inputs, 1))
    samples = rng.laplace(size=(groups * inputs, 20_000)) * np.exp2(rng.uniform(-2.0, 2.0, (groups * inputs, 1)))
    read = layer_input(samples)
    scale = float(read.amax.max()) / 2.0 / QMAX  # half of the range: some are clipped
    by_activations = outputs(matrix, quantised(samples, scale) - samples)
    assert activation_noise(matrix, read, scale) == pytest.approx(
        np.square(by_activations).mean(axis=1).sum(), rel=0.03
    )
    by_weights = outputs(quantised_weights(matrix) - matrix, samples)
    assert weight_noise(matrix, read.variance) == pytest.approx(by_weights.var(axis=1).sum(), rel=0.03)


def test_an_unsigned_input_has_twice_the_steps(rng: np.random.Generator) -> None:
    matrix = rng.normal(size=(1, 8, 16, 1))
    samples = np.abs(rng.laplace(size=(16, 20_000)))
    read = replace(layer_input(samples), is_unsigned=True)
    scale = float(read.amax.max()) / 2.0 / UNSIGNED_QMAX  # half of the range: some are clipped
    measured = outputs(matrix, np.clip(np.rint(samples / scale), 0, UNSIGNED_QMAX) * scale - samples)
    assert activation_noise(matrix, read, scale) == pytest.approx(np.square(measured).mean(axis=1).sum(), rel=0.03)
    plain, centred = (equalised(matrix, read, each) for each in (False, True))
    assert plain.noise == pytest.approx(centred.noise, rel=0.1)  # offsets win nothing that it has not
    assert equalised(matrix, layer_input(samples), False).noise > 1.5 * plain.noise


def test_taps_that_read_independent_values_add_up(rng: np.random.Generator) -> None:
    kernel, signal = rng.normal(size=9), rng.laplace(size=200_000)
    matrix = kernel.reshape(1, 1, 1, 9)
    scale = float(np.abs(signal).max()) / QMAX
    measured = np.square(np.convolve(quantised(signal, scale) - signal, kernel, "valid")).mean()
    assert activation_noise(matrix, layer_input(signal[np.newaxis]), scale) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("centred", [False, True])
def test_an_equalised_layer_has_the_noise_that_is_predicted(rng: np.random.Generator, centred: bool) -> None:
    matrix = rng.normal(size=(1, 8, 16, 1))
    samples = np.maximum(rng.normal(size=(16, 20_000)) * np.exp2(rng.uniform(-4.0, 4.0, (16, 1))), 0.0)
    found = equalised(matrix, layer_input(samples), centred)
    assert found.noise == pytest.approx(noise_with(matrix, samples, found), rel=0.05)
    assert found.offsets.any() == centred


def test_offsets_quarter_the_noise_of_what_is_never_negative(rng: np.random.Generator) -> None:
    matrix = 1e-3 * np.ones((1, 2, 8, 1))  # their INT8 form is exact: only activations make noise
    samples = rng.uniform(0.0, 1.0, (8, 20_000))
    samples[rng.random(samples.shape) < 0.5] = 0.0
    read = layer_input(samples)
    divided, centred = (equalised(matrix, read, centred) for centred in (False, True))
    assert centred.noise == pytest.approx(divided.noise / 4.0, rel=0.1)
    assert noise_with(matrix, samples, centred) == pytest.approx(centred.noise, rel=0.1)


@pytest.mark.parametrize("centred", [False, True])
def test_headroom_is_for_each_channel_and_within_what_the_tensor_showed(
    rng: np.random.Generator, centred: bool
) -> None:
    ranges = np.array([1.0, 1.0, 64.0, 256.0])
    samples = np.clip(rng.normal(size=(4, 20_000)), -1.0, 1.0) * ranges[:, np.newaxis]
    matrix = (1.0 / ranges).reshape(1, 1, 4, 1) * np.ones((1, 4, 1, 1))
    read = layer_input(samples)
    extremes = np.stack((read.low, read.high)).astype(np.float32)
    wide, tight = equalisation(matrix, read, extremes, centred, (4.0, 1.0))
    held = np.minimum(4.0 * ranges, 256.0)
    for found, least in ((wide, held), (tight, ranges)):
        assert (found.divisors * found.amax + found.offsets >= 0.99 * least).all()
        assert (found.divisors * found.amax - found.offsets >= 0.99 * least).all()
    assert wide.noise > tight.noise
    assert wide.reach > 1.5 > tight.reach


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_divisors_are_powers_of_two_and_zero_is_on_the_grid(seed: int, channels: int) -> None:
    rng = np.random.default_rng(seed)
    samples = rng.normal(rng.uniform(-1.0, 2.0), 1.0, (channels, 64)) * np.exp2(rng.uniform(-8.0, 8.0, (channels, 1)))
    found = equalised(rng.normal(size=(1, 2, channels, 1)), layer_input(samples), centred=True)
    assert np.array_equal(np.frexp(found.divisors)[0], np.full(channels, 0.5))
    assert (found.divisors >= 2.0**-10).all()
    assert (found.divisors <= 1.0).all()
    steps = found.offsets / found.divisors / np.float64(np.float32(max(found.amax / QMAX, MIN_SCALE)))
    np.testing.assert_allclose(steps, np.rint(steps), rtol=0, atol=1e-6)


@pytest.mark.parametrize("centred", [False, True])
def test_silent_channels_are_divided_as_others_are(rng: np.random.Generator, centred: bool) -> None:
    """It may wake up: blown up as if it were small, it would be clipped to nothing then."""
    samples = rng.normal(size=(5, 1000)) * np.array([[1.0], [8.0], [0.0], [8.0], [64.0]])
    found = equalised(rng.normal(size=(1, 3, 5, 1)), layer_input(samples), centred)
    assert found.divisors[2] == found.divisors[1] == found.divisors[3]


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("value", [0.0, 3.0, -1e-6])
@pytest.mark.parametrize("channels", [1, 3])
def test_constant_inputs_make_no_trouble(value: float, channels: int, centred: bool) -> None:
    matrix = np.ones((channels, 1, 1, 1))
    samples = np.full((channels, 10), value)
    read = layer_input(samples)
    found = equalised(matrix, read, centred)
    assert np.isfinite([*found.divisors, *found.offsets, found.amax, found.noise]).all()
    assert (found.divisors == 1.0).all()
    assert found.noise <= channels * max(found.amax / 127.0 / 2.0, MIN_SCALE) ** 2  # half a step, or the narrowest one
    assert noise_with(matrix, samples, found) == pytest.approx(0.0, abs=1e-30)
    assert weight_noise(matrix, read.variance) == 0.0
    assert best_clips(matrix, read.variance).tolist() == [1.0] * channels


def test_clips_lower_the_noise_of_outliers_that_read_little(rng: np.random.Generator) -> None:
    """Such weights are what folded batch normalisation leaves of channels that are all but silent."""
    matrix = rng.normal(size=(1, 2, 64, 9))
    matrix[0, 0, 0] = 8.0
    samples = rng.normal(size=(64, 500))
    samples[0] *= 1e-3
    read = layer_input(samples)
    clips = best_clips(matrix, read.variance)
    assert clips.tolist() == [0.6, 1.0]
    errors = [quantised_weights(matrix, each) - matrix for each in (clips, 1.0)]
    clipped, unclipped = (float((np.square(error).sum(axis=3)[0] @ samples.var(axis=1)).sum()) for error in errors)
    assert weight_noise(matrix, read.variance, clips) == pytest.approx(clipped, rel=1e-3)
    assert weight_noise(matrix, read.variance) == pytest.approx(unclipped, rel=1e-3)
    assert clipped < 0.6 * unclipped


@pytest.mark.parametrize(("groups", "out", "inputs"), [(1, 8, 4), (4, 2, 1)])
def test_the_shift_is_what_quantising_moves_the_means_by(
    rng: np.random.Generator, groups: int, out: int, inputs: int
) -> None:
    matrix = rng.normal(1.0, 1.0, (groups, out, inputs, 1))
    samples = np.maximum(rng.normal(0.0, 1.0, (groups * inputs, 5000)), 0.0)
    scale, clips = 1.0 / QMAX, np.full(groups * out, 0.7)  # clips two thirds of a standard deviation's values away
    before = outputs(matrix, samples)
    after = outputs(quantised_weights(matrix, clips), quantised(samples, scale))
    shift = output_shift(matrix, layer_input(samples), scale, clips)
    np.testing.assert_allclose(shift, (after - before).mean(axis=1), rtol=1e-3, atol=1e-5)
    assert np.square(after - before - shift[:, np.newaxis]).sum() < np.square(after - before).sum()


def test_all_taps_read_the_same_mean(rng: np.random.Generator) -> None:
    matrix, samples = rng.normal(1.0, 1.0, (1, 1, 1, 9)), rng.random(100_000)
    moved = quantised(samples, 0.5 / QMAX)
    expected = np.convolve(moved, quantised_weights(matrix).ravel(), "valid").mean()
    expected -= np.convolve(samples, matrix.ravel(), "valid").mean()
    assert output_shift(matrix, layer_input(samples[np.newaxis]), 0.5 / QMAX) == pytest.approx(expected, rel=1e-3)


def test_scaling_an_input_scales_what_is_known_of_it(rng: np.random.Generator) -> None:
    read = layer_input(rng.normal(size=(3, 1000)))
    divisors, offsets = np.array([0.5, 1.0, 0.25]), np.array([0.0, 1.0, -1.0])
    scaled = read.scaled(divisors, offsets)
    np.testing.assert_allclose(scaled.low, scaled.samples.min(axis=1), rtol=1e-6)
    np.testing.assert_allclose(scaled.amax, np.abs(scaled.samples).max(axis=1), rtol=1e-6)
    np.testing.assert_allclose(scaled.variance, read.variance / divisors**2, rtol=1e-5)
    assert scaled.samples.dtype == np.float32
