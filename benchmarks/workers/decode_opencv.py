"""Decoding by OpenCV, as constraints.txt pins it, into BGR."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np


def version() -> str:
    return str(cv2.__version__)


def decode(path: str, threads: int) -> tuple[int, float]:
    """How many frames there are, and the mean of the last. threads: of the decoder; 0: as many as it likes."""
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, threads] if threads else [])
    count = 0
    last: Any = np.zeros(0)
    while True:
        ok, image = capture.read()
        if not ok:
            return count, float(last.mean())
        count, last = count + 1, image
