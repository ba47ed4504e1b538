"""Measure the frame loop: frames, drops by cause, frame rate, latency."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.common.clock import SYSTEM_CLOCK, Clock

_BUCKETS_PER_OCTAVE = 32  # percentiles are exact to 2 %; more: finer, and more memory
_SMALLEST_NS = 1_000.0
_OCTAVES = 34  # up to about 17 s
_UNSORTED = 128  # durations that wait to be sorted, at most
_REPORTED_OCTAVES = range(9, 23)  # upper bounds of `cumulative_counts`, from half a millisecond to four seconds


class LatencyHistogram:
    """Percentiles of a duration in constant memory: counts in logarithmic buckets from 1 us up.

    Durations are sorted into the buckets by the hundred. The frame path only adds a number, and appends to a list.
    Reading changes nothing.
    """

    def __init__(self) -> None:
        self.sum_ns = 0  # sum of all durations
        self._sorted = np.zeros(_OCTAVES * _BUCKETS_PER_OCTAVE, np.int64)
        self._newest: list[int] = []

    def add(self, duration_ns: int) -> None:
        self.sum_ns += duration_ns
        self._newest.append(duration_ns)
        if len(self._newest) >= _UNSORTED:
            self._sorted, self._newest = self._counts(), []

    def _counts(self) -> NDArray[np.int64]:
        """Return the counts by bucket, with those of the newest durations."""
        octaves = np.log2(np.maximum(np.array(self._newest, np.float64), _SMALLEST_NS) / _SMALLEST_NS)
        buckets = np.minimum((octaves * _BUCKETS_PER_OCTAVE).astype(np.int64), self._sorted.size - 1)
        return self._sorted + np.bincount(buckets, minlength=self._sorted.size)

    def percentile_ms(self, percent: float) -> float:
        """Return the duration in ms that `percent` of the values do not exceed; 0.0 without values."""
        counts = self._counts()
        total = int(counts.sum())
        if total == 0:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(counts), percent / 100.0 * total))
        return float(_SMALLEST_NS * 2.0 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE)) / 1e6

    def cumulative_counts(self) -> list[tuple[float, int]]:
        """Return pairs (bound in s, values up to it); the bounds are powers of two of a microsecond."""
        per_octave = np.cumsum(self._counts().reshape(_OCTAVES, _BUCKETS_PER_OCTAVE).sum(axis=1))
        return [(2.0**octave * 1e-6, int(per_octave[octave - 1])) for octave in _REPORTED_OCTAVES]

    def copy(self) -> LatencyHistogram:
        """Return a histogram of the durations so far; any thread may read it."""
        copied = copy(self)  # which shares the sorted counts: they are replaced, and never changed
        copied._newest = [*self._newest]
        return copied


@dataclass(frozen=True)
class LoopSample:
    """The loop over a stretch of wall time: frames served, drops by cause, frame rate, latency."""

    frames: int
    dropped: Mapping[str, int]
    fps: float
    p50_ms: float
    p99_ms: float

    def as_dict(self) -> dict[str, object]:
        """Return the object that the command line and the telemetry share."""
        return {
            "frames": self.frames,
            "dropped": dict(self.dropped),
            "fps": round(self.fps, 2),
            "latency_ms": {"p50": round(self.p50_ms, 2), "p99": round(self.p99_ms, 2)},
        }


@dataclass(frozen=True)
class LoopTotals:
    """What a meter has counted over some seconds. A few microseconds make it; the figures are computed when asked for.

    latency: Of the frames; nothing is added to it any more.
    """

    frames: int
    dropped: Mapping[str, int]
    seconds: float
    latency: LatencyHistogram

    def sample(self) -> LoopSample:
        """Return frame rate and percentiles."""
        p50_ms, p99_ms = self.latency.percentile_ms(50.0), self.latency.percentile_ms(99.0)
        return LoopSample(self.frames, self.dropped, self.frames / max(self.seconds, 1e-9), p50_ms, p99_ms)


class LoopMeter:
    """Counts frames and their latency, from a frame's arrival to its decoded result, or to its last output.

    The frame path calls `record`, a reporting thread `sample`; each sample starts a new stretch.
    """

    def __init__(self, dropped: Callable[[], Mapping[str, int]] = dict, clock: Clock = SYSTEM_CLOCK) -> None:
        """dropped: returns the frames dropped since the start, by cause; none by default."""
        self._dropped, self._clock = dropped, clock
        self._lock = threading.Lock()
        self._latency = LatencyHistogram()
        self._frames = 0
        self._dropped_before: Counter[str] = Counter()
        self._since_s = clock.monotonic_s()

    def record(self, latency_ns: int) -> None:
        with self._lock:
            self._frames += 1
            self._latency.add(latency_ns)

    def totals(self) -> LoopTotals:
        """Return the stretch since the last sample, which goes on."""
        with self._lock:
            return self._totals(Counter(self._dropped()), self._latency.copy())

    def sample(self) -> LoopSample:
        """Return the stretch since the last sample, and start a new one."""
        with self._lock:
            dropped = Counter(self._dropped())
            stretch = self._totals(dropped, self._latency)
            self._latency, self._frames, self._dropped_before = LatencyHistogram(), 0, dropped
            self._since_s += stretch.seconds
        return stretch.sample()

    def _totals(self, dropped: Counter[str], latency: LatencyHistogram) -> LoopTotals:
        seconds = self._clock.monotonic_s() - self._since_s
        return LoopTotals(self._frames, dropped - self._dropped_before, seconds, latency)
