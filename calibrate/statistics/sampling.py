"""Bound what a whole stream of frames would score, from labels of a few that were drawn with known probabilities.

Each frame i stands for w_i seconds of video and is drawn with a probability p_i that is known before its label is.
Every frame gets a guess g_i of its counts, from the labels so far of frames like it (its stratum). The total

    sum of w_i g_i, over all frames  +  sum of (w_i / p_i) (y_i - g_i), over the drawn ones

has the total of the true counts y_i as its expectation, whatever the guesses are worth and however the frames depend on
each other: only the draws are random. Guesses that are any good make it vary less than labels alone do, and so do
probabilities that are larger where labels vary more. Sources: Horvitz and Thompson, "A generalization of sampling
without replacement from a finite universe" (JASA 1952); Angelopoulos et al., "Prediction-powered inference" (Science
2023); Zrnic and Candes, "Active statistical inference" (ICML 2024).

- `Strata` sorts frames by how sure their answers are, and says how likely each is drawn.
- `SampledTotals` estimates totals of counts, and bounds ratios of them at all times at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from calibrate.statistics.evidence import Interval

Floats = NDArray[np.float64]
Ratio = tuple[Sequence[float], Sequence[float]]  # the weights of the counts in numerator and denominator

STRATA = 6
MIN_LABELS = 30  # with fewer, the normal approximation of the bounds does not hold
_UNIFORM = 0.2  # share of the draws that pays no regard to the strata: wrong guesses cost no more than this allows
_PRIOR_SCORES = np.linspace(0.5, 0.97, STRATA)  # from the least sure stratum to the surest
_PRIOR_LABELS = 1.0  # that the prior is worth, in each stratum
_LEAST_VARIANCE = 0.01  # variance of a label in a stratum: some labels will differ, though none has yet
_MISTAKEN = 3.0  # labels more, all mistaken: what variance cannot show while none, or one, of its kind has come
# Number of labels at which the bounds are tightest, compared with those for one look at that number; a flat optimum.
_TIGHTEST_LABELS = 20.0


class Strata:
    """Sort frames by how sure their answers are, into classes of equal size, and say how likely each is drawn.

    >>> strata = Strata.by_quantiles([0.1, 0.5, 0.9, 0.95, 0.97, 0.99])
    >>> strata.index(0.2), strata.index(1.0)
    (0, 5)
    >>> strata.probability(0, 0.02) > strata.probability(5, 0.02)     # labels of unsure frames vary more
    True
    """

    def __init__(self, cuts: Sequence[float]) -> None:
        """Start without frames and labels.

        Args:
            cuts: The STRATA - 1 ascending values of sureness that part the strata.

        Raises ValueError for another number of cuts, or cuts in another order.
        """
        if len(cuts) != STRATA - 1 or any(low > high for low, high in pairwise(cuts)):
            raise ValueError(f"need {STRATA - 1} ascending cuts, got {list(cuts)}")
        self.cuts = tuple(float(cut) for cut in cuts)
        self._seen = np.ones(STRATA)  # seconds, and one of each to begin with
        self._labels, self._scores, self._squares = np.zeros(STRATA), np.zeros(STRATA), np.zeros(STRATA)

    @classmethod
    def by_quantiles(cls, sureness: Sequence[float]) -> Strata:
        """Return strata that share out these frames evenly."""
        return cls(np.quantile(np.array(sureness, np.float64), np.arange(1, STRATA) / STRATA).tolist())

    def index(self, sureness: float) -> int:
        """Return the stratum of a frame, 0 for the least sure."""
        return bisect_right(self.cuts, sureness)

    def see(self, stratum: int, weight: float = 1.0) -> None:
        """Count a frame.

        Args:
            stratum: Of the frame.
            weight: Seconds of video that it stands for.
        """
        self._seen[stratum] += weight

    def learn(self, stratum: int, score: float) -> None:
        """Learn from a label how much scores vary in a stratum.

        Args:
            stratum: Of the labelled frame.
            score: In [0, 1], 1 for an answer without fault.
        """
        self._labels[stratum] += 1.0
        self._scores[stratum] += score
        self._squares[stratum] += score * score

    def probability(self, stratum: int, expected: float) -> float:
        """Return the probability of drawing a frame.

        Args:
            stratum: Of the frame.
            expected: The mean probability over all strata.
        """
        labels = self._labels + _PRIOR_LABELS
        means = (self._scores + _PRIOR_LABELS * _PRIOR_SCORES) / labels
        squares = (self._squares + _PRIOR_LABELS * _PRIOR_SCORES) / labels  # as if each score were 0 or 1
        spread = np.sqrt(np.maximum(squares - means * means, _LEAST_VARIANCE))
        mean_spread = float(self._seen @ spread / self._seen.sum())
        return min(1.0, expected * (_UNIFORM + (1.0 - _UNIFORM) * float(spread[stratum]) / mean_spread))


class SampledTotals:
    """Estimate totals of counts over all frames of a stream, from the frames that were drawn and labelled.

    Several groups of counts are estimated side by side, e.g. one for each class.

    Args:
        groups: Number of groups of counts.
        counts: Number of counts in each group.

    >>> totals = SampledTotals(groups=1, counts=2)               # right answers, and answers
    >>> for draw in range(1, 101):                               # one second in fifty is drawn; nine in ten are right
    ...     seconds = [0.0] * 5 + [50.0 * draw]
    ...     totals.add(5, 1.0, 0.02, seconds, [[float(draw % 10 > 0), 1.0]])
    >>> interval = totals.ratio(0, [1.0, 0.0], [0.0, 1.0])
    >>> round(interval.estimate, 2), interval.low < 0.9 < interval.high
    (0.9, True)
    """

    def __init__(self, groups: int, counts: int) -> None:
        self.labels = 0
        self.totals: Floats = np.zeros((groups, counts))
        self.covariance: Floats = np.zeros((groups, counts, counts))
        self._seen = np.zeros(STRATA)  # seconds
        self._sums = np.zeros((STRATA, groups, counts))
        self._labels = np.zeros(STRATA)
        self._counting = np.zeros((groups, counts))  # labelled frames in which there is something to count
        self._weights = 0.0

    def __iadd__(self, other: SampledTotals) -> SampledTotals:
        """Add another stream's totals: draws of two streams are independent."""
        self.labels += other.labels
        self.totals = self.totals + other.totals
        self.covariance = self.covariance + other.covariance
        self._seen = self._seen + other._seen
        self._sums = self._sums + other._sums
        self._labels = self._labels + other._labels
        self._counting = self._counting + other._counting
        self._weights += other._weights
        return self

    def add(
        self, stratum: int, weight: float, probability: float, seen: Sequence[float], counts: Sequence[Sequence[float]]
    ) -> None:
        """Add a drawn frame, in the order of the draws.

        Args:
            stratum: Of the frame.
            weight: Seconds of video that it stands for.
            probability: The probability with which it was drawn, in (0, 1].
            seen: (strata,), seconds of all frames up to this one, with it.
            counts: (groups, counts), by its label.
        """
        guesses = self._guesses()
        seconds = np.array(seen, np.float64)
        self.totals = self.totals + np.tensordot(seconds - self._seen, guesses, axes=1)
        self._seen = seconds
        found = np.asarray(counts, np.float64)
        residual = (found - guesses[stratum]) * (weight / probability)
        self.totals = self.totals + residual
        self.covariance = self.covariance + (1.0 - probability) * residual[:, :, None] * residual[:, None, :]
        self._sums[stratum] += found
        self._labels[stratum] += 1.0
        self._counting += found > 0.0
        self.labels += 1
        self._weights += weight / probability

    def ratio(
        self, group: int, numerator: Sequence[float], denominator: Sequence[float], error: float = 0.05
    ) -> Interval:
        """Bound the ratio of two sums of counts, which lies in [0, 1].

        Args:
            group: Index of the group.
            numerator: The weight of each count in the upper sum, such as 1 for right answers.
            denominator: The weight of each count in the lower sum, such as 1 for answers.
            error: Probability that the interval ever misses the ratio, in (0, 1).

        Returns:
            Interval: Its n is the number of labelled frames that count in the denominator. With fewer than 30 the
            bounds are 0 and 1.
        """
        value, gradient, mistaken, labels = self._linear(group, numerator, denominator)
        return self._interval(value, group, gradient, mistaken, labels, 0.0, error)

    def difference(self, group: int, first: Ratio, second: Ratio, error: float = 0.05) -> Interval:
        """Bound how much larger the first of two ratios is than the second, in [-1, 1].

        Args:
            group: Index of the group.
            first: Weights of the counts in numerator and denominator of the first ratio, as for `ratio`.
            second: The same of the second ratio.
            error: Probability that the interval ever misses the difference, in (0, 1).

        Returns:
            Interval: Its n is that of the ratio with fewer. With fewer than 30 the bounds are -1 and 1.
        """
        parts = [self._linear(group, *each) for each in (first, second)]
        (value, gradient, mistaken, labels), (other, other_gradient, other_mistaken, other_labels) = parts
        reach = max(mistaken, other_mistaken), min(labels, other_labels)
        return self._interval(value - other, group, gradient - other_gradient, *reach, -1.0, error)

    def _linear(
        self, group: int, numerator: Sequence[float], denominator: Sequence[float]
    ) -> tuple[float, Floats, float, int]:
        """Return a ratio, its gradient by the totals, how far one mistaken frame would move it, and its labels."""
        top, bottom = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
        labels = int(self._counting[group][bottom > 0.0].max(initial=0.0))
        whole = float(bottom @ self.totals[group])
        if whole <= 0.0 or not labels:
            return 0.0, np.zeros(top.size), math.inf, 0
        value = float(top @ self.totals[group]) / whole
        of_one = float(bottom @ self._sums[:, group].sum(axis=0)) / labels
        return value, (top - value * bottom) / whole, self._weights / self.labels * of_one / whole, labels

    def _guesses(self) -> Floats:
        """Return the counts to expect of a frame: (strata, groups, counts)."""
        overall = self._sums.sum(axis=0) / max(1.0, self._labels.sum())
        guesses: Floats = (self._sums + _PRIOR_LABELS * overall) / (self._labels + _PRIOR_LABELS)[:, None, None]
        return guesses

    def _interval(
        self, value: float, group: int, gradient: Floats, mistaken: float, labels: int, least: float, error: float
    ) -> Interval:
        """Return the interval that holds at all times at once, within [least, 1]; the widest with few labels.

        A confidence sequence by the method of mixtures, of which variance is estimated. A few labels more, all
        mistaken, are added to the variance: the next may be the first of their kind. Source: Waudby-Smith, Arbour,
        Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences" (Annals of
        Statistics 2024).
        """
        value = min(1.0, max(least, value))
        if labels < MIN_LABELS:
            return Interval(value, least, 1.0, labels)
        variance = float(gradient @ self.covariance[group] @ gradient) + _MISTAKEN * mistaken**2
        n, mixed = labels, _TIGHTEST_LABELS
        reach = math.sqrt(variance * (1.0 + mixed / n) * math.log((n + mixed) / (mixed * error**2)))
        return Interval(value, max(least, value - reach), min(1.0, value + reach), labels)
