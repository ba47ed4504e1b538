"""Decide from few values whether something has changed, with bounds on the rate of wrong decisions.

Five tools, which all bet against the claim that nothing has changed (Waudby-Smith and Ramdas; Shin, Ramdas, Rinaldo):

- `DriftDetector` raises an alarm when recalibrations would gain too much, at a bounded rate of false alarms;
- `NoiseDetector` does the same when noise exceeds what is allowed;
- `ConfidenceSequence` bounds the mean of values that keep coming, at all times at once;
- `gain_bounds` bounds the mean of paired differences between two engines, for a number of values that is known;
  `shows_loss` only says whether they speak for a loss, and needs fewer.

The states of the detectors are JSON objects, so that a restarted daemon goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.errors import CalibrationError

FULL_SCALE_DB = 12.0  # gains from here on count as 1 on the e-detector's [0, 1] scale

_MONTH_S = 30 * 86400.0
# Mean number of blocks to a false warning. Smaller: warns sooner, and more often in vain.
_WARNING_BLOCKS = 100.0


class EDetector:
    """Mixture Shiryaev-Roberts e-detector for "the mean of values in [0, 1] has risen above `tolerance`".

    For every bet b in _BETS:  M <- (1 + M) (1 + b x),  x = (value - tolerance) / tolerance,  so x >= -1.
    `e_value` is the mean of the M, weighted by _WEIGHTS.

    While the conditional mean of the values, given the past, stays at or under `tolerance`, the expected e-value after
    n values is at most n, whatever their dependence. So the expected number of alarms in n values is at most
    n / threshold. Source: Shin, Ramdas, Rinaldo, "E-detectors: a nonparametric framework for sequential change
    detection" (2022), Theorem 2.4.

    `drift_detected` and `warning_detected` follow the conventions of river. An alarm holds until `reset`.

    >>> detector = EDetector(tolerance=0.25, threshold=1000.0, warning_threshold=100.0)
    >>> for value in [0.2] * 100 + [0.8] * 8:                 # at first under the tolerance, then far above it
    ...     detector.update(value)
    >>> detector.warning_detected, detector.drift_detected
    (True, True)
    """

    # Each bet is a fraction of the largest that keeps wealth positive; the mixture hedges them. A bolder bet detects a
    # step sooner and a small drift later.
    _BETS: tuple[float, ...] = (0.1, 0.3, 0.6, 0.95)
    _WEIGHTS: tuple[float, ...] = (0.1, 0.1, 0.2, 0.6)  # the boldest finds steps, and costs nothing where none are

    def __init__(self, tolerance: float, threshold: float, warning_threshold: float) -> None:
        """Start without evidence.

        Args:
            tolerance: The mean up to which nothing has changed, in (0, 1).
            threshold: The e-value of an alarm: mean number of values to a false one.
            warning_threshold: The e-value of a warning, at most `threshold`.

        Raises ValueError for a tolerance outside (0, 1), and unless 0 < warning_threshold <= threshold.
        """
        if not 0.0 < tolerance < 1.0:
            raise ValueError(f"tolerance must lie in (0, 1), got {tolerance}")
        if not 0.0 < warning_threshold <= threshold:
            raise ValueError(f"need 0 < warning_threshold <= threshold, got {warning_threshold}, {threshold}")
        self.tolerance = tolerance
        self.threshold = threshold
        self.warning_threshold = warning_threshold
        self._wealth: list[float] = [0.0] * len(self._BETS)

    @property
    def e_value(self) -> float:
        """Evidence against "nothing has changed"."""
        return sum(weight * wealth for weight, wealth in zip(self._WEIGHTS, self._wealth, strict=True))

    @property
    def warning_detected(self) -> bool:
        """True while the e-value is at or above the threshold of a warning."""
        return self.e_value >= self.warning_threshold

    @property
    def drift_detected(self) -> bool:
        """True from an alarm on, until `reset`."""
        return self.e_value >= self.threshold

    def update(self, value: float) -> None:
        """Count one value in [0, 1]. Raises ValueError outside of it: the guarantee would be void."""
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"an e-detector takes values in [0, 1], got {value}")
        if self.drift_detected:
            return  # decided; growing on would overflow and say nothing new
        value = float(value)  # a NumPy scalar would leak into everything derived from it
        x = (value - self.tolerance) / self.tolerance
        self._wealth = [(1.0 + wealth) * (1.0 + bet * x) for wealth, bet in zip(self._wealth, self._BETS, strict=True)]

    def reset(self) -> None:
        """Start over, after the cause of an alarm has been dealt with."""
        self._wealth = [0.0] * len(self._BETS)

    def state(self) -> dict[str, object]:
        """Return everything that `restore` needs, in JSON's types."""
        return {
            "tolerance": self.tolerance,
            "threshold": self.threshold,
            "warning_threshold": self.warning_threshold,
            "wealth": list(self._wealth),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a detector of the same settings stopped.

        Raises CalibrationError (`evidence.state`) for a state of other settings, or one that no run leads to.
        """
        with _reading("detector"):
            wealth = [float(value) for value in state["wealth"]]
            _expect(len(wealth) == len(self._BETS) and all(0.0 <= value < math.inf for value in wealth))
            _expect(state["tolerance"] == self.tolerance and state["threshold"] == self.threshold)
        self._wealth = wealth


class DriftDetector(EDetector):
    """Raise an alarm when a recalibration would gain more than `tolerance_db`, with a bounded rate of false alarms.

    `update` takes the predicted gain of each block in dB. While the mean gain, given the past, stays at or under the
    tolerance (gains from 12 dB on count as 12), the expected number of alarms in 30 days is at most
    `false_alarms_per_30d`: see EDetector. Blocks may be longer than `block_s`; alarms are fewer then.
    `warning_detected` comes first, and may last. A false one comes after 100 blocks or more in the mean: it is meant
    for preparations that cost little.

    >>> detector = DriftDetector(false_alarms_per_30d=1.0, tolerance_db=3.0, block_s=3.0)
    >>> for block in range(1, 100):
    ...     detector.update(6.0)                  # each block of 3 s would gain 6 dB
    ...     if detector.drift_detected:
    ...         break
    >>> block                                     # 63 seconds
    21
    """

    def __init__(self, false_alarms_per_30d: float = 1.0, tolerance_db: float = 3.0, block_s: float = 3.0) -> None:
        """Start without evidence.

        Args:
            false_alarms_per_30d: Expected number of false alarms in 30 days, above 0.
            tolerance_db: Gain in dB up to which no recalibration is due, in (0, 12).
            block_s: Shortest time between two updates in seconds, above 0.

        Raises ValueError for a tolerance outside (0, 12), and where false alarms or blocks are not above 0.
        """
        if not (false_alarms_per_30d > 0.0 and block_s > 0.0):
            raise ValueError(f"need positive false alarms and blocks, got {false_alarms_per_30d}, {block_s} s")
        threshold = _MONTH_S / block_s / false_alarms_per_30d
        super().__init__(tolerance_db / FULL_SCALE_DB, threshold, min(_WARNING_BLOCKS, threshold))

    def update(self, value: float) -> None:
        """Count a block's gain in dB; a negative one counts as none. Raises ValueError for NaN."""
        super().update(min(max(value, 0.0) / FULL_SCALE_DB, 1.0) if not math.isnan(value) else value)


class LossDetector(EDetector):
    """Raise an alarm when losses that are mostly 0 or 1 exceed a tolerance: an e-detector with bets for such losses.

    The bets suit means of twice to five times the tolerance. `tolerance` may be set anew between two values, by what is
    known before the next one.

    >>> detector = LossDetector(tolerance=0.1, threshold=1000.0, warning_threshold=100.0)
    >>> for frame in range(1, 200):
    ...     detector.update(float(frame % 2))                 # every other answer is wrong
    ...     if detector.drift_detected:
    ...         break
    >>> frame
    13
    """

    _BETS = (0.02, 0.06, 0.15, 0.4)
    _WEIGHTS = (0.25, 0.25, 0.25, 0.25)


class _RareEvents(EDetector):
    """Raise an alarm when an event happens more often than once in `once_in` values; small bets outlive the others.

    `once_in` is 1 / tolerance: the mean number of values to one event up to which nothing is wrong.
    """

    _BETS = (0.001, 0.01, 0.1, 0.5)
    _WEIGHTS = (0.25, 0.25, 0.25, 0.25)


class NoiseDetector:
    """Raise an alarm when noise exceeds what is allowed, with a bounded rate of false alarms.

    `update` takes noise power relative to the allowed one. Two detectors share the rate:

    - one finds a little too much noise on each value: it bets against a mean of at most 1, where 20 dB count as most;
    - one finds a gross fault now and then: it bets against more than one value in a million beyond 10 dB.

    While both hold, given the past, the expected number of alarms in `values` is at most 1: see EDetector.

    >>> detector = NoiseDetector(values=1e6)
    >>> for _ in range(64):
    ...     detector.update(0.1)                  # a tenth of the allowed noise
    >>> detector.update(1e3); detector.update(1e3)
    >>> detector.drift_detected                   # two answers that have nothing to do with the right ones
    True
    """

    GROSS = 10.0
    _MOST, _ONCE_IN = 100.0, 1e6

    def __init__(self, values: float) -> None:
        """Start without evidence.

        Args:
            values: Number of values in which one false alarm is expected at most, above 1.

        Raises ValueError for other numbers.
        """
        if not values > 1.0:
            raise ValueError(f"need more than one value, got {values}")
        alarm = 2.0 * values  # each of the two detectors takes half of the rate
        warning = min(_WARNING_BLOCKS, alarm)
        self._mean = EDetector(1.0 / self._MOST, alarm, warning)
        self._gross = _RareEvents(1.0 / self._ONCE_IN, alarm, warning)

    @property
    def e_value(self) -> float:
        """Evidence against "the noise is allowed", of the detector that has more."""
        return max(self._mean.e_value, self._gross.e_value)

    @property
    def drift_detected(self) -> bool:
        """True from an alarm on."""
        return self._mean.drift_detected or self._gross.drift_detected

    def update(self, value: float) -> None:
        """Count the noise of one value.

        Args:
            value: Noise power over the allowed noise power, 0 or more; 1 is all that is allowed.

        Raises ValueError for NaN and below 0.
        """
        self._mean.update(min(value, self._MOST) / self._MOST)
        self._gross.update(float(value > self.GROSS))

    def state(self) -> dict[str, object]:
        """Return everything that `restore` needs, in JSON's types."""
        return {"mean": self._mean.state(), "gross": self._gross.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a detector of the same settings stopped.

        Raises CalibrationError (`evidence.state`) for a state of other settings, or one that no run leads to.
        """
        with _reading("noise detector"):
            mean, gross = state["mean"], state["gross"]
        earlier = self._mean.state()
        self._mean.restore(mean)
        try:
            self._gross.restore(gross)
        except CalibrationError:
            self._mean.restore(earlier)
            raise


@dataclass(frozen=True)
class Interval:
    """Hold an estimate with its confidence interval.

    Args:
        estimate: The mean of the values, or another quantity that a function estimates.
        low: Lower bound.
        high: Upper bound.
        n: Number of values behind it; 0: nothing is known, and the interval is the widest.

    >>> sequence = ConfidenceSequence()
    >>> sequence.interval                                     # before the first value
    Interval(estimate=0.0, low=0.0, high=1.0, n=0)
    """

    estimate: float
    low: float
    high: float
    n: int


_MEANS = np.linspace(0.0, 1.0, 1001)  # the candidate means; the interval is wider than exact by up to one step a side
_SIGNS = np.array([[1.0], [-1.0]])
with np.errstate(divide="ignore"):
    # Half of the bet at which a capital could reach zero: the lowest value, 0, costs the first gambler bet * m.
    _LARGEST_BETS = 0.5 / np.stack((_MEANS, 1.0 - _MEANS))


class ConfidenceSequence:
    """Time-uniform confidence interval for the mean of values in [0, 1]: valid at all times at once.

    Against every mean m two gamblers bet, one that the values come out higher, one lower. A mean is ruled out once one
    of them has made 2 / error out of 1, which happens to the true mean with probability `error` at most. Both capitals
    are monotone in m, so the means that are left form an interval, and a grid of m brackets it from outside.
    Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B 2024), the
    hedged capital process of Theorem 3 with the predictable bets of its equation 26.

    The interval holds when the values' conditional mean is constant, without further assumptions on their
    distribution. `error` is the probability that it ever misses the mean. `refuted` becomes True when the values' own
    mean has left the interval, which then stands still: start a new sequence. Nearly always the mean has moved; with a
    constant mean this happens about as rarely as a miss.

    >>> sequence = ConfidenceSequence(error=0.05)
    >>> for _ in range(50):
    ...     sequence.update(1.0)                  # fifty frames answered without a fault
    >>> sequence.interval.n, round(sequence.interval.low, 2), sequence.interval.high
    (50, 0.87, 1.0)
    """

    def __init__(self, error: float = 0.05) -> None:
        """Start without values.

        Args:
            error: Probability that the interval ever misses the mean, in (0, 1).

        Raises ValueError for an error outside (0, 1).
        """
        if not 0.0 < error < 1.0:
            raise ValueError(f"error must lie in (0, 1), got {error}")
        self.error = error
        self.refuted = False
        self._mean = _RunningMean()
        self._log_capital = np.zeros((2, _MEANS.size))  # log capital of the gamblers on higher and on lower values
        self._interval = Interval(0.0, 0.0, 1.0, 0)

    @property
    def interval(self) -> Interval:
        """The running intersection of all intervals so far: still valid, and never wider than before."""
        return self._interval

    def update(self, value: float) -> None:
        """Count one value in [0, 1]. Raises ValueError outside of it."""
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"a confidence sequence takes values in [0, 1], got {value}")
        value = float(value)  # a NumPy scalar would leak into everything derived from it
        n = self._mean.n + 1
        bet = math.sqrt(2.0 * math.log(2.0 / self.error) / (self._mean.variance * n * math.log(n + 1)))
        self._log_capital += np.log1p(np.minimum(bet, _LARGEST_BETS) * (value - _MEANS) * _SIGNS)
        self._mean.update(value)
        higher, lower = self._log_capital >= math.log(2.0 / self.error)
        low = max(self._interval.low, float(_MEANS[higher].max(initial=0.0)))
        high = min(self._interval.high, float(_MEANS[lower].min(initial=1.0)))
        if low <= self._mean.estimate <= high:
            self._interval = Interval(self._mean.estimate, low, high, self._mean.n)
        else:
            self.refuted = True

    def state(self) -> dict[str, object]:
        """Return everything that `from_state` needs, in JSON's types."""
        return {
            "error": self.error,
            "refuted": self.refuted,
            "mean": asdict(self._mean),
            "log_capital": self._log_capital.tolist(),
            "interval": asdict(self._interval),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ConfidenceSequence:
        """Go on where `state` was taken.

        Raises CalibrationError (`evidence.state`) for anything else.
        """
        with _reading("confidence sequence"):
            sequence = cls(state["error"])
            sequence.refuted = bool(state["refuted"])
            sequence._mean = mean = _RunningMean(**state["mean"])
            sequence._log_capital = np.array(state["log_capital"], np.float64)
            sequence._interval = interval = Interval(**state["interval"])
            _expect(sequence._log_capital.shape == (2, _MEANS.size) and np.isfinite(sequence._log_capital).all())
            _expect(0.0 <= interval.low <= interval.estimate <= interval.high <= 1.0 or interval.n == 0)
            _expect(0 <= interval.n <= mean.n and 0.0 <= mean.total <= mean.n and 0.0 <= mean.squares < math.inf)
        return sequence


@dataclass
class _RunningMean:
    """Mean and variance of values in [0, 1], each with one prior value: 1/2 for the mean, 1/4 for the variance."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0  # sum of squared distances, each to the running mean at its time

    @property
    def estimate(self) -> float:
        """The plain mean."""
        return self.total / self.n

    @property
    def variance(self) -> float:
        return (0.25 + self.squares) / (self.n + 1)

    def update(self, value: float) -> None:
        self.n += 1
        self.total += value
        self.squares += (value - (0.5 + self.total) / (self.n + 1)) ** 2


_GAIN_MEANS = np.linspace(-1.0, 1.0, 501)  # candidate means; the bounds are wider than exact by up to one step a side
# Fraction of the bet at which one value can cost a gambler everything. Smaller: gains are seen later. Measured on 64
# pairs that gain 0.1 with a deviation of 0.2: a fraction of a half shows the gain in 17 samples of 100, nine tenths in
# 71, and misses the mean no more often than it may.
_BOLDEST = 0.9
_ERROR = 0.05  # probability at most that `gain_bounds` misses the mean, and that `shows_loss` is wrong


def gain_bounds(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Bound the mean of differences in [-1, 1]; the bounds miss it with a probability of 0.05 at most.

    Against every candidate mean two gamblers bet before each value, one on higher and one on lower differences. A mean
    is ruled out once one of them has made 2 / 0.05 out of 1. Source: Waudby-Smith and Ramdas, "Estimating means of
    bounded random variables by betting" (JRSS B 2024), the hedged capital of Theorem 3 with the predictable bets of
    Section 4.3, for a number of values that is known beforehand. Holds when the conditional mean is constant, and for
    the one order in which the values came: bounds averaged over several orders hold for none.

    Args:
        differences: (n,), fidelity of one engine less that of another, frame by frame.

    Returns:
        The lower and the upper bound; (-1, 1) without values. Where chance rules out the mean of the values themselves,
        the bounds are widened to it.

    Raises ValueError for values outside [-1, 1], NaN among them.

    >>> low, high = gain_bounds(np.full(64, 0.2))       # the candidate is better by 0.2 on each of 64 frames
    >>> round(low, 2), round(high, 2)
    (0.12, 0.26)
    """
    if not (np.abs(differences) <= 1.0).all():
        raise ValueError("differences of two fidelities lie in [-1, 1]")
    if not differences.size:
        return -1.0, 1.0
    ruin = math.log(2.0 / _ERROR)
    bets = _bets(differences, ruin)[:, np.newaxis]
    with np.errstate(divide="ignore"):  # at the ends of the range no bet is too bold
        higher = np.minimum(bets, _BOLDEST / (_GAIN_MEANS + 1.0)) * (differences[:, np.newaxis] - _GAIN_MEANS)
        lower = np.minimum(bets, _BOLDEST / (1.0 - _GAIN_MEANS)) * (_GAIN_MEANS - differences[:, np.newaxis])
    too_low = (np.log1p(higher).cumsum(axis=0) >= ruin).any(axis=0)
    too_high = (np.log1p(lower).cumsum(axis=0) >= ruin).any(axis=0)
    mean = float(differences.mean())
    low = float(_GAIN_MEANS[too_low].max(initial=-1.0))
    high = float(_GAIN_MEANS[too_high].min(initial=1.0))
    return min(low, mean), max(high, mean)


def shows_loss(differences: NDArray[np.float64], error: float = _ERROR) -> bool:
    """Return True if paired differences show that a candidate is worse: a test for one look, at a fixed number.

    Where nothing is lost, each difference might as well have the other sign. The sum of such signs reaches
    sqrt(2 ln(1 / error)) times the root of the sum of squares with a probability of `error` at most. Source: Hoeffding,
    "Probability inequalities for sums of bounded random variables" (JASA 1963), section 2, for given magnitudes. It
    sees a loss with a third of the values that `gain_bounds` needs, which hold for any distribution.

    Args:
        differences: (n,), fidelity of the candidate less that of the other engine, frame by frame.

    >>> shows_loss(np.tile([-0.5, 0.1, -0.1, 0.0], 16)), shows_loss(np.tile([-0.5, 0.5], 32))
    (True, False)
    """
    lost = -float(differences.sum())
    return lost > 0.0 and lost * lost >= 2.0 * math.log(1.0 / error) * float(np.square(differences).sum())


def _bets(differences: NDArray[np.float64], ruin: float) -> NDArray[np.float64]:
    """Return the bets (n,), each from the values before it alone, with one prior value of variance 1."""
    n = differences.size
    counts = np.arange(1, n + 1)
    means = differences.cumsum() / (counts + 1)
    squares = 1.0 + np.square(differences - means).cumsum()
    variances = np.concatenate(([1.0], (squares / (counts + 1))[:-1]))
    bets: NDArray[np.float64] = np.sqrt(2.0 * ruin / (n * variances))
    return bets


@contextmanager
def _reading(kind: str) -> Iterator[None]:
    """Raise whatever goes wrong with a state as one CalibrationError (`evidence.state`)."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            "evidence.state", f"a {kind}'s state with {error!r}", "one as this version of tared wrote it", "start anew"
        ) from error


def _expect(sound: bool | np.bool_) -> None:
    if not sound:
        raise ValueError("values that no run leads to")
