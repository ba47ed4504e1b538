"""Thresholds against a direct evaluation of their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from counted import counted
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrate.divergence import LEVELS, kl_divergence
from calibrate.errors import CalibrationError
from calibrate.histogram import abs_histogram
from calibrate.threshold import METHODS, histogram_amax

Counts = NDArray[np.int64]


def kl_by_definition(counts: Counts, kept: int) -> float:
    """KL(P || Q) of one candidate, built as the definition says, without prefix sums."""
    p = counts[:kept].astype(float)
    q = np.zeros(kept)
    groups = np.arange(kept) * LEVELS // kept
    for group in range(LEVELS):
        members = (groups == group) & (p > 0)
        if members.any():
            q[members] = p[groups == group].sum() / members.sum()
    p[-1] += counts[kept:].sum()
    if q.sum() == 0:
        return float("nan")
    if ((q == 0) & (p > 0)).any():
        return float("inf")
    p, q = p / p.sum(), q / q.sum()
    return float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())


@settings(max_examples=40)
@given(st.lists(st.integers(0, 1000), min_size=LEVELS + 1, max_size=300), st.data())
def test_prefix_sums_give_the_divergence_of_the_definition(values: list[int], data: st.DataObject) -> None:
    counts = np.array([*values, 1], np.int64)
    candidates, divergence = kl_divergence(counts)
    index = data.draw(st.integers(0, candidates.size - 1))
    expected = kl_by_definition(counts, int(candidates[index]))
    assert divergence[index] == pytest.approx(expected, abs=1e-9, nan_ok=True)


SEARCHES = ["entropy", "entropy:nvidia", "entropy:onnxruntime", "entropy:ppq", "entropy:tvm"]


@pytest.mark.parametrize("method", [*SEARCHES, "mse", "max", "percentile:99.9"])
def test_degenerate_histograms_have_an_answer(method: str) -> None:
    assert histogram_amax(counted(np.zeros(4096, np.int64), 0.5), method) == 0.0
    assert 0.0 < histogram_amax(counted(np.arange(64), 0.5), method) <= 64 * 0.5
    tiny = abs_histogram(np.array([0.0] * 9999 + [1e-3], np.float32))
    assert 0.0 < histogram_amax(tiny, method) <= 1.0001e-3


@pytest.mark.parametrize("method", ["entropy", "entropy:onnxruntime", "mse", "max", "percentile:99.9"])
def test_a_histogram_of_a_single_bin_is_kept(method: str) -> None:
    one_bin = np.zeros(4096, np.int64)
    one_bin[700] = 12345
    assert histogram_amax(counted(one_bin, 0.5), method) == pytest.approx(701 * 0.5, rel=0.15)


@pytest.mark.parametrize("method", [*SEARCHES, "mse", "percentile:99.9"])
def test_counts_beyond_the_integers_of_a_float_change_nothing(method: str) -> None:
    counts = np.random.default_rng(2).poisson(np.exp(-np.arange(2048) / 200.0) * 1e5).astype(np.int64)
    many = counts << 38
    assert many.sum() > 2**60
    if method in SEARCHES[2:]:  # these peers add constants to the counts: more counts, another answer
        assert 0.0 < histogram_amax(counted(many), method) <= 2048.0
    else:
        assert histogram_amax(counted(many), method) == histogram_amax(counted(counts), method)
        assert histogram_amax(counted(many + 1), method) == pytest.approx(
            histogram_amax(counted(counts), method), rel=0.2
        )


@pytest.mark.parametrize("method", [*SEARCHES, "mse"])
def test_counts_up_to_the_last_of_int64_give_an_answer_as_good(method: str) -> None:
    counts = np.random.default_rng(2).poisson(np.exp(-np.arange(2048) / 200.0) * 1e5).astype(np.int64)
    fewer, most = counts << 30, counts * (2**63 // int(counts.sum()) - 1)
    assert most.sum() > 2**62
    assert histogram_amax(counted(most), method) == pytest.approx(histogram_amax(counted(fewer), method), rel=1e-3)


RNG = np.random.default_rng(4)


def silu(count: int) -> NDArray[np.float64]:
    x = RNG.normal(0.0, 2.5, count)
    return np.asarray(x / (1.0 + np.exp(-x)))


HARD = {
    "two points": np.repeat([0.2, 5.0], 20_000),
    "offset": RNG.normal(1000.0, 1.0, 40_000),
    "one outlier": np.append(RNG.normal(size=40_000), 300.0),
    "heavy tail": RNG.standard_t(3, 40_000),
    "heavy tail, sparse": np.append(RNG.pareto(11.0, 30_000) * (RNG.random(30_000) < 0.02), np.zeros(300_000)),
    "bimodal": np.append(RNG.normal(0.0, 0.1, 39_000), RNG.normal(8.0, 0.1, 1_000)),
    "relu6": np.clip(RNG.normal(2.0, 4.0, 40_000), 0.0, 6.0),
    "hard swish": (lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0)(RNG.normal(0.0, 3.0, 40_000)),
    "silu": silu(40_000),
    "silu, piled at its minimum": np.append(silu(40_000), [-0.2784] * 160_000),
    "few values": RNG.integers(0, 4, 40_000) * 0.7,
    "seven values": RNG.normal(size=7),
    "squared laplace": RNG.laplace(size=40_000) ** 2,
}


@pytest.mark.parametrize("kind", HARD)
def test_entropy_pays_about_six_db_more_noise_than_the_best_scale_at_most(kind: str) -> None:
    x = HARD[kind].astype(np.float32)
    histogram = abs_histogram(x)

    def noise(amax: float) -> float:
        scale = amax / 127
        return float(((x - np.clip(np.rint(x / scale), -127, 127) * scale) ** 2).mean(dtype=np.float64))

    best = min(noise(histogram.amax * 2.0 ** (-k / 16)) for k in range(160))
    assert 10.0 * np.log10(noise(histogram_amax(histogram)) / best) <= 6.5


def test_zeros_do_not_decide() -> None:
    x = np.maximum(RNG.normal(size=50_000), 0.0).astype(np.float32)
    amax = histogram_amax(abs_histogram(x[x > 0]))
    for zeros in (1_000, 1_000_000):
        assert histogram_amax(abs_histogram(np.append(x[x > 0], np.zeros(zeros, np.float32)))) == amax


def test_nothing_counted_is_an_unused_tensor_by_any_method() -> None:
    assert histogram_amax(counted(np.zeros(2048, np.int64)), "global:3") == 0.0
    assert histogram_amax(counted(np.zeros(2048, np.int64)), "max+pow2") == 0.0


def test_no_scale_of_ppq_is_below_its_least() -> None:
    counts = np.repeat([1_000_000, 0, 1], [100, 1900, 48])
    assert histogram_amax(counted(counts, 2.0**-30), "entropy:ppq") == pytest.approx(127e-8)


@pytest.mark.parametrize("method", [*SEARCHES, "mse", "max", "percentile:99"])
@pytest.mark.parametrize("bins", [4, 64, 128, 256])
def test_any_number_of_bins_has_an_answer(method: str, bins: int) -> None:
    assert 0.0 < histogram_amax(counted(np.ones(bins, np.uint16)), method) <= bins


def test_mse_is_the_least_of_the_errors_on_the_data() -> None:
    x = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    histogram = abs_histogram(x)

    def error(amax: float) -> float:
        scale = amax / 127
        return float(((x - np.clip(np.rint(x / scale), -127, 127) * scale) ** 2).mean())

    best = min(error(histogram.amax * 2.0 ** (-k / 20)) for k in range(100))
    assert error(histogram_amax(histogram, "mse")) <= 1.03 * best


def test_max_and_global_do_as_they_say() -> None:
    x = np.array([0.1, -3.3], np.float32)
    assert histogram_amax(abs_histogram(x), "max") == float(np.float32(3.3))
    assert histogram_amax(abs_histogram(x), "global:6.0") == 6.0


@pytest.mark.parametrize(
    "method", ["", "entropie", "entropy:9", "entropy:", "percentile", "percentile:x", "percentile:5", "percentile:101",
               "global:0", "global:inf", "global:nan", "max:3", "max+pow3", "mse+", "+pow2"],
)  # fmt: skip
def test_unknown_methods_are_refused_with_the_known_ones(method: str) -> None:
    with pytest.raises(CalibrationError, match=r"threshold\.method.*percentile:P.*global:V"):
        histogram_amax(counted(np.ones(16, np.int64)), method)


def test_power_of_two_scales_are_the_nearest() -> None:
    counts = np.random.default_rng(3).poisson(np.exp(-np.arange(2048) / 200.0) * 1e5).astype(np.int64)
    for method in METHODS_TO_ROUND:
        plain, rounded = (
            histogram_amax(counted(counts, 2.0**-7), method),
            histogram_amax(counted(counts, 2.0**-7), f"{method}+pow2"),
        )
        assert np.log2(rounded / 127.0) == np.floor(np.log2(plain / 127.0) + 0.5)
    histogram = abs_histogram(np.array([1.0, -3.0], np.float32))
    assert histogram_amax(histogram, "max+pow2") == 127.0 * 2.0**-5
    assert histogram_amax(histogram, "global:127+pow2") == 127.0


METHODS_TO_ROUND = ["entropy", "entropy:ppq", "mse", "max", "percentile:99.9", "global:3"]


def test_asking_a_kl_search_for_asymmetric_scales_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="scales are symmetric"):
        histogram_amax(counted(np.ones(2048, np.int64)), "entropy:ppq+asymmetric")


def test_every_method_of_the_list_is_known() -> None:
    for method in METHODS.split(", each")[0].split(", "):
        text = method.split(" (")[0].replace("P", "99").replace("V", "2.5")
        assert histogram_amax(counted(np.ones(2048, np.int64)), text) > 0.0
