"""Carry frames from a source to the frame path: the capture thread of one camera, and its one-slot mailbox.

A live camera never waits: in `FrameSlot.put` a stale frame, one that nobody has taken, is overwritten and counted. A
recording waits, so that every frame is seen, unless the configuration says otherwise.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from agent.camera.reader import Image, read_images
from agent.camera.source import Source
from agent.camera.stream_health import (
    SILENCE_S,
    CameraPresence,
    FrameLossCounter,
    FreezeDetector,
    StreamState,
    first_picture_s,
    silent_error,
)
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import CameraError
from agent.common.timing import Backoff
from engines.trace import spanned

_LONGEST_REOPENING_S = 60.0  # between two attempts, of a camera that repeats its picture also when opened again
_RECENTLY_S = 2.0


@dataclass(frozen=True)
class Frame:
    """One image, BGR uint8 (H, W, 3), with its place in the stream.

    Args:
        ts: capture time in seconds: media time for files, Unix time for cameras.
        captured_ns: monotonic clock when the image reached us; latency counts from here.
        camera: the camera's name; each camera numbers its frames by itself.
    """

    id: int
    ts: float
    captured_ns: int
    image: Image
    camera: str = "camera"


class FrameSlot:
    """The one-slot mailbox between one camera's capture and inference.

    Args:
        keep_every: `put` waits until the slot is empty; else it overwrites the frame and counts it as `stale`.
        lock: shared by all slots that one thread waits for.
        filled: as lock. Notified when a frame comes, not when a slot becomes empty.
    """

    def __init__(
        self,
        keep_every: bool,
        lock: threading.RLock | None = None,
        filled: threading.Condition | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.keep_every = keep_every
        self._clock = clock
        self._frame: Frame | None = None
        self._closed = False
        self._put_s = -math.inf
        lock = lock or threading.RLock()
        self._filled = filled or threading.Condition(lock)
        self._emptied = threading.Condition(lock)
        self.dropped: Counter[str] = Counter()

    def put(self, frame: Frame) -> None:
        with self._emptied:
            while self.keep_every and self._frame is not None and not self._closed:
                self._emptied.wait()
            if self._closed:
                return
            if self._frame is not None:
                self.dropped["stale"] += 1
            self._frame = frame
            self._put_s = self._clock.monotonic_s()
            self._filled.notify_all()

    @property
    def delivers(self) -> bool:
        """True while frames have come recently, and may come again."""
        return not self._closed and self._clock.monotonic_s() - self._put_s < _RECENTLY_S

    @property
    def is_full(self) -> bool:
        """True while a frame lies in the slot."""
        return self._frame is not None

    @property
    def is_finished(self) -> bool:
        """True once the slot is empty and stays so."""
        return self._closed and self._frame is None

    def pop(self) -> Frame | None:
        """Take the frame out of the slot; None where it is empty."""
        with self._emptied:
            frame, self._frame = self._frame, None
            self._emptied.notify_all()
            return frame

    def close(self) -> None:
        """Accept no more frames: a waiting `put` returns, and a frame in the slot can still be taken."""
        with self._emptied:
            self._closed = True
            self._emptied.notify_all()
            self._filled.notify_all()


class CaptureThread(threading.Thread):
    """Read a source into a FrameSlot until it ends, fails for good, or is stopped.

    A lost camera is reopened with jittered backoff, for ever. Whatever else ends the stream early is kept in `error`.
    Frames that the camera made and nobody got are counted in `slot.dropped`, see FrameLossCounter and FrameSlot.

    Args:
        speed: media seconds of a file that pass per second; 0 reads as fast as frames are taken.
        limit: stop after that many frames; 0 reads all.
        on_change: called once with the error when the camera is lost, and once with None when it is back, see
            CameraPresence.
        silence_s: seconds without a frame after which a camera is lost. A camera is also lost when its picture is
            frozen (`source.frozen_s`).
    """

    def __init__(
        self,
        source: Source,
        slot: FrameSlot,
        speed: float,
        limit: int,
        on_change: Callable[[CameraError | None], None],
        silence_s: float = SILENCE_S,
        camera: str = "camera",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(name=f"capture {camera}", daemon=True)
        self._camera = camera
        self._clock = clock
        self._source = source
        self._slot = slot
        self._speed = speed
        self._limit = limit
        self._presence = CameraPresence(on_change, silence_s, clock)
        self._silence_s = silence_s
        self._waits_since_s: float | None = None  # monotonic: since when the next frame is waited for
        self._patience_s = first_picture_s(silence_s)  # how long it is waited for
        self._halt = threading.Event()
        self._count = 0
        self._reading = StreamState(FrameLossCounter(slot.dropped))
        self._freeze = FreezeDetector(source.frozen_s if source.live else None)
        self._reopening_s = source.frozen_s or 0.0
        self.pulse = 0  # changes while the camera is away, as long as the thread does not hang
        self.error: BaseException | None = None

    def run(self) -> None:
        backoff = Backoff(first_s=0.2, cap_s=1.0)
        try:
            while not self._halt.is_set():
                try:
                    self._read_stream(backoff)
                    return
                except CameraError as error:
                    if not self._source.live:
                        raise
                    if self._halt.is_set():
                        return
                    self._waits_since_s = None
                    self._presence.mark_lost(error)
                self.pulse += 1
                self._clock.wait(self._halt, backoff.next_s())
        except CameraError as error:
            self.error = error
            self._presence.mark_lost(error)
        except BaseException as error:
            self.error = error
        finally:
            self._waits_since_s = None
            self._slot.close()

    @property
    def beat(self) -> tuple[int, int]:
        """A value that changes with every frame and every attempt to reopen the camera, unless the thread hangs."""
        return self._count, self.pulse

    def stop(self) -> None:
        """Request the end; the thread leaves after the read in progress, of MJPEG over HTTP at once."""
        self._halt.set()
        self._slot.close()
        self._reading.connection.end()

    def check_silence(self) -> None:
        """Report a camera that has fallen silent, and cut its connection where that can be cut.

        Called by another thread: this one may hang in a driver, or wait for what comes a byte at a time.
        """
        since_s = self._waits_since_s
        if not self._source.live or since_s is None or self._halt.is_set():
            return
        silent_s = self._clock.monotonic_s() - since_s
        if silent_s > self._patience_s:
            self._presence.mark_lost(silent_error(self._source, silent_s))
            self._reading.connection.cut()

    def _read_stream(self, backoff: Backoff) -> None:
        opened_s = self._clock.monotonic_s()
        first_ts: float | None = None
        self._waits_since_s, self._patience_s = opened_s, first_picture_s(self._silence_s)
        images = read_images(self._source, self._silence_s, self._reading, self._clock)
        for ts, image in spanned("capture", images):
            if self._is_frozen(image, opened_s):
                self._waits_since_s = self._clock.monotonic_s()
                continue
            if self._presence.frame_arrived():
                backoff.reset()
            first_ts = ts if first_ts is None else first_ts
            if self._speed > 0.0 and not self._source.live:
                due_s = opened_s + (ts - first_ts) / self._speed
                self._clock.wait(self._halt, max(0.0, due_s - self._clock.monotonic_s()))
            if self._halt.is_set():
                return
            self._waits_since_s, self._patience_s = None, self._silence_s
            number = self._count + self._reading.skipped
            self._slot.put(Frame(number, ts, self._clock.monotonic_ns(), image, self._camera))
            self._waits_since_s = self._clock.monotonic_s()
            self._count += 1
            if self._limit and self._count >= self._limit:
                return

    def _is_frozen(self, image: Image, opened_s: float) -> bool:
        """Return whether the frame only repeats a frozen picture.

        Raises CameraError (`camera.frozen`) when the camera is to be opened again: at once, and then ever more rarely,
        since a change of the picture is seen without that.
        """
        now_s = self._clock.monotonic_s()
        if self._reading.is_intra_coded:
            self._freeze.update(image, now_s)
        if not self._freeze.frozen:
            self._reopening_s = self._source.frozen_s or 0.0
            return False
        self.pulse += 1
        if now_s - opened_s < self._reopening_s or self._halt.is_set():
            return True
        found = f"{self._source.shown} has repeated one picture for more than {self._source.frozen_s:g} s"
        self._reopening_s = min(2.0 * self._reopening_s, _LONGEST_REOPENING_S)
        remedy = (
            "restart the camera; if its picture may stand still, as that of a screen does, set camera.frozen_s to null"
        )
        raise CameraError("camera.frozen", found, "pictures that vary with a sensor's noise", remedy)
