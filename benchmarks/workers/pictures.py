"""The benchmark's images as network inputs, one at a time, for the contenders that bring no camera of their own."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np


class PictureReader:
    """A CalibrationDataReader, as ONNX Runtime and ModelOpt take it: `get_next` until None."""

    def __init__(self, folder: str) -> None:
        self._paths = sorted(Path(folder).iterdir())
        self._taken = 0

    def get_next(self) -> dict[str, np.ndarray] | None:
        if self._taken == len(self._paths):
            return None
        self._taken += 1
        return self._read(self._taken - 1)

    def get_first(self) -> dict[str, np.ndarray]:
        """The first input, without taking it: ModelOpt looks at shapes with it."""
        return self._read(0)

    def _read(self, number: int) -> dict[str, np.ndarray]:
        image = cv2.imread(str(self._paths[number]))
        assert image is not None, f"no picture: {self._paths[number]}"
        planes = image[:, :, ::-1].transpose(2, 0, 1)
        tensor = np.multiply(planes, np.float32(2.0 / 255.0), dtype=np.float32) - np.float32(1.0)
        return {"input": tensor[np.newaxis]}
