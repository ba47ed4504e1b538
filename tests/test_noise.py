"""Predicted noise against real quantise-dequantise on real data."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrate.histogram import abs_histogram
from calibrate.noise import Density, noise_power, noise_to_signal, predicted_gain_db

RNG = np.random.default_rng(0)
DATA = {
    "normal": RNG.normal(size=100_000),
    "relu": np.maximum(RNG.normal(size=100_000), 0.0),
    "laplace": RNG.laplace(size=100_000) * 3.0,
    "lognormal": np.exp(RNG.normal(size=100_000) * 1.5),
    "uniform": RNG.random(100_000) * 0.7,
    "sigmoid": 1.0 / (1.0 + np.exp(-3.0 * RNG.normal(size=100_000))),
    "silu": (lambda x: x / (1.0 + np.exp(-x)))(2.5 * RNG.normal(size=100_000)),
    "offset": RNG.normal(10.0, 0.3, size=100_000),
    "relu6": np.clip(RNG.normal(2.0, 4.0, size=100_000), 0.0, 6.0),
    "hard sigmoid": np.clip(RNG.normal(0.5, 0.7, size=100_000), 0.0, 1.0),
    "steep sigmoid": 1.0 / (1.0 + np.exp(-12.0 * RNG.normal(size=100_000))),
    "tanh": np.tanh(3.0 * RNG.normal(size=100_000)),
    "sparse": RNG.laplace(size=100_000) * (RNG.random(100_000) < 0.1),
}
SHARES = np.array([4.0, 1.0, 0.5, 0.1, 1 / 50, 1 / 500])


def measured(x: NDArray[np.float32], scale: float) -> float:
    return float(((x - np.clip(np.rint(x / scale), -127, 127) * scale) ** 2).mean())


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", DATA)
def test_prediction_is_within_two_percent_of_the_measurement(kind: str, dtype: type[np.floating]) -> None:
    x = DATA[kind].astype(dtype)
    histogram = abs_histogram(x)
    scales = histogram.amax * SHARES / 127
    real = np.array([measured(x.astype(np.float64), scale) for scale in scales])
    assert np.add(*noise_power(histogram, scales)) == pytest.approx(real, rel=0.02)
    assert noise_to_signal(histogram, scales) == pytest.approx(real / np.square(x, dtype=np.float64).mean(), rel=0.02)


def test_rounding_and_clipping_are_told_apart() -> None:
    x = DATA["normal"].astype(np.float32)
    histogram = abs_histogram(x)
    rounding, clipping = noise_power(histogram, np.array([histogram.amax, 0.5]) / 127)
    assert clipping[0] < 1e-4 * rounding[0]
    assert clipping[1] > 100.0 * rounding[1]


def test_predicted_gain_is_the_real_gain_of_rescaling() -> None:
    x = DATA["laplace"].astype(np.float32)
    histogram = abs_histogram(x)
    stale = histogram.amax / 8.0 / 127
    best = Density.of(histogram).best_amax() / 127
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
