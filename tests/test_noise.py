"""Predicted noise against real quantise-dequantise on real data."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrate.histogram import abs_histogram
from calibrate.noise import best_amax, noise_power, predicted_gain_db

RNG = np.random.default_rng(0)
DATA = {
    "normal": RNG.normal(size=100_000),
    "relu": np.maximum(RNG.normal(size=100_000), 0.0),
    "laplace": RNG.laplace(size=100_000) * 3.0,
    "lognormal": np.exp(RNG.normal(size=100_000) * 1.5),
}


def measured(x: NDArray[np.float32], scale: float) -> float:
    return float(((x - np.clip(np.rint(x / scale), -127, 127) * scale) ** 2).mean())


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 1 / 50, 1 / 500])
def test_prediction_is_within_two_percent_of_the_measurement(kind: str, share: float) -> None:
    x = DATA[kind].astype(np.float32)
    histogram = abs_histogram(x)
    scale = histogram.amax * share / 127
    assert sum(noise_power(histogram, scale)) == pytest.approx(measured(x, scale), rel=0.02)


def test_rounding_and_clipping_are_told_apart() -> None:
    x = DATA["normal"].astype(np.float32)
    histogram = abs_histogram(x)
    rounding, clipping = noise_power(histogram, histogram.amax / 127)
    assert clipping < 1e-4 * rounding
    rounding, clipping = noise_power(histogram, 0.5 / 127)
    assert clipping > 100.0 * rounding


def test_predicted_gain_is_the_real_gain_of_rescaling() -> None:
    x = DATA["laplace"].astype(np.float32)
    histogram = abs_histogram(x)
    stale = histogram.amax / 8.0 / 127
    best = best_amax(histogram.counts, histogram.bin_width) / 127
    real_db = 10.0 * np.log10(measured(x, stale) / measured(x, best))
    assert predicted_gain_db({"t": histogram}, {"t": stale}) == pytest.approx(real_db, abs=0.2)


def test_a_tensor_that_saw_only_zeros_says_nothing() -> None:
    silent = abs_histogram(np.zeros(100, np.float32))
    spoken = abs_histogram(DATA["normal"].astype(np.float32))
    alone = predicted_gain_db({"b": spoken}, {"b": 0.1})
    assert predicted_gain_db({"a": silent, "b": spoken}, {"a": 0.1, "b": 0.1}) == alone
    assert predicted_gain_db({"a": silent}, {"a": 0.1}) == 0.0
    assert predicted_gain_db({"b": spoken}, {}) == 0.0


def test_weights_say_which_tensor_matters() -> None:
    x = abs_histogram(DATA["normal"].astype(np.float32))
    scales = {"good": x.amax / 127, "bad": x.amax / 1270}
    live = {"good": x, "bad": x}
    silenced = predicted_gain_db(live, scales, {"good": 1.0, "bad": 0.0})
    assert silenced < 2.0 < 10.0 < predicted_gain_db(live, scales)
