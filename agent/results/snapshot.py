"""Make a picture for people of a frame: draw the answer into it, and encode it as a JPEG."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.common.errors import AgentError
from agent.vision.drawing import jpeg
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame

_QUALITY = 85


def annotate(served: ServedFrame, spec: ModelSpec) -> NDArray[np.uint8]:
    """Return a copy of the frame, BGR uint8 (H, W, 3), with its answer drawn into it."""
    return served.result.drawn_into(served.frame.image, served.geometry, spec)


def encode_jpeg(image: NDArray[np.uint8], most_bytes: int) -> tuple[bytes, tuple[int, int]]:
    """Return a JPEG of at most `most_bytes` of a BGR uint8 (H, W, 3) or grey (H, W) image, and its height and width.

    The picture is halved, and halved again, until its JPEG is small enough. Raises AgentError (`images.encode`) where
    even one pixel is not.
    """
    while True:
        encoded = jpeg(image, _QUALITY)
        height, width = image.shape[:2]
        if len(encoded) <= most_bytes:
            return encoded, (height, width)
        if min(height, width) < 2:
            found = f"{len(encoded)} bytes for one pixel"
            raise AgentError("images.encode", found, f"at most {most_bytes}", "report the error")
        image = np.asarray(cv2.resize(image, (width // 2, height // 2), interpolation=cv2.INTER_AREA), np.uint8)
