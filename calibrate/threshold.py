"""Choose amax, the largest magnitude that the INT8 grid shall reach, from a histogram of |x|.

Nine methods (the same strings on the command line, in config.yaml and in Python):

    entropy               NVIDIA's KL objective, over every candidate not much noisier than the best (default)
    entropy:nvidia        as pytorch-quantization and ModelOpt search it
    entropy:onnxruntime   as ONNX Runtime's EntropyCalibrater searches it
    entropy:ppq           as PPQ searches it
    entropy:tvm           as TVM's (and MXNet's) kl_divergence searches it
    percentile:P          the lower edge of the bin in which the first P percent of the values end, as in
                          pytorch-quantization; where that is 0, the width of a bin
    mse                   the amax of least mean squared quantisation error
    max                   no clipping
    global:V              the constant V for every tensor

`+pow2` after any of them rounds the scale, amax / 127, to a power of two: `entropy:ppq+pow2`.

The answers of the peers' methods are exactly theirs, oddities included, so that a calibration can be compared or
carried over. Where a peer divides by 128 its amax is converted, so that amax / 127 is the peer's scale. All the KL
searches use the prefix sums of divergence.py and try every candidate that the peer tries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.divergence import (
    LEVELS,
    ONNXRUNTIME,
    TVM,
    Candidates,
    Counts,
    Floats,
    SignedRules,
    kl_divergence,
    smoothed_kl_divergence,
)
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.noise import Density
from calibrate.scale import QMAX, power_of_two

METHODS = (
    "entropy, entropy:nvidia, entropy:onnxruntime, entropy:ppq, entropy:tvm, percentile:P (50 < P <= 100), mse, max, "
    "global:V (V > 0), each with or without +pow2"
)
# Divergences this close are equal: rounding must not decide. kernels.cu has the same number.
_TIE = 1e-13
# How much more noise than the best scale's (6 dB) the KL objective may pay. Larger: it clips tails that matter.
_NOISE_EXCESS = 4.0
_PPQ_MIN_SCALE = 1e-8  # PPQ's, of its scales
_PPQ_FLOOR = 1e-30  # PPQ adds this to a probability before its logarithm


@dataclass(frozen=True)
class Method:
    """Hold a parsed method string.

    Args:
        name: One of METHODS, without its parameter.
        parameter: P of `percentile:P`, V of `global:V`, else 0.
        power_of_two: True for `+pow2`.

    >>> Method("mse") == parse_method("mse")
    True
    """

    name: str
    parameter: float = 0.0
    power_of_two: bool = False


def parse_method(method: str) -> Method:
    """Split a method string into its parts.

    Raises CalibrationError (`threshold.method`), which lists the methods, for any other string.

    >>> parse_method("percentile:99.9+pow2")
    Method(name='percentile', parameter=99.9, power_of_two=True)
    """
    text, plus, option = method.partition("+")
    name, _, argument = text.partition(":")
    if name in ("percentile", "global"):
        try:
            parameter = float(argument)
        except ValueError:
            parameter = float("nan")
        known = 50.0 < parameter <= 100.0 if name == "percentile" else 0.0 < parameter < float("inf")
    else:
        name, parameter, known = text, 0.0, text in _SEARCHES
    remedy = "choose one of them"
    if known and option.startswith("asym"):
        remedy = "leave the option out: scales are symmetric, and no KL search here has an asymmetric form"
    if not known or option != ("pow2" if plus else ""):
        raise CalibrationError("threshold.method", f"method '{method}'", METHODS, remedy)
    return Method(name, parameter, plus == "+")


def histogram_amax(histogram: AbsHistogram, method: str = "entropy") -> float:
    """Choose the amax of a histogram.

    Args:
        histogram: Of one tensor.
        method: One of METHODS.

    Returns:
        At most the exact amax, except for `global` and the rounding of `+pow2`. It is 0.0 only if all values were zero.

    Raises CalibrationError (`threshold.method`) for a method that is not in METHODS.

    >>> from calibrate.histogram import abs_histogram
    >>> seen = abs_histogram(np.random.default_rng(0).normal(size=100_000).astype(np.float32))
    >>> [round(histogram_amax(seen, method), 2) for method in ("max", "mse", "percentile:99.99", "entropy")]
    [4.73, 3.94, 3.92, 4.15]
    """
    parsed = parse_method(method)
    amax = _amax(histogram, parsed)
    if parsed.name != "global":
        amax = min(max(amax, histogram.bin_width), histogram.amax)
    return QMAX * power_of_two(amax / QMAX) if parsed.power_of_two and amax > 0.0 else amax


def _amax(histogram: AbsHistogram, method: Method) -> float:
    if not histogram.counts.any():
        return 0.0
    if method.name == "global":
        return method.parameter
    if method.name == "percentile":
        if method.parameter == 100.0:
            return histogram.amax
        cumulative = np.cumsum(histogram.counts / histogram.counts.sum())
        return int(np.searchsorted(cumulative, method.parameter / 100.0)) * histogram.bin_width
    return float(_SEARCHES[method.name](histogram))


def entropy_window(histogram: AbsHistogram) -> tuple[int, int]:
    """Return the fewest and the most bins that `entropy` may keep: those within 6 dB of the least noise.

    Args:
        histogram: Of one tensor that had a finite value.

    Returns:
        Two numbers of bins. Fewer than LEVELS bins are never searched: if the first number is beyond the second, the
        second is the answer.

    >>> from calibrate.histogram import abs_histogram
    >>> entropy_window(abs_histogram(np.random.default_rng(0).normal(size=100_000).astype(np.float32)))
    (1714, 2423)
    """
    bins = _used_bins(histogram)
    if bins <= LEVELS:
        return LEVELS, bins
    low, high = (amax / histogram.bin_width for amax in Density(histogram).amax_range(_NOISE_EXCESS))
    return max(LEVELS, math.ceil(low)), min(math.ceil(high), bins)


def _used_bins(histogram: AbsHistogram) -> int:
    return int(np.flatnonzero(histogram.counts)[-1]) + 1


def _entropy(histogram: AbsHistogram) -> float:
    """Choose the candidate of least KL divergence in the window.

    Bin 0 is taken as bin 1, so that the zeros of a ReLU do not decide (NVIDIA's rule). The window is there because the
    divergence alone does not notice clipping in two cases that real networks have:

    1. Q is normalised over the bins that are kept, so a single bin fits itself perfectly (data far from zero).
    2. A bin that is already full hides the tail piled on top of it (SiLU, whose minimum of -0.278 collects half of all
       values).
    """
    low, high = entropy_window(histogram)
    if low > high:
        return high * histogram.bin_width
    counts = _without_zeros(histogram.counts[: _used_bins(histogram)])
    return _widest(*kl_divergence(counts, np.arange(low, high + 1))) * histogram.bin_width


def _nvidia(histogram: AbsHistogram) -> float:
    """Search every candidate from 128 bins on; if a Q is empty, its NaN wins, as in NumPy's argmin."""
    if histogram.counts.size <= LEVELS:
        return histogram.counts.size * histogram.bin_width
    candidates, divergence = kl_divergence(_without_zeros(histogram.counts))
    undefined = np.flatnonzero(np.isnan(divergence))
    kept = int(candidates[undefined[-1]]) if undefined.size else _widest(candidates, divergence)
    return kept * histogram.bin_width


def _ppq(histogram: AbsHistogram) -> float:
    """Search multiples of 128 bins; the first 0.2 % of the bins are emptied, and one count is put behind them.

    PPQ's scale is threshold / 128, and at least 1e-8.
    """
    bins = histogram.counts.size
    first = int(bins * 0.002)
    counts = np.concatenate((np.zeros(first, np.int64), [1], histogram.counts[first + 1 :]))
    candidates = np.arange(LEVELS, max(bins, 2) + LEVELS - 1, LEVELS)
    kept = _narrowest(*kl_divergence(counts, candidates, _PPQ_FLOOR))
    return QMAX * max(kept * histogram.bin_width / (QMAX + 1), _PPQ_MIN_SCALE)


def _onnxruntime(histogram: AbsHistogram) -> float:
    return min(_signed_bins(histogram.counts, ONNXRUNTIME), histogram.counts.size) * histogram.bin_width


def _tvm(histogram: AbsHistogram) -> float:
    """Search as TVM does, whose scale is threshold / 128."""
    return _signed_bins(histogram.counts, TVM) * histogram.bin_width * QMAX / (QMAX + 1)


def _signed_bins(counts: Counts, rules: SignedRules) -> int:
    """Return the bins on the right of zero that the peer keeps: i, and the one at its edge."""
    if counts.size <= rules.groups // 2:
        return int(counts.size)
    return _narrowest(*smoothed_kl_divergence(counts, rules)) + 1


_SEARCHES: dict[str, Callable[[AbsHistogram], float]] = {
    "entropy": _entropy,
    "entropy:nvidia": _nvidia,
    "entropy:onnxruntime": _onnxruntime,
    "entropy:ppq": _ppq,
    "entropy:tvm": _tvm,
    "mse": lambda histogram: Density(histogram).best_amax(),
    "max": lambda histogram: histogram.amax,
}


def _without_zeros(counts: Counts) -> Counts:
    return np.concatenate((counts[1:2], counts[1:]))


def _widest(candidates: Candidates, divergence: Floats) -> int:
    """Return the last candidate of least divergence; NaN loses."""
    return int(candidates[_least(divergence)[-1]])


def _narrowest(candidates: Candidates, divergence: Floats) -> int:
    """Return the first candidate of least divergence; NaN loses."""
    return int(candidates[_least(divergence)[0]])


def _least(divergence: Floats) -> NDArray[np.intp]:
    divergence = np.where(np.isnan(divergence), np.inf, divergence)
    return np.flatnonzero(divergence <= divergence.min() + _TIE)
