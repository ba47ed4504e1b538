"""Objects with masks, key points or angles as Ultralytics' exports put them out, for an input of 64 x 96."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SIZE = (64, 96)
CLASSES = 3
STRIDE = 4
PLACES = 500


@dataclass(frozen=True)
class Object:
    """One object. box: cx cy w h in pixels. extras: what follows its classes."""

    box: tuple[float, float, float, float]
    class_id: int = 0
    score: float = 0.9
    extras: Sequence[float] = field(default_factory=list)

    @property
    def corners(self) -> list[float]:
        cx, cy, w, h = self.box
        return [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]


def outputs(
    decoder: str, objects: Sequence[Object], extras: int, has_centres: bool = False
) -> dict[str, NDArray[np.float32]]:
    """Return the table of a decoder with a batch axis. has_centres: end2end has cx cy w h, as for oriented boxes."""
    if decoder == "end2end":
        rows = np.zeros((300, 6 + extras), np.float32)
        for row, each in zip(rows, objects, strict=False):
            row[:] = [*(each.box if has_centres else each.corners), each.score, each.class_id, *each.extras]
        return {"output0": rows[np.newaxis]}
    first = 5 if decoder == "yolov5" else 4
    rows = np.zeros((PLACES, first + CLASSES + extras), np.float32)
    for number, each in enumerate(objects):
        row = rows[7 * number + 3]
        row[:4] = each.box
        row[4:first] = 1.0
        row[first + each.class_id] = each.score
        row[first + CLASSES :] = each.extras
    return {"output0": (rows if decoder == "yolov5" else rows.T)[np.newaxis]}


def prototypes(masks: Sequence[NDArray[np.bool_]]) -> Mapping[str, NDArray[np.float32]]:
    """Return prototypes of which each is one mask (16, 24); its factor is one-hot."""
    return {"output1": np.where(np.stack(masks), 1.0, -1.0).astype(np.float32)[np.newaxis]}
