"""Sequential evidence: an e-detector that keeps a false-alarm budget, and a confidence sequence for a mean.

Both take one bounded value at a time, keep O(1) state and may be looked at after every value, which is what a
daemon does: no sample size is fixed beforehand, and stopping early costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_BETS = (0.1, 0.3, 0.6, 0.95)  # fractions of the largest bet that keeps wealth positive; the mixture hedges them


class EDetector:
    """Mixture Shiryaev-Roberts e-detector for "the mean of values in [0, 1] has risen above `tolerance`".

    Each bet l keeps M <- (1 + M)(1 + l (value - tolerance)), and `e_value` is the mixture's mean. While the
    conditional mean of the values, given the past, stays at or under `tolerance`, the expected e-value after n
    values is at most n, whatever their dependence; so the expected number of alarms in n values is at most
    n / threshold. Source: Shin, Ramdas, Rinaldo, "E-detectors: a nonparametric framework for sequential change
    detection" (2022), Theorem 2.4.

    `drift_detected` and `warning_detected` follow the conventions of river. An alarm holds until `reset`.
    """

    def __init__(self, tolerance: float, threshold: float, warning_threshold: float) -> None:
        if not 0.0 < tolerance < 1.0:
            raise ValueError(f"tolerance must lie in (0, 1), got {tolerance}")
        if not 0.0 < warning_threshold <= threshold:
            raise ValueError(f"need 0 < warning_threshold <= threshold, got {warning_threshold}, {threshold}")
        self.tolerance = tolerance
        self.threshold = threshold
        self.warning_threshold = warning_threshold
        self._wealth = [0.0] * len(_BETS)

    @property
    def e_value(self) -> float:
        """Evidence against "nothing has changed"."""
        return sum(self._wealth) / len(self._wealth)

    @property
    def warning_detected(self) -> bool:
        return self.e_value >= self.warning_threshold

    @property
    def drift_detected(self) -> bool:
        return self.e_value >= self.threshold

    def update(self, value: float) -> None:
        """Take one value in [0, 1]. Raises ValueError outside of it: the guarantee would be void."""
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"an e-detector takes values in [0, 1], got {value}")
        if self.drift_detected:
            return  # decided; growing on would overflow and say nothing new
        gain = (value - self.tolerance) / self.tolerance
        self._wealth = [(1.0 + wealth) * (1.0 + bet * gain) for wealth, bet in zip(self._wealth, _BETS, strict=True)]

    def reset(self) -> None:
        """Start over, after the cause of an alarm has been dealt with."""
        self._wealth = [0.0] * len(_BETS)


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval. n = 0: nothing is known, [0, 1]."""

    estimate: float
    low: float
    high: float
    n: int


@dataclass
class ConfidenceSequence:
    """Time-uniform confidence interval for the mean of values in [0, 1]: valid at all times at once.

    The predictable plug-in empirical-Bernstein sequence. Source: Waudby-Smith and Ramdas, "Estimating means of
    bounded random variables by betting" (JRSS B 2024), Theorem 2. Holds when the values' conditional mean is
    constant, without further assumptions on their distribution. `refuted` says that the data contradict this: the
    mean has moved, the interval no longer follows, and it is time for a new sequence.
    """

    error: float = 0.05  # probability that the interval ever misses the mean
    refuted: bool = False
    _n: int = 0
    _sum: float = 0.0
    _squares: float = 0.0  # sum of squared distances to the running mean
    _bets: float = 0.0
    _bet_values: float = 0.0
    _bet_noise: float = 0.0
    _interval: Interval = field(default=Interval(0.0, 0.0, 1.0, 0))

    def update(self, value: float) -> None:
        """Take one value in [0, 1]; ValueError outside of it."""
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"a confidence sequence takes values in [0, 1], got {value}")
        value = float(value)  # a NumPy scalar would leak into everything derived from it
        mean_before = (0.5 + self._sum) / (self._n + 1)
        variance_before = (0.25 + self._squares) / (self._n + 1)
        self._n += 1
        rate = variance_before * self._n * math.log(self._n + 1)
        bet = min(math.sqrt(2.0 * math.log(2.0 / self.error) / rate), 0.5)
        self._bets += bet
        self._bet_values += bet * value
        self._bet_noise += (value - mean_before) ** 2 * (-math.log1p(-bet) - bet)
        self._sum += value
        mean = (0.5 + self._sum) / (self._n + 1)
        self._squares += (value - mean) ** 2
        self._narrow()

    @property
    def interval(self) -> Interval:
        """The running intersection of all intervals so far: still valid, and never wider than before."""
        return self._interval

    def _narrow(self) -> None:
        center = self._bet_values / self._bets
        radius = (math.log(2.0 / self.error) + self._bet_noise) / self._bets
        low, high = max(self._interval.low, center - radius), min(self._interval.high, center + radius)
        estimate = self._sum / self._n
        if low <= estimate <= high:
            self._interval = Interval(estimate, low, high, self._n)
        else:
            self.refuted = True
