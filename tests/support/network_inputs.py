"""Network inputs of one size, as tests want them."""

from __future__ import annotations

from agent.vision.preprocess import NetworkInput
from engines.preprocessing import Layout, PixelType


def of_size(
    height: int, width: int, channels: int = 3, layout: Layout = "NCHW", dtype: PixelType = "float32"
) -> NetworkInput:
    size = (height, width)
    return NetworkInput(channels, size, size, size, layout, dtype)
