"""Read one object of a YOLO label file: a box, an outline, four corners or key points, behind the class.

These are Ultralytics' formats for its tasks detect, segment, obb and pose. All are fractions of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.vision.boxes import COVERED

_FARTHEST = 10.0  # in sides of the picture; of a visibility too
_SLACK = 0.01  # beyond the picture, as Ultralytics grants outlines


class ObjectRow(NamedTuple):
    """One object.

    Args:
        box: x1 y1 x2 y2, float64 (4,).
        places: x y and visibility, float64 (k, 3); none of a plain box.
        area: what is inside.
    """

    box: NDArray[np.float64]
    places: NDArray[np.float64]
    area: float


@dataclass(frozen=True)
class RowForm:
    """What follows the class in a line.

    Args:
        words: The values' names.
        meaning: What they are.
        read: Returns the object; None for other values.
    """

    words: str
    meaning: str
    read: Callable[[Sequence[float]], ObjectRow | None]


def _box(values: Sequence[float]) -> ObjectRow | None:
    if len(values) != 4 or not all(0.0 <= value <= 1.0 for value in values):
        return None
    centre, side = np.array(values[:2]), np.array(values[2:])
    return ObjectRow(np.hstack((centre - side / 2, centre + side / 2)), np.empty((0, 3)), float(side.prod()))


def _outline(values: Sequence[float]) -> ObjectRow | None:
    if len(values) < 6 or len(values) % 2 or not all(-_SLACK <= value <= 1.0 + _SLACK for value in values):
        return None
    places = np.array(values).reshape(-1, 2)
    (x, y), (next_x, next_y) = places.T, np.roll(places, -1, axis=0).T
    area = abs(float((x * next_y - next_x * y).sum())) / 2.0
    return ObjectRow(np.hstack((places.min(axis=0), places.max(axis=0))), np.insert(places, 2, 1.0, axis=1), area)


def _corners(values: Sequence[float]) -> ObjectRow | None:
    return _outline(values) if len(values) == 8 else None


BOX_ROW = RowForm("cx cy w h", "four fractions of the image", _box)
OUTLINE_ROW = RowForm("x1 y1 x2 y2 x3 y3 ...", "three or more points as fractions of the image", _outline)
CORNER_ROW = RowForm("x1 y1 x2 y2 x3 y3 x4 y4", "four corners as fractions of the image", _corners)


def point_row(count: int) -> RowForm:
    """Return the form of a box with so many key points, x y or x y visibility."""

    def read(values: Sequence[float]) -> ObjectRow | None:
        found, rest = _box(values[:4]), values[4:]
        if found is None or len(rest) not in (2 * count, 3 * count):
            return None
        points = np.array(rest).reshape(count, -1)
        if points.shape[1] == 2:  # one that is not labelled lies outside, as Ultralytics reads it
            points = np.insert(points, 2, (points >= 0.0).all(axis=1), axis=1)
        is_sane = (np.abs(points) <= _FARTHEST).all()
        return found._replace(places=points, area=found.area * COVERED) if is_sane else None

    return RowForm(f"cx cy w h and {count} times x y, or x y v", "fractions of the image, and a visibility", read)
