"""Compute means over frames with confidence intervals: since the swap, and over the last hour.

1. `SinceStart` holds one value a frame; its interval holds at all times at once.
2. `SinceStartBySecond` is the same for frames that follow each other closely.
3. `LastHour` is a sliding mean, with the interval of `mean_interval`.
4. `FidelityRecord` is made of 1 and 3.

`state` returns all that a mean knows in JSON's types, so that another process can go on with it. `restore` raises
CalibrationError, KeyError, TypeError or ValueError for what no `state` has returned, and then changes nothing.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from agent.common.state_files import count, finite
from calibrate.statistics.evidence import ConfidenceSequence, Interval

_HOUR_S = 3600.0
_ERROR = 0.05  # probability that an interval misses its mean
_SLICE_S = 10.0
_HISTORY = 10_000
_HALVINGS = 40  # beyond what an estimate of three digits shows
_NOTHING = Interval(0.0, 0.0, 1.0, 0)


@dataclass(frozen=True)
class Estimate:
    """A mean of values in [0, 1].

    interval: The mean, its bounds, and n, the number of frames that have a value.
    empty: Frames beside them that had nothing to be right about.
    since: Capture time of the start.
    """

    interval: Interval
    empty: int
    since: float

    def as_dict(self) -> dict[str, Any]:
        """The shape that the command line and the telemetry share."""
        return {**asdict(self.interval), "empty": self.empty}


class SinceStart:
    """A mean from a start on, with a confidence sequence: the interval holds at all times at once.

    A mean that has moved refutes its sequence, which then starts over; ConfidenceSequence lists what is assumed.
    """

    def __init__(self) -> None:
        self.start(0.0)

    def start(self, since: float) -> None:
        """Forget all values, and count from capture time `since` on, in seconds."""
        self._sequence, self._empty, self._since = ConfidenceSequence(_ERROR), 0, since

    def add(self, ts: float, value: float | None) -> None:
        """Add the value in [0, 1] of a frame of capture time `ts`; None for one that is empty."""
        if value is None:
            self._empty += 1
            return
        if self._sequence.refuted:
            self.start(ts)
        self._sequence.update(value)

    @property
    def estimate(self) -> Estimate:
        return Estimate(self._sequence.interval, self._empty, self._since)

    def state(self) -> dict[str, Any]:
        return {"sequence": self._sequence.state(), "empty": self._empty, "since": self._since}

    def restore(self, state: Mapping[str, Any]) -> None:
        sequence = ConfidenceSequence.from_state(state["sequence"])
        self._sequence, self._empty, self._since = sequence, count(state["empty"]), finite(state["since"])


class SinceStartBySecond(SinceStart):
    """A SinceStart for frames that may follow each other closely: the mean of each second is one value.

    Neighbours in a video are right and wrong together. Counted as values of their own they would make the interval
    several times too narrow. So low and high come from the complete seconds, the estimate is the mean of all seconds,
    and n counts frames.
    """

    def start(self, since: float) -> None:
        super().start(since)
        self._frames = self._count = 0
        self._second_ts, self._total = since, 0.0  # the second that is not complete, and its sum

    def add(self, ts: float, value: float | None) -> None:
        """Add a value as SinceStart.add does; frames may come in any order."""
        if value is None:
            super().add(ts, None)
            return
        if self._count and abs(ts - self._second_ts) >= 1.0:
            super().add(self._second_ts, self._total / self._count)
            self._total, self._count = 0.0, 0
            if self._sequence.refuted:
                self.start(ts)
        if not self._count:
            self._second_ts = ts
        self._total, self._count, self._frames = self._total + value, self._count + 1, self._frames + 1

    @property
    def estimate(self) -> Estimate:
        estimate = super().estimate
        if not self._frames:
            return estimate
        complete = estimate.interval
        mean = (complete.estimate * complete.n + self._total / self._count) / (complete.n + 1)
        within = min(max(mean, complete.low), complete.high)
        return replace(estimate, interval=replace(complete, estimate=within, n=self._frames))

    def state(self) -> dict[str, Any]:
        second = {"ts": self._second_ts, "total": self._total, "count": self._count}
        return {**super().state(), "frames": self._frames, "second": second}

    def restore(self, state: Mapping[str, Any]) -> None:
        second, frames = state["second"], count(state["frames"])
        ts, total, in_second = finite(second["ts"]), finite(second["total"]), count(second["count"])
        if not (0.0 <= total <= in_second and bool(in_second) == bool(frames)):
            raise ValueError("a second that no frames lead to")
        super().restore(state)
        self._frames, self._count, self._second_ts, self._total = frames, in_second, ts, total


class LastHour:
    """The mean over the last hour of capture time, to ten seconds, in memory that no frame rate changes.

    The clock only goes forward: one that is set back stands still for that step, and one that is set ahead makes what
    came before old. Between two values nothing is computed.
    """

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque()
        self._now = 0.0  # seconds of capture time that have passed, in steps forward
        self._ts: float | None = None
        self._estimate: Estimate | None = None

    def add(self, ts: float, value: float | None) -> None:
        """Add the value in [0, 1] of a frame of capture time `ts`; None for one that is empty."""
        self._now += max(0.0, ts - self._ts) if self._ts is not None else 0.0
        self._ts = ts
        self._estimate = None
        while self._slices and self._now - self._slices[0].started >= _HOUR_S:
            self._slices.popleft()
        if not self._slices or self._now - self._slices[-1].started >= _SLICE_S:
            self._slices.append(_Slice(self._now, ts))
        self._slices[-1].add(value)

    @property
    def estimate(self) -> Estimate:
        """The mean with the interval of `mean_interval`: valid for an hour that was chosen beforehand, not for all.

        If somebody picks an hour by its value, its interval misses the mean more often than once in twenty.
        `since` is when the first frame of the hour was captured.
        """
        if self._estimate is None:
            n, empty = sum(each.n for each in self._slices), sum(each.empty for each in self._slices)
            interval = mean_interval(sum(each.total for each in self._slices), n)
            self._estimate = Estimate(interval, empty, self._slices[0].since if self._slices else 0.0)
        return self._estimate

    def state(self) -> dict[str, Any]:
        return {"now": self._now, "ts": self._ts, "slices": [list(astuple(each)) for each in self._slices]}

    def restore(self, state: Mapping[str, Any]) -> None:
        now, ts = finite(state["now"]), None if state["ts"] is None else finite(state["ts"])
        slices = deque(_Slice.from_row(row) for row in state["slices"])
        self._now, self._ts, self._slices, self._estimate = now, ts, slices, None


@dataclass
class _Slice:
    started: float  # by the clock that only goes forward
    since: float  # capture time
    n: int = 0
    total: float = 0.0
    empty: int = 0

    def add(self, value: float | None) -> None:
        if value is None:
            self.empty += 1
        else:
            self.n, self.total = self.n + 1, self.total + float(value)

    @classmethod
    def from_row(cls, row: Any) -> _Slice:
        """Read the values in their order. Raises ValueError, TypeError."""
        started, since, n, total, empty = row
        made = cls(finite(started), finite(since), count(n), finite(total), count(empty))
        if not 0.0 <= made.total <= made.n:
            raise ValueError("a slice that no frames lead to")
        return made


class FidelityRecord:
    """The fidelity of observed frames: since the last start, over the last hour whatever served, and frame by frame."""

    def __init__(self) -> None:
        self.since_start, self.hour = SinceStart(), LastHour()
        self._history = array("d")  # by turns capture times and values: as pairs of objects they would be a megabyte

    def start(self, since: float) -> None:
        """Start over at capture time `since`, for another engine or another scene; the hour goes on."""
        self.since_start.start(since)

    def add(self, ts: float, value: float | None) -> None:
        """Add the fidelity of a frame of capture time `ts`; None for one on which no engine found anything."""
        self.since_start.add(ts, value)
        self.hour.add(ts, value)
        if value is not None:
            self._history.extend((ts, value))
            del self._history[: -2 * _HISTORY]

    def newest(self, count: int = _HISTORY) -> list[tuple[float, float]]:
        """(capture time, fidelity) of so many of the newest frames that are not empty; `state` does not hold them."""
        newest = self._history[-2 * count :]
        return list(zip(newest[::2], newest[1::2], strict=True))

    def state(self) -> dict[str, Any]:
        return {"since_start": self.since_start.state(), "hour": self.hour.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        hour = LastHour()
        hour.restore(state["hour"])
        self.since_start.restore(state["since_start"])
        self.hour = hour


def mean_interval(total: float, n: int, error: float = _ERROR) -> Interval:
    """Return the mean of `n` values in [0, 1] that sum to `total`, with its confidence interval at this one n.

    The means m are kept for which n KL(total / n, m) <= ln(2 / error), KL the relative entropy of two coins. Source:
    Hoeffding, "Probability inequalities for sums of bounded random variables" (JASA 1963), Theorem 1, equation 2.1,
    for each side. It needs no assumption on the distribution, and holds for values that depend on each other as long
    as their conditional mean is constant; for independent ones it covers the average of their means even if these move.
    """
    if n == 0:
        return _NOTHING
    mean = min(max(total / n, 0.0), 1.0)
    most = math.log(2.0 / error) / n
    return Interval(mean, _outermost(mean, most, 0.0), _outermost(mean, most, 1.0), n)


def _outermost(mean: float, most: float, outside: float) -> float:
    """Return the mean that is kept furthest towards `outside`, by bisection, rounded outwards."""
    inside = mean
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2.0
        if _relative_entropy(mean, middle) <= most:
            inside = middle
        else:
            outside = middle
    return outside


def _relative_entropy(p: float, q: float) -> float:
    """Return the relative entropy of a coin of bias p to one of bias q, in nats."""
    if not 0.0 < q < 1.0:
        return 0.0 if p == q else math.inf
    first = p * math.log(p / q) if p > 0.0 else 0.0
    second = (1.0 - p) * math.log((1.0 - p) / (1.0 - q)) if p < 1.0 else 0.0
    return first + second
