"""Frames, and network inputs of one size, as tests want them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent.vision.preprocess import NetworkInput
from engines.preprocessing import Layout, PixelType


def of_size(
    height: int, width: int, channels: int = 3, layout: Layout = "NCHW", dtype: PixelType = "float32"
) -> NetworkInput:
    size = (height, width)
    return NetworkInput(channels, size, size, size, layout, dtype)


def noise(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
