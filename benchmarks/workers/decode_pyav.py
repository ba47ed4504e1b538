"""Decoding by PyAV into BGR arrays, and how many frames its FFmpeg's threads hold back."""

from __future__ import annotations

import av
import numpy as np


def version() -> str:
    return str(av.__version__)


def decode(path: str, threads: int) -> tuple[int, float]:
    """As decode_opencv's."""
    count, last = 0, np.zeros(0)
    with av.open(path) as container:
        _set_threads(container.streams.video[0], threads)
        for frame in container.decode(video=0):
            count, last = count + 1, frame.to_ndarray(format="bgr24")
    return count, float(last.mean())


def held_back(path: str, threads: int) -> int:
    """How many more packets than frames the decoder has been given when its first frame comes."""
    with av.open(path) as container:
        _set_threads(container.streams.video[0], threads)
        for number, packet in enumerate(container.demux(video=0)):
            if packet.decode():
                return number
    raise ValueError("no frame")


def _set_threads(stream: av.VideoStream, threads: int) -> None:
    stream.thread_type = "FRAME" if threads != 1 else "NONE"
    stream.thread_count = threads
