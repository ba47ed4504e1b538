"""Whether a camera is there, as it is told: lost at once, back once it has delivered for a while."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from agent.camera.source import Source
from agent.common.errors import CameraError

_LONGEST_STEADY_S = 60.0
_AGAIN_S = 60.0  # lost again so soon after it was told to be back, a camera is flapping


class CameraPresence:
    """Tells of changes only, and ever fewer of a camera that flaps: it would fill every log and queue.

    steady_s: for which it has to deliver before it is back; doubled, up to a minute, each time it was lost again within
    a minute of that. Its frames are served meanwhile. on_change: is called with the error, or with None.
    """

    def __init__(self, on_change: Callable[[CameraError | None], None], steady_s: float) -> None:
        self._on_change = on_change
        self._usual_s = self._steady_s = steady_s
        self._delivers_since_s: float | None = None
        self._back_s: float | None = None  # when it was told
        self._lock = threading.Lock()
        self.lost = False

    @property
    def is_missing(self) -> bool:
        """Whether it is lost, and no frame has come since."""
        return self.lost and self._delivers_since_s is None

    def lose(self, error: CameraError) -> None:
        """It delivers nothing, or nothing new; any thread may say so."""
        with self._lock:
            now_s = time.monotonic()
            self._delivers_since_s = None
            if self.lost:
                return
            flaps = self._back_s is not None and now_s - self._back_s < _AGAIN_S
            self._steady_s = min(2.0 * self._steady_s, _LONGEST_STEADY_S) if flaps else self._usual_s
            self.lost = True
            self._on_change(error)

    def deliver(self) -> bool:
        """A frame came. Whether they have come for long enough."""
        with self._lock:
            now_s = time.monotonic()
            if self._delivers_since_s is None:
                self._delivers_since_s = now_s
            steady = now_s - self._delivers_since_s >= (self._steady_s if self.lost else self._usual_s)
            if steady and self.lost:
                self.lost, self._back_s = False, now_s
                self._on_change(None)
            return steady


_STEP = 16  # every so manieth row is compared with each frame; all of them before a picture counts as frozen
_FLAT = 3.0  # of 255: standard deviation of a picture in which no noise can show, as of a covered lens


class FreezeDetector:
    """Watches one camera's frames, BGR uint8 (H, W, 3). limit_s: how long one may be repeated; None: for ever.

    A sensor's noise is in every picture of it, so that no two are the same; a screen's, a test pattern's may be. A dark
    or even picture says nothing: there noise is cut off. `frozen`: whether one has been repeated for too long.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._rows: NDArray[np.uint8] | None = None
        self._picture: NDArray[np.uint8] | None = None  # since it has been repeated
        self._since_s = 0.0
        self.frozen = False

    def look(self, image: NDArray[np.uint8], now_s: float) -> None:
        """Take a frame that was coded without others. now_s: of a monotonic clock."""
        if self._limit_s is None:
            return
        rows = image[::_STEP]
        if self._rows is None or rows.shape != self._rows.shape:
            self._rows = rows.copy()
            self._begin(now_s)
        elif not _equal(rows, self._rows):
            np.copyto(self._rows, rows)
            self._begin(now_s)
        elif self._picture is None:
            self._picture = image.copy()
        elif self.frozen or now_s - self._since_s >= self._limit_s:
            self.frozen = _equal(image, self._picture) and float(rows.std()) >= _FLAT
            if not self.frozen:
                self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._picture, self._since_s, self.frozen = None, now_s, False


def _equal(image: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    """One row tells most pictures apart, and costs next to nothing."""
    middle = len(image) // 2
    return bool((image[middle] == other[middle]).all()) and bool((image == other).all())


_WINDOW = 32  # frames that tell the rate
_ENOUGH = 8
_STEADY, _NEAR = 0.75, 0.25  # so many intervals so near their median, or gaps say nothing: some cameras vary it
_DOUBTED = 4  # gaps in a row, after which it is the rate that has changed
_LONGEST_S = 10.0  # beyond it is the camera's clock that was set


class FrameLossCounter:
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


SILENCE_S = 1.5  # with the ticks of whoever watches it is told within two seconds
OPEN_S = 5.0  # for a camera to answer; an RTSP stream waits for a key frame


def first_picture_s(silence_s: float) -> float:
    """How long the first picture may take from when the camera is asked: it has to answer, and to start."""
    return OPEN_S + silence_s


def silent(source: Source, seconds: float) -> CameraError:
    """Of a camera that has given no picture for so long."""
    found = f"no picture from {source.shown} for {seconds:.1f} s"
    return CameraError("camera.silent", found, "pictures", "check the camera, its cable and its network")


class StreamConnection:
    """The connection by which a camera is read, where we hold it ourselves: another thread may cut it, and whoever
    reads it finds its end at once. `was_cut`: whether this one was. `ended`: whether nothing is to be read any more, by
    whatever way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.was_cut = self.ended = False

    def take(self, connected: socket.socket) -> None:
        """From now on this is the connection."""
        with self._lock:
            self._socket, self.was_cut = connected, False
        if self.ended:
            self.cut()

    def drop(self) -> None:
        """Whoever reads is about to close it."""
        with self._lock:
            self._socket = None

    def wait_at_most(self, seconds: float) -> None:
        """For the next bytes."""
        with self._lock:
            if self._socket is not None:
                self._socket.settimeout(seconds)

    def cut(self) -> None:
        """End the connection; another one may follow."""
        with self._lock, suppress(OSError):  # it has ended by itself
            if self._socket is not None:
                self.was_cut = True
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # below TLS, whose state is the reader's

    def end(self) -> None:
        """End it, and whatever follows."""
        self.ended = True
        self.cut()


@dataclass
class StreamState:
    """What is known of a camera's stream beside its frames.

    coded_anew: whether the newest frame was coded without the others, so that it has the sensor's noise of its moment.
    An encoder of video repeats to the bit what hardly changes, but for its key frames. passed: how many pictures of a
    recording could not be read; labels count them.
    """

    losses: FrameLossCounter = field(default_factory=lambda: FrameLossCounter(Counter()))
    coded_anew: bool = True
    passed: int = 0
    line: StreamConnection = field(default_factory=StreamConnection)


class PictureTimeout:
    """With a camera that sends, but no good picture. It begins when the camera is opened."""

    def __init__(self, source: Source, silence_s: float) -> None:
        self._source = source
        self._silence_s = silence_s
        self._limit_s = first_picture_s(silence_s)
        self._since_s = time.monotonic()

    def begin(self) -> None:
        """A good picture was handed on: from now on the next one is waited for."""
        self._since_s, self._limit_s = time.monotonic(), self._silence_s

    def check(self) -> None:
        """Raises CameraError (`camera.silent`) when it is over."""
        waited_s = time.monotonic() - self._since_s
        if waited_s >= self._limit_s:
            raise silent(self._source, waited_s)
