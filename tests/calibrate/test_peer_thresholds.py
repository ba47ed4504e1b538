"""The peers' entropy searches against what the peers answer, and against their rules written out bin by bin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from counted import counted
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrate.divergence import ONNXRUNTIME, TVM, SignedRules, smoothed_kl_divergence
from calibrate.threshold import histogram_amax

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Vectors = dict[str, NDArray[np.float64]]

BINS = 2048
MATCH = 1e-6  # relative


def answers(vectors: Vectors, method: str) -> Floats:
    """Return the amax of every histogram, in bins, up to the last: what a peer knows of the values."""
    rows = np.asarray(vectors["counts"], np.int64)
    return np.array([histogram_amax(replace(counted(row), amax=float(BINS)), method) for row in rows])


def test_nvidia_chooses_the_bins_of_pytorch_quantization(shared_vectors: Vectors) -> None:
    expected = shared_vectors["pytorch_quantization_entropy_bins"]
    assert np.array_equal(answers(shared_vectors, "entropy:nvidia"), expected)


@pytest.mark.parametrize("percent", ["99.9", "99.99"])
def test_percentiles_are_those_of_pytorch_quantization(shared_vectors: Vectors, percent: str) -> None:
    expected = shared_vectors[f"pytorch_quantization_p{percent.replace('.', '_')}_bins"]
    least = 1  # bin: a tensor that is not all zeros gets a range
    assert np.array_equal(answers(shared_vectors, f"percentile:{percent}"), np.maximum(expected, least))


def test_ppq_gives_the_scales_of_ppq(shared_vectors: Vectors) -> None:
    expected = shared_vectors["ppq_kl_scale"] / widths(shared_vectors)
    np.testing.assert_allclose(answers(shared_vectors, "entropy:ppq") / 127.0, expected, rtol=MATCH)


def test_onnxruntime_gives_the_thresholds_of_onnxruntime(shared_vectors: Vectors) -> None:
    expected = np.asarray(shared_vectors["onnxruntime_entropy_amax"], np.float64) / widths(shared_vectors)
    same = np.abs(answers(shared_vectors, "entropy:onnxruntime") / expected - 1.0) <= MATCH
    assert same.sum() >= 37  # on outlier_1 two divergences differ by less than ONNX Runtime's float32 resolves


def widths(vectors: Vectors) -> Floats:
    return np.asarray(vectors["range_max"], np.float64) / BINS


# Bins kept on the right of zero by MXNet 1.9.1's calibrate_entropy, from which TVM took its search, with TVM's 255
# levels and its odd number of bins (benchmarks/workers/threshold_mxnet.py). On the last two histograms it crashes.
MXNET = [
    *(1782, 1671, 1018, 892, 1961, 1890, 358, 503, 1782, 1525, 497, 355, 2048, 2048, 2048, 2048, 2048, 2048),
    *(254, 254, 1618, 1976, 2046, 2042, 144, 145, 2041, 2047, 1524, 1639, 2048, 2048, 128, 128, 684, 684),
]


def test_tvm_gives_the_scales_of_mxnet_over_128(shared_vectors: Vectors) -> None:
    bins = answers(shared_vectors, "entropy:tvm")[: len(MXNET)] * 128 / 127
    assert (np.abs(bins - MXNET) < 1e-6).sum() >= 34  # two differ by one bin: MXNet adds up in float32
    assert np.abs(bins - MXNET).max() < 1.5


def smooth(distribution: Floats) -> Floats:
    empty = distribution == 0
    tax = 1e-4 * empty.sum() / (~empty).sum()
    return np.where(empty, 1e-4, distribution - tax)


def kl(p: Floats, q: Floats) -> float:
    if not q.any():
        return float("inf")
    p, q = smooth(p), smooth(q)
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())


def onnxruntime_by_its_rules(counts: Counts, half_width: int) -> float:
    """Mirrored histogram, 128 groups of whole bins, whole levels; what is left over at the end has none."""
    signed = np.concatenate((counts[::-1], counts)).astype(float)
    start, end = counts.size - half_width, min(counts.size + half_width + 1, signed.size)
    p = signed[start:end].copy()
    p[0] += signed[:start].sum()
    p[-1] += signed[end:].sum()
    width = p.size // 128
    q = np.zeros(p.size)
    for group in range(128):
        stop = end if group == 127 else start + (group + 1) * width
        members = slice(group * width, (group + 1) * width)
        if p[members].any():
            q[members] = np.trunc(signed[start + group * width : stop].sum() / np.count_nonzero(p[members]))
    return kl(p, q)


def tvm_by_its_rules(counts: Counts, half_width: int) -> float:
    """One bin across zero, 255 groups, the slice's first bin unseen by Q; the last group takes what is left over."""
    signed = np.concatenate((counts[:0:-1], [2 * counts[0]], counts[1:])).astype(float)
    zero = counts.size - 1
    start, end = zero - half_width, zero + half_width + 1
    p, seen = signed[start:end].copy(), signed[start:end].copy()
    p[0] += signed[:start].sum()
    p[-1] += signed[end:].sum()
    seen[0] = 0
    width = p.size // 255
    q = np.zeros(p.size)
    for group in range(255):
        members = np.arange(group * width, p.size if group == 254 else (group + 1) * width)
        if seen[members].any():
            q[members] = (p[members] > 0) * seen[members].sum() / np.count_nonzero(seen[members])
    return kl(p, q)


@pytest.mark.parametrize(("rules", "definition"), [(ONNXRUNTIME, onnxruntime_by_its_rules), (TVM, tvm_by_its_rules)])
@settings(max_examples=60)
@given(data=st.data(), bins=st.integers(128, 420), density=st.sampled_from([0.02, 0.3, 1.0]))
def test_smoothed_prefix_sums_give_the_divergence_of_the_rules(
    rules: SignedRules, definition: Callable[..., float], data: st.DataObject, bins: int, density: float
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    counts = (rng.poisson(rng.exponential(200.0, bins)) * (rng.random(bins) < density)).astype(np.int64)
    counts[data.draw(st.integers(0, bins - 1))] += 5
    widths, divergence = smoothed_kl_divergence(counts, rules)
    for index in {0, widths.size - 1, data.draw(st.integers(0, widths.size - 1))}:
        assert divergence[index] == pytest.approx(definition(counts, int(widths[index])), abs=1e-9)
