"""A clip that plays for ever where OpenCV would open a stream; and a program that runs a module beside it.

    python benchmarks/workers/clip_camera.py CLIP FPS MODULE ARGUMENT...

MODULE is a command line whose camera's source is any stream, such as `rtsp://clip`; it may be of another checkout. With
FPS 0 frames come as fast as they are read.
"""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any

import cv2

_opened = cv2.VideoCapture


class Clip:
    """What `cv2.VideoCapture` is to a camera: a frame whenever one is due, without end."""

    path = ""
    period_s = 0.0

    def __init__(self, _url: str, *_: Any) -> None:
        self._video = _opened(self.path)
        self._due_s = time.monotonic()

    @classmethod
    def install(cls, path: str, fps: float) -> None:
        """Let this clip stand for every camera of this process."""
        cls.path, cls.period_s = path, 1.0 / fps if fps else 0.0
        cv2.VideoCapture = cls  # type: ignore[misc, assignment]  # it stands in for a camera

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


if __name__ == "__main__":
    _, clip, fps, module, *arguments = sys.argv
    Clip.install(clip, float(fps))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
