"""The daemon as users start it, on a clip that plays for ever as a camera would, with every frame's latency on record.

    python -m benchmarks.workers.recorded_daemon FRAMES CLIP FPS run -c config.yaml

The source in the config is `rtsp://clip`: in this process the clip stands where OpenCV would open the stream, at FPS
frames per second, or with 0 as fast as they are read. FRAMES gets, per frame answered, two little-endian int64: the
wall clock and the latency, both in ns.
"""

from __future__ import annotations

import struct
import sys
import time
from typing import Any

import cv2

from agent.common.latency import LoopMeter
from agent.serving import pipeline
from fleet.cli.main import main

_opened = cv2.VideoCapture


class Clip:
    """What `cv2.VideoCapture` is to a camera: a frame whenever one is due, without end."""

    path = ""
    period_s = 0.0

    def __init__(self, _url: str, *_: Any) -> None:
        self._video = _opened(self.path)
        self._due_s = time.monotonic()

    def isOpened(self) -> bool:
        return bool(self._video.isOpened())

    def get(self, _property: int) -> float:
        return 0.0  # a stream that says nothing of itself

    def read(self) -> tuple[bool, Any]:
        self._due_s = max(self._due_s + self.period_s, time.monotonic() - self.period_s)
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        good, image = self._video.read()
        if not good:
            self._video = _opened(self.path)
            good, image = self._video.read()
        return good, image

    def release(self) -> None:
        self._video.release()


class RecordingMeter(LoopMeter):
    """Keeps every latency as well."""

    file: Any = None

    def record(self, latency_ns: int) -> None:
        super().record(latency_ns)
        self.file.write(struct.pack("<qq", time.time_ns(), latency_ns))


if __name__ == "__main__":
    _, frames, Clip.path, fps, *arguments = sys.argv
    Clip.period_s = 1.0 / float(fps) if float(fps) else 0.0
    cv2.VideoCapture = Clip  # type: ignore[misc, assignment]  # it stands in for a camera
    with open(frames, "wb", buffering=1 << 16) as RecordingMeter.file:
        pipeline.LoopMeter = RecordingMeter  # type: ignore[misc]  # the one of the whole run
        status = main(arguments)
    sys.exit(status)
