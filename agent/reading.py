"""What reads a camera and what watches that reader: its patience, and the line that another thread may cut."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from agent.errors import CameraError
from agent.losses import Losses
from agent.source import Source

SILENCE_S = 1.5  # with the ticks of whoever watches it is told within two seconds
OPEN_S = 5.0  # for a camera to answer; an RTSP stream waits for a key frame


def first_picture_s(silence_s: float) -> float:
    """How long the first picture may take from when the camera is asked: it has to answer, and to start."""
    return OPEN_S + silence_s


def silent(source: Source, seconds: float) -> CameraError:
    """Of a camera that has given no picture for so long."""
    found = f"no picture from {source.shown} for {seconds:.1f} s"
    return CameraError("camera.silent", found, "pictures", "check the camera, its cable and its network")


class Line:
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
class Reading:
    """What is known of a camera's stream beside its frames.

    coded_anew: whether the newest frame was coded without the others, so that it has the sensor's noise of its moment.
    An encoder of video repeats to the bit what hardly changes, but for its key frames. passed: how many pictures of a
    recording could not be read; labels count them.
    """

    losses: Losses = field(default_factory=lambda: Losses(Counter()))
    coded_anew: bool = True
    passed: int = 0
    line: Line = field(default_factory=Line)


class Patience:
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
