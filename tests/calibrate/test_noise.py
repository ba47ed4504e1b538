"""Predicted noise against real quantise-dequantise on real data."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram, abs_histogram
from calibrate.noise import Density, NetworkNoise, network_noise, predicted_gain_db, tensor_noise

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


def noise_to_signal(histogram: AbsHistogram, scales: NDArray[np.float64]) -> NDArray[np.float64]:
    """Predict the total noise over the signal's power, (n,), at scales (n,), all positive."""
    density = Density(histogram)
    power = density.density @ np.diff(density.edges**3) / 3.0
    return np.asarray(np.add(*Density(histogram).noise(scales)) / power)


def measured(x: NDArray[np.float32], scale: float) -> float:
    return float(((x - np.clip(np.rint(x / scale), -127, 127) * scale) ** 2).mean())


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", DATA)
def test_prediction_is_within_two_percent_of_the_measurement(kind: str, dtype: type[np.floating]) -> None:
    x = DATA[kind].astype(dtype)
    histogram = abs_histogram(x)
    scales = histogram.amax * SHARES / 127
    real = np.array([measured(x.astype(np.float64), scale) for scale in scales])
    assert np.add(*Density(histogram).noise(scales)) == pytest.approx(real, rel=0.02)
    assert noise_to_signal(histogram, scales) == pytest.approx(real / np.square(x, dtype=np.float64).mean(), rel=0.02)


def test_a_tensor_that_saw_only_zeros_says_nothing() -> None:
    silent = abs_histogram(np.zeros(100, np.float32))
    spoken = abs_histogram(DATA["normal"].astype(np.float32))
    alone = predicted_gain_db({"b": spoken}, {"b": 0.1})
    assert predicted_gain_db({"a": silent, "b": spoken}, {"a": 0.1, "b": 0.1}) == alone
    assert predicted_gain_db({"a": silent}, {"a": 0.1}) == 0.0
    assert predicted_gain_db({"b": spoken}, {}) == 0.0


def network(bits: int = 12) -> dict[str, AbsHistogram]:
    return {kind: abs_histogram(x.astype(np.float32), bits) for kind, x in DATA.items()}


def scales_of(live: Mapping[str, AbsHistogram], factor: float) -> dict[str, float]:
    return {name: histogram.amax * factor / 127 for name, histogram in live.items()}


def in_db(noise: NetworkNoise) -> float:
    return 10.0 * float(np.log10(noise.total))


@pytest.mark.parametrize("kind", DATA)
def test_a_tensor_of_a_network_is_within_a_tenth_of_a_db_of_the_tensor_alone(kind: str) -> None:
    live = {kind: network()[kind]}
    factors = (4.0, 1.0, 0.3, 0.02)
    today, least = network_noise(live, [scales_of(live, factor) for factor in factors])
    alone = noise_to_signal(live[kind], np.array(factors) * live[kind].amax / 127)
    assert [in_db(noise) for noise in today] == pytest.approx(10.0 * np.log10(alone), abs=0.1)
    coarsely = np.exp2(-np.arange(96) / 8) * live[kind].amax / 127
    assert in_db(least) < 10.0 * np.log10(noise_to_signal(live[kind], coarsely).min()) + 0.1


@pytest.mark.parametrize("factor", [4.0, 1.0, 0.3, 0.02])
def test_the_gain_of_a_network_is_within_a_tenth_of_a_db_of_an_exhaustive_search(factor: float) -> None:
    live = network()
    scales = scales_of(live, factor)
    today = sum(noise_to_signal(histogram, np.array([scales[name]]))[0] for name, histogram in live.items())
    finely = np.exp2(-np.arange(10 * 64) / 64) / 127  # of amax: 1/64 octave apart
    best = sum(noise_to_signal(histogram, histogram.amax * finely).min() for histogram in live.values())
    assert predicted_gain_db(live, scales) == pytest.approx(10.0 * np.log10(today / best), abs=0.1)


def test_the_least_is_never_more_than_a_given_set() -> None:
    live = network()
    best = {name: Density(histogram).best_amax() / 127 for name, histogram in live.items()}
    (given,), least = network_noise(live, [best])
    assert least.total <= given.total
    assert predicted_gain_db(live, best) < 0.1


def test_a_network_shows_wide_steps_and_clipping_apart() -> None:
    live = network()
    (wide, narrow), least = network_noise(live, [scales_of(live, 4.0), scales_of(live, 0.02)])
    assert wide.clipping == 0.0 < wide.rounding == wide.total
    assert narrow.clipping > 100.0 * narrow.rounding
    assert 0.0 < least.clipping < least.rounding


def test_a_tensor_without_a_scale_in_one_set_counts_in_none() -> None:
    live = network()
    known, fewer = scales_of(live, 1.0), {name: scale for name, scale in scales_of(live, 0.5).items() if name != "relu"}
    rest = {name: histogram for name, histogram in live.items() if name != "relu"}
    assert network_noise(live, [known, fewer]) == network_noise(rest, [known, fewer])
    assert network_noise(live, [known, {}]) == ([NetworkNoise(0.0, 0.0)] * 2, NetworkNoise(0.0, 0.0))


def test_histograms_of_other_numbers_of_bins_and_other_ranges_count_alike() -> None:
    live, coarse = network(), {f"coarse {name}": histogram for name, histogram in network(11).items()}
    wide = {f"wide {name}": h.widened(h.range_exp + 1) for name, h in live.items()}
    single, all_three = scales_of(live, 0.5), scales_of({**live, **coarse, **wide}, 0.5)
    (one,), least = network_noise(live, [single])
    (three,), least_of_three = network_noise({**live, **coarse, **wide}, [all_three])
    assert three.total == pytest.approx(3.0 * one.total, rel=0.02)
    assert least_of_three.total == pytest.approx(3.0 * least.total, rel=0.02)


def test_a_scene_of_another_brightness_has_another_scale_and_the_same_noise() -> None:
    x = DATA["silu"].astype(np.float32)
    brighter, darker = ({"t": abs_histogram(x * np.float32(factor))} for factor in (1024.0, 2.0**-60))
    assert network_noise(brighter, [scales_of(brighter, 0.5)]) == network_noise(darker, [scales_of(darker, 0.5)])


def test_weights_scale_what_a_tensor_adds() -> None:
    live = network()
    scales = scales_of(live, 0.5)
    alone = {name: network_noise({name: live[name]}, [scales])[0][0] for name in ("relu", "silu")}
    weighted = tensor_noise(live, [scales]).under(0, {"relu": 2.0, "silu": 0.5})
    assert weighted.rounding == pytest.approx(2.0 * alone["relu"].rounding + 0.5 * alone["silu"].rounding, rel=1e-3)
    assert weighted.clipping == pytest.approx(2.0 * alone["relu"].clipping + 0.5 * alone["silu"].clipping, rel=1e-3)
