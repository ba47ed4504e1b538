"""Read labelled images of semantic segmentation: photos, and PNG masks whose grey levels are numbers of classes.

The mask of `images/a.jpg` is `masks/a.png`, `labels/a.png` or `annotations/a.png`; that of `a.jpg` may lie in a folder
of such a name beside it. A level that is no number of a class, such as 255, is not counted. Only of a model of one
class other levels than 255 are pixels that do not show it: without them nobody could see what it invents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from agent.camera.images import ImageFiles
from agent.common.errors import DatasetError
from agent.vision.datasets.labelled_images import Image

_FOLDERS = ("masks", "labels", "annotations")
NOT_COUNTED, NO_CLASS = -1, -2


class MaskImages:
    """Images with masks. Iteration reads lazily and yields (image BGR uint8 (h, w, 3), classes int16 (h, w)).

    A pixel that is not counted has NOT_COUNTED for a class, and one that shows none has NO_CLASS. Images without a mask
    do not count.

    Args:
        labels: Of the model; without them every level counts but 255.
        only: The classes that count, by name; empty: all.

    Raises DatasetError as ImageFiles, `dataset.label` where no image has a mask, and for a mask in colours, or of
    another size than its image; and `dataset.classes` for a class in `only` that the model lacks.
    """

    def __init__(self, path: Path, labels: Sequence[str] = (), only: Sequence[str] = ()) -> None:
        self._files = ImageFiles(path)
        unknown = [each for each in only if each not in labels]
        if unknown:
            found = f"class '{unknown[0]}' in --classes, which the model spec lacks"
            raise DatasetError(
                "dataset.classes", found, "classes of the model spec", "correct --classes, or its labels"
            )
        counted = [not only or name in only for name in labels] if labels else [True] * 255
        self._classes = np.full(256, NOT_COUNTED, np.int16)
        if len(labels) == 1:
            self._classes[:255] = NO_CLASS
        for number, is_counted in enumerate(counted[:256]):
            self._classes[number] = number if is_counted else NOT_COUNTED
        present = frozenset(self._files.names)
        masks = {
            name: next((each for each in _mask_names(name) if each in present), None) for name in self._files.names
        }
        self._masks = {name: mask for name, mask in masks.items() if mask is not None}
        if not self._masks:
            raise DatasetError(
                "dataset.label",
                f"no mask for any of {len(self._files)} images in {path}",
                "images/a.jpg and masks/a.png, whose levels are numbers of classes",
                "add the masks",
            )

    def __len__(self) -> int:
        return len(self._masks)

    def __iter__(self) -> Iterator[tuple[Image, NDArray[np.int16]]]:
        for name, mask in self._masks.items():
            image, levels = self._files.read(name), self._files.read(mask)
            if levels.shape != image.shape or np.ptp(levels, axis=2).any():
                raise DatasetError(
                    "dataset.label",
                    f"mask {mask} in {self._files.path}, of {levels.shape[1]} x {levels.shape[0]} pixels"
                    f"{', in colours' if np.ptp(levels, axis=2).any() else ''}",
                    f"grey levels, and {image.shape[1]} x {image.shape[0]} pixels as {name} has",
                    "write each class's number as a grey level",
                )
            yield image, self._classes[levels[:, :, 0]]


def _mask_names(name: str) -> Iterator[str]:
    """Yield the names that the mask of an image may have."""
    image = PurePosixPath(name)
    for folder in _FOLDERS:
        for depth in range(len(image.parent.parts)):
            if image.parts[depth] == "images":
                yield (
                    PurePosixPath(*image.parts[:depth], folder, *image.parts[depth + 1 :])
                    .with_suffix(".png")
                    .as_posix()
                )
        yield (image.parent / folder / image.name).with_suffix(".png").as_posix()
