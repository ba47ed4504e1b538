"""How an engine on probation does beside the one before, on live frames that both have answered."""

from __future__ import annotations

from agent.estimates import SinceStartBySecond
from agent.fidelity import Fidelity
from calibrate.evidence import Interval


class Beside:
    """What it gains in fidelity. A scene that is hard for both tells nothing of either, so that only their difference
    on the same frame counts; and neighbours in a video are right and wrong together, so that a second is one value."""

    def __init__(self) -> None:
        self._seconds = SinceStartBySecond()

    def add(self, ts: float, candidate: Fidelity, before: Fidelity) -> None:
        """A frame of capture time `ts`, by each engine's fidelity."""
        if not (candidate.is_empty and before.is_empty):
            self._seconds.add(ts, (1.0 + candidate.value - before.value) / 2.0)

    @property
    def gain(self) -> Interval:
        """In [-1, 1]; low and high hold at all times at once, with 95 % confidence."""
        mean = self._seconds.estimate.interval
        if not mean.n:
            return Interval(0.0, -1.0, 1.0, 0)
        return Interval(2.0 * mean.estimate - 1.0, 2.0 * mean.low - 1.0, 2.0 * mean.high - 1.0, mean.n)
