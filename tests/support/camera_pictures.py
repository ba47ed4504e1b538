"""Pictures whose brightness is their number, and videos."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray


def picture(number: int) -> NDArray[np.uint8]:
    return np.full((48, 64, 3), 20 * number, np.uint8)


def write_video(path: Path, pictures: Iterable[NDArray[np.uint8]]) -> None:
    """Write an AVI of MJPEG, 10 pictures a second; all have the size of the first."""
    first, *others = pictures
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (first.shape[1], first.shape[0]))
    for each in (first, *others):
        writer.write(each)
    writer.release()
