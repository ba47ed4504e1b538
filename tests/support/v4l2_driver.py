"""OpenCV's capture on a V4L2 device, which needs a kernel's: what every fake of it has."""

from __future__ import annotations

import cv2


class V4l2Driver:
    """Opens, takes every setting, and has a steady camera's rate and times; `read` is each fake's own."""

    period_s = 0.01

    def __init__(self, *_: object) -> None:
        self._number = 0  # of the newest frame

    def isOpened(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def set(self, *_: object) -> bool:
        return True

    def get(self, what: int) -> float:
        known = {
            cv2.CAP_PROP_FPS: 1.0 / self.period_s,
            cv2.CAP_PROP_POS_MSEC: 1000.0 * self.period_s * self._number,
        }
        return known.get(what, 0.0)
