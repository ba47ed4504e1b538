"""One picture of the frames that a calibration is made of, for whoever stands at the board."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

MOST = 48  # thumbnails
_WIDTH, _HEIGHT, _LABEL = 96, 72, 12  # pixels of a thumbnail at most, and of the line below it
_COLUMNS = 8
_WHITE = (255, 255, 255)


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """A taken frame, BGR uint8 (H, W, 3) of at most 72 by 96 pixels. ts: capture time; brightness in [0, 255]."""

    ts: float
    brightness: float
    image: NDArray[np.uint8]

    @classmethod
    def of(cls, ts: float, brightness: float, image: NDArray[np.uint8]) -> Thumbnail:
        """Of a frame of any size: pixels are left out, for it is made of every taken frame and few are looked at."""
        step = max(1, -(-image.shape[0] // _HEIGHT), -(-image.shape[1] // _WIDTH))
        return cls(ts, brightness, image[::step, ::step].copy())


def draw_sheet(thumbnails: Sequence[Thumbnail]) -> bytes:
    """A PNG of thumbnails in order of capture time, each with its time of day (UTC; in a file, media time)
    and its brightness below it."""
    rows = -(-max(len(thumbnails), 1) // _COLUMNS)
    sheet = np.zeros((rows * (_HEIGHT + _LABEL), _COLUMNS * _WIDTH, 3), np.uint8)
    for place, thumbnail in enumerate(sorted(thumbnails, key=lambda each: each.ts)):
        row, column = divmod(place, _COLUMNS)
        top, left = row * (_HEIGHT + _LABEL), column * _WIDTH
        height, width = thumbnail.image.shape[:2]
        sheet[top : top + height, left : left + width] = thumbnail.image
        label = f"{time.strftime('%H:%M:%S', time.gmtime(thumbnail.ts))} {thumbnail.brightness:.0f}"
        foot = (left + 2, top + _HEIGHT + _LABEL - 3)
        cv2.putText(sheet, label, foot, cv2.FONT_HERSHEY_PLAIN, 0.7, _WHITE, 1, cv2.LINE_AA)
    _, encoded = cv2.imencode(".png", sheet)
    return encoded.tobytes()
