"""Frames that a camera made and that nobody got, counted by cause."""

from __future__ import annotations

import time
from collections import Counter, deque
from statistics import median

_WINDOW = 32  # frames that tell the rate
_ENOUGH = 8
_STEADY, _NEAR = 0.75, 0.25  # so many intervals so near their median, or gaps say nothing: some cameras vary it
_DOUBTED = 4  # gaps in a row, after which it is the rate that has changed
_LONGEST_S = 10.0  # beyond it is the camera's clock that was set


class Losses:
    """Adds to `dropped`, where the slot counts `stale`, the frames that were overwritten because a newer one came:

    decode: came damaged, or are missing between two others by the stream's own times: lost on the way, or beyond
    decoding. A picture that FFmpeg mends is served, and nobody tells of it. Streams without times of their own, as
    MJPEG over HTTP is, and those of no steady rate have only the damaged ones.
    slow: missing likewise, after whoever takes every frame had kept the camera waiting for longer than one lasts.
    reconnect: for which there was time, at the rate at which they had come, from the last frame before the camera was
    lost, silent or frozen, to the first one behind it, but for those that came damaged: an estimate; none until eight
    frames have told the rate.

    One thread at a time.
    """

    def __init__(self, dropped: Counter[str]) -> None:
        self._dropped = dropped
        self._stamp_s: float | None = None
        self._intervals: deque[float] = deque(maxlen=_WINDOW)  # while nobody kept the camera waiting
        self._doubted: list[int] = []
        self._claimed_s = 0.0
        self._longest_s = _LONGEST_S
        self._damaged = 0  # since the last one that was served
        self._arrivals: deque[float] = deque(maxlen=_WINDOW)
        self._pace_s = 0.0
        self._away_since_s = 0.0
        self._missed: int | None = None  # while the camera is away: what of that is counted

    def begin(self, claimed_fps: float = 0.0, silence_s: float = _LONGEST_S) -> None:
        """A stream was opened, whose driver claims this rate; 0: nobody does. silence_s: after which it is `away`, and
        what is missing counted there."""
        self._longest_s = min(silence_s, _LONGEST_S)
        self._stamp_s = None
        self._doubted.clear()
        self._claimed_s = 1.0 / claimed_fps if claimed_fps > 0.0 else 0.0

    def damaged(self) -> None:
        """A frame came that is none."""
        self._dropped["decode"] += 1
        self._damaged += 1

    def came(self, stamp_s: float, kept_s: float = 0.0, damaged: int = 0) -> None:
        """A frame of the stream's time `stamp_s`, read `kept_s` after the one before was handed on, and after so many
        damaged ones, which are not missing besides."""
        self._lost("decode", damaged)
        last_s, self._stamp_s = self._stamp_s, stamp_s
        interval_s = stamp_s - last_s if last_s is not None else 0.0
        if not 0.0 < interval_s < self._longest_s:
            self._doubted.clear()
            return
        period_s, steady = self._usual()
        was_kept = period_s > 0.0 and kept_s > period_s
        if not was_kept:
            self._intervals.append(interval_s)
        missing = max(0, round(interval_s / period_s) - 1 - damaged) if steady else 0
        if not missing:
            self._lost("decode", sum(self._doubted))
            self._doubted.clear()
        elif was_kept:
            self._lost("slow", missing)
        else:
            self._doubted.append(missing)
            if len(self._doubted) > _DOUBTED:
                self._doubted.clear()
                self._intervals.clear()

    def _lost(self, cause: str, count: int) -> None:
        if count:
            self._dropped[cause] += count

    def _usual(self) -> tuple[float, bool]:
        """The interval between two frames, in s, 0 where nobody knows, and whether it can be relied on."""
        if len(self._intervals) < _ENOUGH:
            return self._claimed_s, self._claimed_s > 0.0
        period_s = median(self._intervals)
        near = sum(abs(each - period_s) < _NEAR * period_s for each in self._intervals)
        return period_s, near >= _STEADY * len(self._intervals)

    def served(self) -> None:
        """A frame is handed on now."""
        if self._missed is not None:
            self.away()
            self._missed = None
            self._arrivals.clear()
        self._damaged = 0
        self._arrivals.append(time.monotonic())
        if len(self._arrivals) >= _ENOUGH:
            self._pace_s = (self._arrivals[-1] - self._arrivals[0]) / (len(self._arrivals) - 1)

    def away(self) -> None:
        """The camera is lost, or still is."""
        if self._missed is None:
            self._missed = 0
            self._away_since_s = self._arrivals[-1] if self._arrivals else time.monotonic()
        if self._pace_s > 0.0:
            missed = round((time.monotonic() - self._away_since_s) / self._pace_s) - 1 - self._damaged
            if missed > self._missed:
                self._dropped["reconnect"] += missed - self._missed
                self._missed = missed
