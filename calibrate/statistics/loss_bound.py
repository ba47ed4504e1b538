"""Bound a mean loss at every moment, so that few held-out frames certify a candidate or refuse it.

For every mean m on a grid a gambler starts with a capital of 1 and plays against "the mean loss is at least m": a loss
x multiplies the capital by 1 + bet (m - x), with 0 <= bet < 1 / (1 - m). The gambler stakes only while the losses so
far sum to at most n m. If the capital is never expected to rise, the chance that it ever reaches 1 / error is at most
`error` (Ville 1939), so a gambler who gets there has refuted m. The capital is never expected to rise when the mean mu
is m or more and

- every loss has the conditional mean mu given the past: E[1 + bet (m - x)] = 1 + bet (m - mu) <= 1, for any stakes; or
- the losses are drawn without replacement, in random order, from any number N of them with the mean mu. What is left
  after n of them then has the mean (N mu - sum) / (N - n). A stake needs sum <= n m <= n mu, and so that mean is at
  least (N mu - n mu) / (N - n) = mu >= m. N need not be known. Draws that give no loss may be skipped, if that is for
  the frame alone to say: what is left is a random order of the frames that do.

A mirrored gambler, 1 + bet (x - m) while sum >= n m, plays against "the mean loss is at most m".

The bets are fixed, and a gambler's capital is a mixture over them. Source of betting on bounded means: Waudby-Smith and
Ramdas, "Estimating means of bounded random variables by betting" (JRSS B 2024); of the mixture: Cover, "Universal
portfolios" (1991).
"""

from __future__ import annotations

import bisect
import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def _decimals() -> Floats:
    """Return the grid of means: three digits in steps of at most 1 %, in [1e-4, 1), with all decimals of two digits."""
    digits = np.concatenate((np.arange(100, 200), np.arange(200, 500, 2), np.arange(500, 1000, 5)))
    return np.concatenate([digits / 10.0**places for places in (6, 5, 4, 3)])


_MEANS = _decimals()
# Losses of 0 or 1 with the mean p make the capital against m grow fastest at 1 - p / m of the largest bet: these suit
# p = 0, m / 4, m / 2 and 0.7 m. The first is short of 1, so that a loss of 1 leaves 2 %. aGRAPA, with bets of up to
# half, in place of the other three took 1 to 12 % more frames at each of them, on losses of 0 or 1 and on those of F1.
_FRACTIONS = np.array([0.98, 0.75, 0.5, 0.3])
# The half keeps a candidate without losses within 15 % of the fewest frames, at an error of 0.01 and m up to 0.1.
_WEIGHTS = np.array([0.5, 0.25, 0.15, 0.1])
_BETS = _FRACTIONS[:, None] / (1.0 - _MEANS)
# The mirrored optimum for p = (1 + c) m is c / (1 - m); half of 1 / m bounds what a loss of 0 costs.
_EXCESSES = np.array([1.0, 5.0, 20.0])
_MIRRORED_BETS = np.minimum(_EXCESSES[:, None] / (1.0 - _MEANS), 0.5 / _MEANS)
_MIRRORED_WEIGHTS = np.full(3, 1.0 / 3.0)


class LossBound:
    """Upper and lower bound of the mean of losses in [0, 1]; both may be read after every loss.

    Each bound has an `error` of its own: the probability that the mean is ever above `upper` is at most `error`, and
    so is that of ever being below `lower`. This holds for losses of a constant conditional mean, and for a random
    order of the losses of a finite set, whose mean it then is. Both are points of a grid in steps of at most 1 %,
    rounded outwards. `upper` <= m refutes a mean of m or more, `lower` >= m a mean of m or less.

    >>> bound = LossBound(error=0.05)
    >>> for _ in range(200):
    ...     bound.update(0.0)                     # 200 held-out frames without a loss
    >>> bound.n, bound.upper
    (200, 0.0174)
    """

    def __init__(self, error: float) -> None:
        """Start without losses.

        Args:
            error: Probability of each bound ever being wrong, in (0, 1).

        Raises ValueError for an error outside (0, 1).
        """
        if not 0.0 < error < 1.0:
            raise ValueError(f"error must lie in (0, 1), got {error}")
        self._n = 0
        self._total = 0.0
        self._above = _Gamblers(1.0, _BETS, _WEIGHTS, error)
        self._below = _Gamblers(-1.0, _MIRRORED_BETS, _MIRRORED_WEIGHTS, error)

    @property
    def n(self) -> int:
        """Number of losses so far."""
        return self._n

    @property
    def mean(self) -> float:
        """The plain mean of the losses; 0.0 before the first."""
        return self._total / self._n if self._n else 0.0

    @property
    def upper(self) -> float:
        """The bound from above; it never rises. Every mean of the grid from here on is refuted. 1.0 at the start."""
        undecided = np.flatnonzero(self._above.capital < self._above.goal)
        first = int(undecided[-1]) + 1 if undecided.size else 0
        return float(_MEANS[first]) if first < _MEANS.size else 1.0

    @property
    def lower(self) -> float:
        """The bound from below; it never falls. Every mean of the grid up to here is refuted. 0.0 at the start."""
        undecided = np.flatnonzero(self._below.capital < self._below.goal)
        refuted = int(undecided[0]) if undecided.size else _MEANS.size
        return float(_MEANS[refuted - 1]) if refuted else 0.0

    def update(self, loss: float) -> None:
        """Count one loss.

        Args:
            loss: In [0, 1].

        Raises ValueError outside of it.
        """
        if not 0.0 <= loss <= 1.0:
            raise ValueError(f"a loss bound takes losses in [0, 1], got {loss}")
        loss = float(loss)  # a NumPy scalar would leak into everything derived from it
        for gamblers in (self._above, self._below):
            gamblers.play(loss, self._n, self._total)
        self._n += 1
        self._total += loss


class _Gamblers:
    """One gambler per mean of the grid; side 1.0 plays against "the mean is at least m", -1.0 against "at most m"."""

    def __init__(self, side: float, bets: Floats, weights: Floats, error: float) -> None:
        """bets (bets, means), weights (bets,) that sum to 1."""
        self.side = side
        self.bets = bets
        self.goal = 1.0 / error
        self.parts = np.repeat(weights[:, None], _MEANS.size, axis=1)  # parts of the capital, one per bet
        self.capital: Floats = self.parts.sum(axis=0)

    def play(self, loss: float, n: int, total: float) -> None:
        """Play the next loss, after `n` that sum to `total`. A gambler who has reached the goal stops."""
        staked = (self.side * (n * _MEANS - total) >= 0.0) & (self.capital < self.goal)
        factors = 1.0 + self.bets * (self.side * (_MEANS - loss))
        np.multiply(self.parts, factors, out=self.parts, where=staked)
        self.capital = self.parts.sum(axis=0)


def frames_needed(max_loss: float, error: float) -> int:
    """Return how many losses of 0 in a row, from the start, bring `LossBound(error).upper` to `max_loss` or below.

    No other losses do it in fewer: a smaller budget of frames cannot certify.

    Args:
        max_loss: In [1e-4, 1), the range of the grid.
        error: Probability of a wrong bound, in (0, 1).

    Raises ValueError for numbers outside of these.

    >>> frames_needed(0.05, error=0.05)
    69
    """
    if not _MEANS[0] <= max_loss < 1.0:
        raise ValueError(f"max_loss must lie in [{_MEANS[0]}, 1), got {max_loss}")
    if not 0.0 < error < 1.0:
        raise ValueError(f"error must lie in (0, 1), got {error}")
    deciding = int(np.searchsorted(_MEANS, max_loss, side="right")) - 1  # without losses, larger means fall sooner
    growths = 1.0 + _BETS[:, deciding] * _MEANS[deciding]
    enough = math.ceil(-math.log(error * _WEIGHTS[0]) / math.log(growths[0]))  # for the first bet alone
    return bisect.bisect_left(range(enough), 1.0 / error, key=lambda n: float(_WEIGHTS @ growths**n))
