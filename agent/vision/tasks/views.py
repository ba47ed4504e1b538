"""Make other views of a frame, by which a model's answer to it is confirmed or not (`ModelTask.confirmed`)."""

from __future__ import annotations

import numpy as np

from agent.vision.drawing import Picture

_TILES = 32  # along each side of a frame that is put in disorder


def mirrored(image: Picture) -> Picture:
    """Return a copy of a frame with left and right exchanged."""
    return np.ascontiguousarray(image[:, ::-1])


def disordered(image: Picture) -> Picture:
    """Return a copy of a frame whose tiles have changed places; the strip that fills no tile stays."""
    height, width = (max(1, side // _TILES) for side in image.shape[:2])
    rows, columns = image.shape[0] // height, image.shape[1] // width
    whole = image[: rows * height, : columns * width]
    tiles = whole.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
    shuffled = tiles[np.random.default_rng(0).permutation(len(tiles))]
    copy: Picture = image.copy()
    copy[: rows * height, : columns * width] = (
        shuffled.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(whole.shape)
    )
    return copy
