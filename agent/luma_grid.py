"""What a frame looks like in a few hundred bytes: enough to tell whether another one shows anything new."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS, COLUMNS = 24, 32
_SAMPLES = 4  # pixels a side that a cell is the mean of, however large the frame
# Luma steps of 255 by which a cell may differ in two frames that show the same. White noise of a standard deviation of
# 10, a camera at night, moves the worst of all cells by less in 99 of 100 pairs; an object as large as a cell that is
# 60 brighter or darker than what is behind it moves one by 15 wherever it stands. Clips: tests/test_luma_grid.py.
NEAR = 12

Luma = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class LumaGrid:
    """luma: uint8 (24, 32), of the parts of a frame. brightness: their mean, in [0, 255]."""

    luma: Luma

    @classmethod
    def of(cls, image: NDArray[np.uint8]) -> LumaGrid:
        """A frame, BGR uint8 (H, W, 3), of any size: a quarter of a millisecond, for it looks at 12288 pixels only."""
        rows, columns = (_places(parts, size) for parts, size in zip((ROWS, COLUMNS), image.shape[:2], strict=True))
        pixels = image[rows][:, columns].astype(np.uint32)
        weighted = pixels[..., 0] + 2 * pixels[..., 1] + pixels[..., 2]
        cells = weighted.reshape(ROWS, _SAMPLES, COLUMNS, _SAMPLES).sum(axis=(1, 3))
        return cls((cells // (4 * _SAMPLES * _SAMPLES)).astype(np.uint8))

    @property
    def brightness(self) -> float:
        return float(self.luma.mean())

    def distances(self, others: Luma) -> NDArray[np.int16]:
        """From others (n, 24, 32): the largest difference of a cell, (n,)."""
        differences: NDArray[np.int16] = np.abs(others.astype(np.int16) - self.luma).max(axis=(1, 2))
        return differences


def _places(parts: int, size: int) -> NDArray[np.intp]:
    """Where along an axis the samples of all its parts lie; a frame of few pixels has some in several parts."""
    samples = parts * _SAMPLES
    return np.arange(samples, dtype=np.intp) * size // samples
