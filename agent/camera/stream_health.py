"""Judge a camera's stream: is the camera there, is its picture frozen, which frames were lost on the way.

`CameraPresence` decides when a camera counts as lost and when as back, and reports the changes. `FreezeDetector` sees a
picture that is repeated bit by bit. `FrameLossCounter` counts the frames that came damaged or not at all.
`PictureTimeout` ends the wait for a camera that sends, but no good picture. `StreamState` holds what a reader
(`agent.camera.reader`) knows of its stream apart from the frames. `StreamConnection` holds a socket that another thread
may cut.
"""

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

SILENCE_S = 1.5  # with the ticks of the thread that watches, a loss is reported within two seconds
OPEN_S = 5.0  # for a camera to answer; an RTSP stream waits for a key frame


def first_picture_s(silence_s: float) -> float:
    """Return how long the first picture may take from the request on: the camera has to answer, and to start."""
    return OPEN_S + silence_s


def silent_error(source: Source, seconds: float) -> CameraError:
    """Return the error of a camera that has given no picture for so long."""
    found = f"no picture from {source.shown} for {seconds:.1f} s"
    return CameraError("camera.silent", found, "pictures", "check the camera, its cable and its network")


class PictureTimeout:
    """The time limit for a camera that sends, but no good picture. It starts when the camera is opened."""

    def __init__(self, source: Source, silence_s: float) -> None:
        self._source = source
        self._silence_s = silence_s
        self._limit_s = first_picture_s(silence_s)
        self._since_s = time.monotonic()

    def restart(self) -> None:
        """Wait for the next picture: a good one was handed on."""
        self._since_s, self._limit_s = time.monotonic(), self._silence_s

    def check(self) -> None:
        """Raises CameraError (`camera.silent`) when the time is up."""
        waited_s = time.monotonic() - self._since_s
        if waited_s >= self._limit_s:
            raise silent_error(self._source, waited_s)


_LONGEST_STEADY_S = 60.0
_FLAPPING_S = 60.0  # a camera that is lost again within this time after it was back is flapping


class CameraPresence:
    """Decide whether a camera is there: lost at once, back once it has delivered for a while.

    Only changes are reported, and ever fewer of a camera that flaps: it would fill every log and queue.

    Args:
        on_change: called with the error when the camera is lost, and with None when it is back.
        steady_s: how long a lost camera has to deliver before it is back; its frames are served meanwhile. Doubled, up
            to a minute, each time the camera is lost again within a minute of being back.
    """

    def __init__(self, on_change: Callable[[CameraError | None], None], steady_s: float) -> None:
        self._on_change = on_change
        self._usual_s = self._steady_s = steady_s
        self._delivers_since_s: float | None = None
        self._back_s: float | None = None  # when it was last reported as back
        self._lock = threading.Lock()
        self.lost = False

    def mark_lost(self, error: CameraError) -> None:
        """Note that the camera delivers nothing, or nothing new; any thread may call this."""
        with self._lock:
            now_s = time.monotonic()
            self._delivers_since_s = None
            if self.lost:
                return
            flaps = self._back_s is not None and now_s - self._back_s < _FLAPPING_S
            self._steady_s = min(2.0 * self._steady_s, _LONGEST_STEADY_S) if flaps else self._usual_s
            self.lost = True
            self._on_change(error)

    def frame_arrived(self) -> bool:
        """Note a new frame. Return whether frames have come for long enough."""
        with self._lock:
            now_s = time.monotonic()
            if self._delivers_since_s is None:
                self._delivers_since_s = now_s
            steady = now_s - self._delivers_since_s >= (self._steady_s if self.lost else self._usual_s)
            if steady and self.lost:
                self.lost, self._back_s = False, now_s
                self._on_change(None)
            return steady


_ROW_STEP = 16  # every so manieth row is compared with each frame; all of them before a picture counts as frozen
_FLAT = 3.0  # of 255: standard deviation of a picture in which no noise can show, as of a covered lens


class FreezeDetector:
    """Detect that one camera repeats a picture bit by bit, in frames BGR uint8 (H, W, 3).

    A sensor's noise is in every picture of it, so no two are the same; those of a screen or a test pattern may be. A
    dark or even picture proves nothing: its noise is cut off. `frozen`: one picture has been repeated for too long.

    Args:
        limit_s: how long a picture may be repeated; None: without limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._rows: NDArray[np.uint8] | None = None
        self._picture: NDArray[np.uint8] | None = None  # held from its first repetition on
        self._since_s = 0.0
        self.frozen = False

    def update(self, image: NDArray[np.uint8], now_s: float) -> None:
        """Compare a frame that was coded without others. now_s: of a monotonic clock."""
        if self._limit_s is None:
            return
        rows = image[::_ROW_STEP]
        if self._rows is None or rows.shape != self._rows.shape:
            self._rows = rows.copy()
            self._start(now_s)
        elif not _equal(rows, self._rows):
            np.copyto(self._rows, rows)
            self._start(now_s)
        elif self._picture is None:
            self._picture = image.copy()
        elif self.frozen or now_s - self._since_s >= self._limit_s:
            self.frozen = _equal(image, self._picture) and float(rows.std()) >= _FLAT
            if not self.frozen:
                self._start(now_s)

    def _start(self, now_s: float) -> None:
        self._picture, self._since_s, self.frozen = None, now_s, False


def _equal(image: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    """Compare the middle row first: it differs in most pictures that differ, and costs next to nothing."""
    middle = len(image) // 2
    return bool((image[middle] == other[middle]).all()) and bool((image == other).all())


_WINDOW = 32  # intervals from which the rate is known
_ENOUGH = 8
# This share of the intervals has to be this near their median, or gaps prove nothing: some cameras vary their rate.
_STEADY, _NEAR = 0.75, 0.25
_DOUBTED = 4  # after more gaps in a row than this, it is the rate that has changed
_LONGEST_S = 10.0  # a longer interval means that the camera's clock was set


class FrameLossCounter:
    """Add the frames that a stream lost to `dropped["decode"]`; its slot counts `stale` in the same counter.

    Counted are frames that came damaged, and frames missing between two others by the stream's own times: lost on the
    way, or beyond decoding. A picture that FFmpeg mends is served and not counted. Streams without times of their own,
    as MJPEG over HTTP, and streams of no steady rate have only the damaged ones. Nothing is counted for a gap during
    which the camera was kept waiting, or was away.

    One thread at a time.
    """

    def __init__(self, dropped: Counter[str]) -> None:
        self._dropped = dropped
        self._stamp_s: float | None = None
        self._intervals: deque[float] = deque(maxlen=_WINDOW)  # while nobody kept the camera waiting
        self._doubted: list[int] = []  # the missing frames of the newest gaps, counted once a frame comes in time
        self._longest_s = _LONGEST_S

    def start_stream(self, silence_s: float = _LONGEST_S) -> None:
        """Note that a stream was opened. silence_s: after which the camera is away, and nothing is missing."""
        self._longest_s = min(silence_s, _LONGEST_S)
        self._stamp_s = None
        self._doubted.clear()

    def frame_damaged(self) -> None:
        """Count a frame that cannot be decoded."""
        self._dropped["decode"] += 1

    def frame_arrived(self, stamp_s: float, kept_s: float = 0.0, damaged: int = 0) -> None:
        """Count what was lost before a good frame.

        Args:
            stamp_s: the stream's time of the frame.
            kept_s: how long the camera was kept waiting since the frame before.
            damaged: how many damaged frames came in between; they are counted here, and not as missing besides.
        """
        lost = damaged
        last_s, self._stamp_s = self._stamp_s, stamp_s
        interval_s = stamp_s - last_s if last_s is not None else 0.0
        if not 0.0 < interval_s < self._longest_s:
            self._doubted.clear()
        else:
            period_s, is_steady = self._usual_interval()
            was_kept = period_s > 0.0 and kept_s > period_s
            missing = max(0, round(interval_s / period_s) - 1 - damaged) if is_steady else 0
            if not was_kept:
                self._intervals.append(interval_s)
            if not missing:
                lost += sum(self._doubted)
                self._doubted.clear()
            elif not was_kept:
                self._doubted.append(missing)
                if len(self._doubted) > _DOUBTED:
                    self._doubted.clear()
                    self._intervals.clear()
        if lost:
            self._dropped["decode"] += lost

    def _usual_interval(self) -> tuple[float, bool]:
        """Return the interval between two frames in s, 0 while it is unknown, and whether it can be relied on."""
        if len(self._intervals) < _ENOUGH:
            return 0.0, False
        period_s = median(self._intervals)
        near = sum(abs(each - period_s) < _NEAR * period_s for each in self._intervals)
        return period_s, near >= _STEADY * len(self._intervals)


class StreamConnection:
    """The connection to a camera, where we hold it ourselves. Another thread may cut it; the reader sees that at once.

    `was_cut`: this connection was cut. `ended`: nothing is to be read any more, over whatever connection.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.was_cut = self.ended = False

    def attach(self, connected: socket.socket) -> None:
        """Make this the connection from now on."""
        with self._lock:
            self._socket, self.was_cut = connected, False
        if self.ended:
            self.cut()

    def detach(self) -> None:
        """Forget the connection: the reader is about to close it."""
        with self._lock:
            self._socket = None

    def wait_at_most(self, seconds: float) -> None:
        """Limit the wait for the next bytes."""
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
        """End the connection, and whatever follows."""
        self.ended = True
        self.cut()


@dataclass
class StreamState:
    """State of a camera's stream, apart from its frames.

    Args:
        is_intra_coded: the newest frame was coded without the others, so that it has the sensor's noise of its moment.
            An encoder of video repeats to the bit what hardly changes, except in its key frames.
        skipped: how many pictures of a recording could not be read; labels count them.
    """

    losses: FrameLossCounter = field(default_factory=lambda: FrameLossCounter(Counter()))
    is_intra_coded: bool = True
    skipped: int = 0
    connection: StreamConnection = field(default_factory=StreamConnection)
