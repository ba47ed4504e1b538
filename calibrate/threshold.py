"""From a histogram of |x| to amax, the largest magnitude the INT8 grid shall reach.

Methods (the same strings on the command line, in config.yaml and in Python):

    entropy         NVIDIA's KL objective, over every candidate that is not much noisier than the best (default)
    percentile:P    the smallest bin edge that keeps P percent of the values
    mse             the amax of least mean squared quantisation error
    max             no clipping
    global:V        the constant V for every tensor

Source of the objective: S. Migacz, "8-bit Inference with TensorRT" (GTC 2017), as published in NVIDIA's
pytorch-quantization. There one candidate costs a pass over the histogram; here every candidate follows from three
prefix sums (counts, non-empty bins, and c log c), so all of them together cost one matrix of logarithms.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.noise import amax_range, best_amax

LEVELS = 128  # magnitudes an int8 grid has: the groups that the KL objective merges bins into
_TIE = 1e-13  # objectives this close are equal; the widest such candidate wins
_NOISE_EXCESS = 4.0  # 6 dB: how much more noise than the best scale the KL objective may pay
METHODS = "entropy, percentile:P (50 < P <= 100), mse, max, global:V (V > 0)"

Counts = NDArray[np.int64]


def find_amax(
    counts: Counts, bin_width: float | NDArray[np.float64], method: str = "entropy"
) -> NDArray[np.float64] | float:
    """The amax of one histogram, counts (bins,), or of several, (tensors, bins); float64 scalar or (tensors,).

    `bin_width` is in the units of x, one for all or one per tensor. A histogram without counts gives 0.0.
    Raises CalibrationError (`threshold.method`) for a method that is not in METHODS.
    """
    name, parameter = parse_method(method)
    counts = np.asarray(counts)
    rows = np.atleast_2d(counts)
    widths = np.broadcast_to(np.asarray(bin_width, np.float64), rows.shape[:1])
    amax = np.array([_row_amax(row, width, name, parameter) for row, width in zip(rows, widths, strict=True)])
    return amax if counts.ndim == 2 else float(amax[0])


def histogram_amax(histogram: AbsHistogram, method: str = "entropy") -> float:
    """`find_amax` of an AbsHistogram: never beyond the exact amax it has seen, and 0.0 only where all was zero."""
    amax = float(find_amax(histogram.counts, histogram.bin_width, method))
    return amax if method.startswith("global:") else min(max(amax, histogram.bin_width), histogram.amax)


def parse_method(method: str) -> tuple[str, float]:
    """Split 'percentile:99.9' into its name and parameter (0.0 where it takes none).

    Raises CalibrationError (`threshold.method`) naming the methods there are.
    """
    name, _, text = method.partition(":")
    try:
        parameter = float(text) if text else 0.0
    except ValueError:
        parameter = float("nan")
    valid = {
        "entropy": text == "",
        "mse": text == "",
        "max": text == "",
        "percentile": 50.0 < parameter <= 100.0,
        "global": 0.0 < parameter < float("inf"),
    }
    if not valid.get(name, False):
        raise CalibrationError("threshold.method", f"method '{method}'", METHODS, "choose one of them")
    return name, parameter


def _row_amax(counts: Counts, bin_width: float, name: str, parameter: float) -> float:
    if name == "global":
        return parameter
    used = np.flatnonzero(counts)
    if used.size == 0:
        return 0.0
    counts = counts[: used[-1] + 1]  # candidates beyond the largest value clip nothing
    if name == "entropy":
        return _entropy_bins(counts) * bin_width
    if name == "percentile":
        return _percentile_bins(counts, parameter) * bin_width
    if name == "mse":
        return best_amax(counts, bin_width)
    return counts.size * bin_width


def _entropy_bins(counts: Counts) -> int:
    """How many bins to keep, of counts (bins,) whose last bin is not empty: the candidate of least KL divergence.

    Bin 0 is taken as bin 1, so that the zeros of a ReLU do not decide (NVIDIA's rule). The divergence alone is
    blind to clipping in two cases that real networks have: Q is normalised over what is kept, so one lonely bin
    fits itself perfectly (data far from zero); and a bin that is already full hides the tail piled on top of it
    (SiLU, whose minimum of -0.278 collects half of all values). So only candidates within 6 dB of the least
    quantisation noise compete.
    """
    if counts.size <= LEVELS:
        return int(counts.size)
    low, high = amax_range(counts, 1.0, _NOISE_EXCESS)
    counts = counts.copy()
    counts[0] = counts[1]
    candidates, divergence = kl_divergence(counts)
    divergence[(candidates < low) | (candidates > high)] = np.inf
    if not np.isfinite(divergence).any():
        return int(high)
    return int(candidates[np.flatnonzero(divergence <= divergence.min() + _TIE)[-1]])


def kl_divergence(counts: Counts) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """KL(P || Q) of keeping the first i bins, for every i in LEVELS..bins: (i, divergence in nats).

    P holds the kept counts with the clipped tail added to its last bin; Q spreads each of the LEVELS groups of
    kept bins evenly over the group's non-empty bins. A candidate whose Q is zero where P is not is inf; so is
    one that keeps nothing.
    """
    total = float(counts.sum())
    edges, last_group = _group_edges(counts.size)
    kept = np.concatenate(([0.0], np.cumsum(counts, dtype=np.float64)))
    filled = np.concatenate(([0.0], np.cumsum(counts > 0, dtype=np.float64)))
    entropy = np.concatenate(([0.0], np.cumsum(_xlogx(counts.astype(np.float64)))))

    candidates = np.arange(LEVELS, counts.size + 1)
    mass = np.diff(kept[edges], axis=1)
    mean = mass / np.maximum(np.diff(filled[edges], axis=1), 1.0)
    log_mean = np.log(np.maximum(mean, 1.0))  # counts are whole: a group with mass has a mean of at least 1
    cross = np.einsum("ij,ij->i", mass, log_mean)

    last = counts[candidates - 1].astype(np.float64)
    inside = kept[candidates]
    tail = total - inside
    tail_cross = tail * log_mean[np.arange(candidates.size), last_group]
    with np.errstate(divide="ignore", invalid="ignore"):
        divergence = (entropy[candidates - 1] + _xlogx(last + tail) - cross - tail_cross) / total
        divergence += np.log(inside) - np.log(total)
    divergence[((last == 0) & (tail > 0)) | (inside == 0)] = np.inf
    return candidates, divergence


@lru_cache(maxsize=4)
def _all_group_edges(bins: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Row i - LEVELS: the first bin of each of the LEVELS equal groups of i bins; and the group of bin i - 1."""
    candidates = np.arange(LEVELS, bins + 1, dtype=np.int64)
    edges = -(-(np.arange(LEVELS + 1) * candidates[:, None]) // LEVELS)  # ceil(group * i / LEVELS)
    return edges.astype(np.int32), (candidates - 1) * LEVELS // candidates


def _group_edges(bins: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The rows for LEVELS..bins; cached for the next power of two, since a candidate's groups depend on it alone."""
    edges, last_group = _all_group_edges(1 << (bins - 1).bit_length())
    rows = bins - LEVELS + 1
    return edges[:rows], last_group[:rows]


def _xlogx(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x * np.log(np.maximum(x, 1.0))  # x is a whole count: 0 log 0 = 0, 1 log 1 = 0


def _percentile_bins(counts: Counts, percent: float) -> int:
    cumulative = np.cumsum(counts / counts.sum())
    return min(int(np.searchsorted(cumulative, percent / 100.0)), counts.size)
