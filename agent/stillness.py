"""Whether a camera repeats one picture to the bit: its encoder, or what stands between, has stopped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STEP = 16  # every so manieth row is compared with each frame; all of them before a picture counts as frozen
_FLAT = 3.0  # of 255: standard deviation of a picture in which no noise can show, as of a covered lens


class Stillness:
    """Watches one camera's frames, BGR uint8 (H, W, 3). limit_s: how long one may be repeated; None: for ever.

    A sensor's noise is in every picture of it, so that no two are the same; a screen's, a test pattern's may be. A dark
    or even picture says nothing: there noise is cut off. `frozen`: whether one has been repeated for too long.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._rows: NDArray[np.uint8] | None = None
        self._picture: NDArray[np.uint8] | None = None  # since it has been repeated
        self._since_s = 0.0
        self.frozen = False

    def look(self, image: NDArray[np.uint8], now_s: float) -> None:
        """Take a frame that was coded without others. now_s: of a monotonic clock."""
        if self._limit_s is None:
            return
        rows = image[::_STEP]
        if self._rows is None or rows.shape != self._rows.shape:
            self._rows = rows.copy()
            self._begin(now_s)
        elif not _equal(rows, self._rows):
            np.copyto(self._rows, rows)
            self._begin(now_s)
        elif self._picture is None:
            self._picture = image.copy()
        elif self.frozen or now_s - self._since_s >= self._limit_s:
            self.frozen = _equal(image, self._picture) and float(rows.std()) >= _FLAT
            if not self.frozen:
                self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._picture, self._since_s, self.frozen = None, now_s, False


def _equal(image: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    """One row tells most pictures apart, and costs next to nothing."""
    middle = len(image) // 2
    return bool((image[middle] == other[middle]).all()) and bool((image == other).all())
