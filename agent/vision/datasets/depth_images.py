"""Read labelled images of depth: photos, and 16-bit PNGs of distances in millimetres.

The distances of `images/a.jpg` are in `depth/a.png`, those of `a.jpg` in `depth/a.png` beside it. Level 0 is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import cv2
import numpy as np

from agent.camera.images import ImageFiles
from agent.common.errors import DatasetError
from agent.vision.boxes import FloatArray
from agent.vision.datasets.labelled_images import Image

_FOLDER = "depth"
_LEVELS_PER_METRE = 1000.0


class DepthImages:
    """Images with distances. Iteration reads lazily and yields (image BGR uint8 (h, w, 3), metres float32 (h, w)).

    A pixel without a distance is NaN. Images without a picture of distances do not count.

    Raises DatasetError as ImageFiles, `dataset.label` where no image has distances, and for a picture of them that is
    not 16 bits deep or of another size than its image; `dataset.classes`, since depth has no classes.
    """

    def __init__(self, path: Path, only: Sequence[str] = ()) -> None:
        if only:
            found = f"--classes {','.join(only)} for task depth"
            raise DatasetError("dataset.classes", found, "no classes: depth has none", "leave --classes out")
        self._files = ImageFiles(path)
        present = frozenset(self._files.names)
        self._depths = {name: depth for name in self._files.names if (depth := _depth_name(name)) in present - {name}}
        if not self._depths:
            raise DatasetError(
                "dataset.label",
                f"no distances for any of {len(self._files)} images in {path}",
                "images/a.jpg and depth/a.png, 16 bits of millimetres",
                "add them",
            )

    def __len__(self) -> int:
        return len(self._depths)

    def __iter__(self) -> Iterator[tuple[Image, FloatArray]]:
        for name, depth in self._depths.items():
            image = self._files.read(name)
            levels = cv2.imdecode(np.frombuffer(self._files.read_bytes(depth), np.uint8), cv2.IMREAD_UNCHANGED)
            if levels is None or levels.dtype != np.uint16 or levels.shape != image.shape[:2]:
                raise DatasetError(
                    "dataset.label",
                    f"{depth} in {self._files.path}, no picture of distances for {name}",
                    f"one channel of 16 bits, {image.shape[1]} x {image.shape[0]} pixels",
                    "write millimetres as a 16-bit PNG",
                )
            metres = levels.astype(np.float32) / np.float32(_LEVELS_PER_METRE)
            metres[levels == 0] = np.nan
            yield image, metres


def _depth_name(name: str) -> str:
    image = PurePosixPath(name)
    folders = [_FOLDER if part == "images" else part for part in image.parts[:-1]]
    if "images" not in image.parts[:-1]:
        folders.append(_FOLDER)
    return PurePosixPath(*folders, image.name).with_suffix(".png").as_posix()
