"""Hold boxes with classes, and measure how far boxes overlap.

Boxes are float32 (n, 4) x1 y1 x2 y2 everywhere, in pixels of the network input or of the frame.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # in `typing` since Python 3.11
    from typing_extensions import Self

FloatArray = NDArray[np.float32]
COVERED = 0.53  # the share of its box that a person covers (Ultralytics, PoseValidator)
Size = tuple[int, int]  # (height, width) in pixels, mostly of the network input
Part = tuple[slice, slice]  # rows and columns of a network input


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledBoxes:
    """Hold the objects of one image.

    Args:
        boxes: float32 (n, 4), x1 y1 x2 y2 in pixels.
        classes: int64 (n,), numbers of classes from 0.

    A mask, indices or a slice selects objects.
    """

    boxes: FloatArray
    classes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, selection: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Self:
        arrays = {name: each[selection] for name, each in vars(self).items() if isinstance(each, np.ndarray)}
        return replace(self, **arrays)


NO_BOXES = LabelledBoxes(boxes=np.zeros((0, 4), np.float32), classes=np.zeros(0, np.int64))


def iou_matrix(a: FloatArray, b: FloatArray) -> NDArray[np.float64]:
    """Return the intersection over union of every box of one set with every box of another.

    Args:
        a: (n, 4), x1 y1 x2 y2.
        b: (m, 4), in the same unit.

    Returns:
        float64 (n, m), in [0, 1]; empty boxes have 0.

    >>> iou_matrix(np.float32([[0, 0, 10, 10]]), np.float32([[0, 0, 10, 5], [20, 20, 30, 30]])).tolist()
    [[0.5, 0.0]]
    """
    first, second = a.astype(np.float64)[:, np.newaxis], b.astype(np.float64)[np.newaxis]
    sides = np.minimum(first[..., 2:], second[..., 2:]) - np.maximum(first[..., :2], second[..., :2])
    intersection: NDArray[np.float64] = np.maximum(sides, 0.0).prod(axis=-1)
    union = _areas(first) + _areas(second) - intersection
    return np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0.0)


def _areas(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = np.maximum(boxes[..., 2:] - boxes[..., :2], 0.0).prod(axis=-1)
    return areas
