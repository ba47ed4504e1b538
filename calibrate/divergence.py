"""Compute the Kullback-Leibler divergence of every clipping candidate at once, from prefix sums.

A candidate keeps the first i bins of a histogram. P holds the kept counts with the clipped tail piled on the last of
them; Q is what INT8 makes of the kept counts: bins merged into one group per level, each group spread evenly again.
With P's total T and Q's total S, and Q constant over a group,

    KL(P || Q) = (sum P log P - sum over groups of (P's mass) log (Q's level)) / T - log T + log S

and every sum is a difference of two prefix sums: of the counts, of the non-empty bins, and of c log c. A search that
builds P and Q from scratch for each candidate costs bins**2; this costs one matrix of logarithms, candidates x levels.

Source of the objective: S. Migacz, "8-bit Inference with TensorRT" (GTC 2017). `kl_divergence` follows its form in
NVIDIA's pytorch-quantization and in PPQ, `smoothed_kl_divergence` its form in ONNX Runtime and TVM (both from MXNet).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVELS = 128  # magnitudes of an int8 grid: the groups that one half of a histogram is merged into
_CHUNK = 256  # candidates at a time. More: a chunk's matrices leave the second-level cache.
_SMOOTHING = 1e-4  # MXNet's family puts this into an empty bin
_SERIES = 16  # terms of (c - e) log(c - e); the remainder is below e**16 / 240 / (1 - e) per bin, and e is small

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Candidates = NDArray[np.int64]


def kl_divergence(
    counts: Counts, candidates: Candidates | None = None, floor: float = 0.0
) -> tuple[Candidates, Floats]:
    """Return the candidates i and the KL, in nats, of keeping the first i of counts (bins,): two arrays of one length.

    Args:
        counts: LEVELS bins or more, unless `candidates` are given.
        candidates: Ascending numbers of bins; None: LEVELS to bins. They may exceed the number of bins, and clip
            nothing then.
        floor: Q's probability where Q is zero and P is not; 0 makes the candidate infinitely bad.

    A candidate that keeps no count has no Q: its divergence is NaN.

    >>> counts = np.full(256, 10)
    >>> counts[255] = 1000                                 # many values in the last bin
    >>> kept, divergence = kl_divergence(counts)
    >>> kept[[0, -1]], divergence.round(3)[[0, -1]]        # half of the range, all of it
    (array([128, 256]), array([2.467, 0.181]))
    """
    if candidates is None:
        candidates = np.arange(LEVELS, counts.size + 1)
    if candidates[-1] > counts.size:
        counts = np.concatenate((counts, np.zeros(candidates[-1] - counts.size, np.int64)))
    kept, filled, entropy = _prefix(counts), _prefix(counts > 0), _prefix(_xlogx(counts.astype(np.float64)))
    cross, last_level = np.empty(candidates.size), np.empty(candidates.size)
    for start in range(0, candidates.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        # The first bin ceil(group * i / LEVELS) of each of a candidate's groups, (candidates, LEVELS + 1).
        edges = (candidates[chunk, None] * np.arange(LEVELS + 1) + (LEVELS - 1)) // LEVELS
        mass, mean = _differences(kept, edges), _differences(filled, edges)
        np.divide(mass, np.maximum(mean, 1.0, out=mean), out=mean)
        log_mean = np.log(np.maximum(mean, 1.0, out=mean), out=mean)  # whole counts: a group with mass has a mean >= 1
        cross[chunk] = np.einsum("ij,ij->i", mass, log_mean)
        last_level[chunk] = log_mean[:, -1]

    total, inside, last = kept[-1], kept[candidates], counts[candidates - 1].astype(np.float64)
    tail = total - inside
    with np.errstate(divide="ignore", invalid="ignore"):
        log_inside = np.log(inside)
        last_level[last == 0] = (np.log(floor) + log_inside)[last == 0]
        piled = np.where(tail > 0, tail * last_level, 0.0)
        divergence = (
            (entropy[candidates - 1] + _xlogx(last + tail) - cross - piled) / total - np.log(total) + log_inside
        )
    divergence[inside == 0] = np.nan
    return candidates, divergence


def _prefix(values: NDArray[np.generic]) -> Floats:
    """Return the sums of the first 0..n values. Counts are added exactly, below 2**64, and rounded to float64 once.

    Beyond 2**53 that rounding moves a group's mass by 1e-16 of the total, no more than its weight in the divergence.
    """
    sums = np.cumsum(values, dtype=np.float64 if values.dtype.kind == "f" else np.uint64)
    return np.concatenate(([0.0], sums))


def _differences(prefix: Floats, edges: NDArray[np.int64]) -> Floats:
    """Return the sums between neighbouring edges (rows, groups + 1): (rows, groups)."""
    at_edges = prefix.take(edges)
    return at_edges[:, 1:] - at_edges[:, :-1]


def _xlogx(x: Floats) -> Floats:
    return x * np.log(np.maximum(x, 1.0))  # x is a whole count: 0 log 0 = 0, 1 log 1 = 0


@dataclass(frozen=True)
class SignedRules:
    """State the rules by which a member of MXNet's family searches a signed histogram whose middle is zero.

    Args:
        groups: Number of levels of Q.
        odd: True if one bin lies across zero.
        truncates: True if Q's levels are cut to whole counts.
        spreads_over_empty: True if Q fills a group's empty bins too, and leaves the bins beyond the last full group
            empty; False if it fills the non-empty bins alone.
        counts_first: True if Q counts the slice's outermost bin.

    >>> ONNXRUNTIME.groups, TVM.groups                     # the two that tared knows
    (128, 255)
    """

    groups: int
    odd: bool
    truncates: bool
    spreads_over_empty: bool
    counts_first: bool


ONNXRUNTIME = SignedRules(groups=128, odd=False, truncates=True, spreads_over_empty=True, counts_first=True)
TVM = SignedRules(groups=255, odd=True, truncates=False, spreads_over_empty=False, counts_first=False)


def smoothed_kl_divergence(counts: Counts, rules: SignedRules) -> tuple[Candidates, Floats]:
    """Return half widths in bins and the smoothed KL, in nats, of the mirrored histogram: two arrays of one length.

    Args:
        counts: (bins,), counts of |x|; they are mirrored to a signed histogram.
        rules: The rules of the peer whose search this is.

    A half width of i keeps i bins on the left of zero and i + 1 on the right (or of the middle bin, where there is
    one). Empty bins get 1e-4; the non-empty ones give that up in equal shares, before P and Q are compared. A P that
    cannot pay, or a Q without any count, is infinitely bad.

    >>> widths, divergence = smoothed_kl_divergence(np.full(256, 10), ONNXRUNTIME)
    >>> int(widths[divergence.argmin()])                   # uniform values: keep all 256 bins
    256
    """
    whole = counts.astype(np.uint64)  # both halves together may be more than int64 holds
    side, middle = (whole[1:], whole[:1] * np.uint64(2)) if rules.odd else (whole, whole[:0])
    signed = np.concatenate((side[::-1], middle, side))
    zero = signed.size // 2
    widths = np.arange(rules.groups // 2, zero + 1)
    p = _Smoothed(signed, zero - widths, np.minimum(zero + widths + 1, signed.size))
    divergence = np.empty(widths.size)
    for start in range(0, widths.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        divergence[chunk] = p.divergence(chunk, rules)
    return widths, divergence


class _Smoothed:
    """The slices [start, end) of a signed histogram with the tails piled on their ends, and P's side of the KL."""

    def __init__(self, signed: NDArray[np.uint64], start: NDArray[np.int64], end: NDArray[np.int64]) -> None:
        self.start, self.end, self.size = start, end, end - start
        self.kept, self.filled = _prefix(signed), _prefix(signed > 0)
        self.first_bin, self.last_bin = signed[start], signed[end - 1]
        self.left, self.right = self.kept[start], self.kept[-1] - self.kept[end]  # the clipped tails
        self.fills_first = (self.left > 0) & (self.first_bin == 0)  # a tail makes an empty end non-empty
        self.fills_last = (self.right > 0) & (self.last_bin == 0)
        self.nonempty = self.filled[end] - self.filled[start] + self.fills_first + self.fills_last
        with np.errstate(divide="ignore", invalid="ignore"):
            self.tax = np.nan_to_num(_SMOOTHING * (self.size - self.nonempty) / self.nonempty)
        self.negentropy = self._negentropy(signed)

    def _negentropy(self, signed: NDArray[np.uint64]) -> Floats:
        """Return the sum of p log p of the smoothed P: inner bins by the series in tax / count, the ends directly."""
        inner, outer = self.start + 1, self.end - 1
        count = np.maximum(signed, 1).astype(np.float64)
        present, log_count = signed > 0, np.log(count)
        terms = [(count * log_count, 1.0), (log_count + 1.0, -self.tax)]
        terms += [(count ** (1 - k), self.tax**k / (k * (k - 1))) for k in range(2, _SERIES)]
        total = (self.size - self.nonempty) * _SMOOTHING * np.log(_SMOOTHING)
        for values, weight in terms:
            sums = _prefix(np.where(present, values, 0.0))
            total = total + weight * (sums[outer] - sums[inner])
        for end in (self.first_bin + self.left, self.last_bin + self.right):
            rest = np.maximum(end - self.tax, np.finfo(np.float64).tiny)
            total = total + np.where(end > 0, rest * np.log(rest), 0.0)
        return np.asarray(total, np.float64)

    def divergence(self, chunk: slice, rules: SignedRules) -> Floats:
        """Return the KL of the slices in `chunk`."""
        start, end, size, tax = self.start[chunk], self.end[chunk], self.size[chunk], self.tax[chunk]
        width = size // rules.groups
        edges = start[:, None] + width[:, None] * np.arange(rules.groups + 1)
        if not rules.spreads_over_empty:
            edges[:, -1] = end
        whole = edges[:, -1] == end  # the last group reaches the slice's end, and the right tail with it

        mass, nonempty = _differences(self.kept, edges), _differences(self.filled, edges)
        p_mass = mass.copy()
        p_mass[:, 0] += self.left[chunk]
        p_mass[:, -1] += self.right[chunk] * whole
        p_nonempty = nonempty.copy()
        p_nonempty[:, 0] += self.fills_first[chunk]
        p_nonempty[:, -1] += self.fills_last[chunk] & whole
        mass[:, -1] += self.kept[end] - self.kept[edges[:, -1]]
        if not rules.counts_first:
            mass[:, 0] -= self.first_bin[chunk]
            nonempty[:, 0] -= self.first_bin[chunk] > 0

        sharers = p_nonempty if rules.counts_first else nonempty
        level = np.divide(mass, sharers, out=np.zeros_like(mass), where=sharers > 0)
        if rules.truncates:
            np.trunc(level, out=level)
        bins = width[:, None].astype(np.float64) if rules.spreads_over_empty else p_nonempty
        p_smoothed = p_mass - tax[:, None] * p_nonempty + _SMOOTHING * (bins - p_nonempty)
        return self._compare(chunk, level, np.where(level > 0, bins, 0.0), p_smoothed)

    def _compare(self, chunk: slice, level: Floats, bins: Floats, p_smoothed: Floats) -> Floats:
        """Return the KL from Q's levels, the number of bins of each, and P's smoothed mass over those bins."""
        total, held = self.kept[-1], bins.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            tax = _SMOOTHING * (self.size[chunk] - held) / held
            log_q = np.where(level > 0, np.log(np.maximum(level - tax[:, None], np.finfo(np.float64).tiny)), 0.0)
            outside = total - np.where(level > 0, p_smoothed, 0.0).sum(axis=1)
            cross = np.einsum("ij,ij->i", p_smoothed, log_q) + outside * np.log(_SMOOTHING)
            q_total = np.einsum("ij,ij->i", level, bins)
            divergence = (self.negentropy[chunk] - cross) / total - np.log(total) + np.log(q_total)
        return np.where((held > 0) & (self.tax[chunk] < 1.0), divergence, np.inf)
