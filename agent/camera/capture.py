"""From a source to the frame path: the capture thread and the one-slot mailbox.

A live camera never waits: a frame nobody took is overwritten and counted. A file waits, so that every frame is
seen, unless the configuration says otherwise.
"""

from __future__ import annotations

import math
import threading
import time
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
    silent,
)
from agent.common.errors import CameraError
from agent.common.timing import Backoff
from engines.trace import spanned

_REOPENING_S = 60.0  # at most, of a camera that has been opened again and still repeats its picture

_OF_LATE_S = 2.0


@dataclass(frozen=True)
class Frame:
    """One image, BGR uint8 (H, W, 3), with its place in the stream.

    ts: capture time in seconds: media time for files, Unix time for cameras.
    captured_ns: monotonic clock when the image reached us; latency counts from here.
    camera: the name of the one that it is of; ids are its own.
    """

    id: int
    ts: float
    captured_ns: int
    image: Image
    camera: str = "camera"


class FrameSlot:
    """The one-slot mailbox between one camera's capture and inference.

    With `keep_every`, `put` waits until the slot is empty; else it overwrites and counts the loss as `stale`.
    lock, filled: shared by slots that one thread waits for; it is not woken by room, nor who waits for room by frames.
    """

    def __init__(
        self, keep_every: bool, lock: threading.RLock | None = None, filled: threading.Condition | None = None
    ) -> None:
        self.keep_every = keep_every
        self._frame: Frame | None = None
        self._closed = False
        self._put_s = -math.inf
        lock = lock or threading.RLock()
        self._filled = filled or threading.Condition(lock)
        self._room = threading.Condition(lock)
        self.dropped: Counter[str] = Counter()

    def put(self, frame: Frame) -> None:
        with self._room:
            while self.keep_every and self._frame is not None and not self._closed:
                self._room.wait()
            if self._closed:
                return
            if self._frame is not None:
                self.dropped["stale"] += 1
            self._frame = frame
            self._put_s = time.monotonic()
            self._filled.notify_all()

    @property
    def delivers(self) -> bool:
        """Whether frames have come of late, and may come again."""
        return not self._closed and time.monotonic() - self._put_s < _OF_LATE_S

    @property
    def full(self) -> bool:
        """Whether a frame lies in it."""
        return self._frame is not None

    @property
    def over(self) -> bool:
        """Whether it is empty and stays so."""
        return self._closed and self._frame is None

    def take(self) -> Frame | None:
        """The frame that lies in it, if one does."""
        with self._room:
            frame, self._frame = self._frame, None
            self._room.notify_all()
            return frame

    def close(self) -> None:
        """No more frames: a waiting `put` returns, and what lies in it can still be taken."""
        with self._room:
            self._closed = True
            self._room.notify_all()
            self._filled.notify_all()


class CaptureThread(threading.Thread):
    """Reads a source into a FrameSlot until it ends, fails for good, or is stopped.

    speed: how many media seconds of a file pass per second; 0 reads as fast as frames are taken.
    limit: stop after that many frames; 0 reads all.
    silence_s: a camera that has delivered nothing for so long is lost, and so is one whose picture is frozen
    (`source.frozen_s`). It is reopened with jittered backoff, for ever; `on_change` hears of it once, with the error,
    and once with None when new frames have come again for as long. Whatever else ends the stream early is kept in
    `error`.
    What the camera made and nobody got is counted in `slot.dropped`, as FrameLossCounter and FrameSlot say.
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
    ) -> None:
        super().__init__(name=f"capture {camera}", daemon=True)
        self._camera = camera
        self._source = source
        self._slot = slot
        self._speed = speed
        self._limit = limit
        self._presence = CameraPresence(on_change, silence_s)
        self._silence_s = silence_s
        self._waits_since_s: float | None = None  # monotonic, for the next frame
        self._patience_s = first_picture_s(silence_s)  # with that
        self._halt = threading.Event()
        self._count = 0
        self._reading = StreamState(FrameLossCounter(slot.dropped))
        self._stillness = FreezeDetector(source.frozen_s if source.live else None)
        self._reopening_s = source.frozen_s or 0.0
        self.pulse = 0  # changes while the camera is away, as long as the thread does not hang
        self.error: BaseException | None = None

    def run(self) -> None:
        backoff = Backoff(first_s=0.2, cap_s=1.0)
        try:
            while not self._halt.is_set():
                try:
                    self._pump(backoff)
                    return
                except CameraError as error:
                    if not self._source.live:
                        raise
                    if self._halt.is_set():
                        return
                    self._waits_since_s = None
                    self._reading.losses.away()
                    self._presence.lose(error)
                self.pulse += 1
                self._halt.wait(backoff.next_s())
        except CameraError as error:
            self.error = error
            self._presence.lose(error)
        except BaseException as error:
            self.error = error
        finally:
            self._waits_since_s = None
            self._slot.close()

    @property
    def beat(self) -> tuple[int, int]:
        """Changes as long as the thread does not hang: with every frame and every attempt to have the camera back."""
        return self._count, self.pulse

    def stop(self) -> None:
        """Ask for the end; the thread leaves after the read in progress, of MJPEG over HTTP at once."""
        self._halt.set()
        self._slot.close()
        self._reading.line.end()

    def look(self) -> None:
        """Whether the camera has fallen silent, by another thread's clock: what reads it may hang in its driver, or
        wait for what comes a byte at a time. Where the line can be cut it is."""
        since_s = self._waits_since_s
        if not self._source.live or since_s is None or self._halt.is_set():
            return
        silent_s = time.monotonic() - since_s
        if silent_s > self._patience_s:
            self._presence.lose(silent(self._source, silent_s))
            self._reading.line.cut()

    def _pump(self, backoff: Backoff) -> None:
        started = time.monotonic()
        first_ts: float | None = None
        self._waits_since_s, self._patience_s = started, first_picture_s(self._silence_s)
        for ts, image in spanned("capture", read_images(self._source, self._silence_s, self._reading)):
            if self._is_frozen(image, started):
                self._waits_since_s = time.monotonic()
                continue
            self._serves(backoff)
            first_ts = ts if first_ts is None else first_ts
            if self._speed > 0.0 and not self._source.live:
                self._halt.wait(max(0.0, started + (ts - first_ts) / self._speed - time.monotonic()))
            if self._halt.is_set():
                return
            self._waits_since_s, self._patience_s = None, self._silence_s
            number = self._count + self._reading.passed
            self._slot.put(Frame(number, ts, time.monotonic_ns(), image, self._camera))
            self._waits_since_s = time.monotonic()
            self._count += 1
            if self._limit and self._count >= self._limit:
                return

    def _is_frozen(self, image: Image, opened_s: float) -> bool:
        """Whether the frame only repeats what is known. Raises CameraError (`camera.frozen`) when the camera is to be
        opened again: at once, and then ever more rarely, for it is seen when the picture changes."""
        now_s = time.monotonic()
        if self._reading.coded_anew:
            self._stillness.look(image, now_s)
        if not self._stillness.frozen:
            self._reopening_s = self._source.frozen_s or 0.0
            return False
        self.pulse += 1
        if now_s - opened_s < self._reopening_s or self._halt.is_set():
            return True
        found = f"{self._source.shown} has repeated one picture for more than {self._source.frozen_s:g} s"
        self._reopening_s = min(2.0 * self._reopening_s, _REOPENING_S)
        remedy = "restart the camera; if its picture may stand still, as a screen's does, set camera.frozen_s to null"
        raise CameraError("camera.frozen", found, "pictures with a sensor's noise in them", remedy)

    def _serves(self, backoff: Backoff) -> None:
        """A frame came that is new."""
        if self._presence.is_missing:  # also one that fell silent and goes on by itself
            self._reading.losses.away()
        self._reading.losses.served()
        if self._presence.deliver():
            backoff.reset()
