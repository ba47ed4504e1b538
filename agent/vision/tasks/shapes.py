"""Judge objects that have more than a box, a mask or key points or four corners, by panoptic quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import DatasetError
from agent.vision.boxes import FloatArray, LabelledBoxes
from agent.vision.detections import Detections, matched_overlaps

if TYPE_CHECKING:
    from agent.vision.datasets.labelled_images import LabelledObjects

_PAIRS = 1024  # at a time; a mask of 160 x 160 takes 3 KB


class Shapes(Detections):
    """Detections of which each has a shape; `overlaps` compares the shapes."""

    def fidelity(self, reference: LabelledBoxes) -> float:
        """Return panoptic quality (Kirillov et al. 2019), here over all classes together; 1 when both are empty.

        It is the sum of the matches' overlaps over half of the sum of both counts. F1 alone would hide harm: every
        match of more than a half would count as a whole one.
        """
        count = len(self) + len(reference)
        return float(2.0 * matched_overlaps(self, reference).sum() / count) if count else 1.0


def shape_ious(
    boxes: FloatArray,
    others: FloatArray,
    intersections: Callable[[NDArray[np.intp], NDArray[np.intp]], NDArray[np.float64]],
    areas: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Return the IoU of every shape of one set with every shape of another: (n, m), in [0, 1].

    Args:
        boxes: (n, 4), x1 y1 x2 y2 around each shape.
        others: (m, 4), likewise.
        intersections: Returns the area that is common to shapes of these indices, (pairs,).
        areas: (n,) and (m,), of the shapes.
    """
    ious = np.zeros((len(boxes), len(others)))
    starts = np.maximum(boxes[:, np.newaxis, :2], others[np.newaxis, :, :2])
    ends = np.minimum(boxes[:, np.newaxis, 2:], others[np.newaxis, :, 2:])
    rows, columns = (ends > starts).all(axis=2).nonzero()
    for first in range(0, len(rows), _PAIRS):
        some, other = rows[first : first + _PAIRS], columns[first : first + _PAIRS]
        common = intersections(some, other)
        union = areas[0][some] + areas[1][other] - common
        ious[some, other] = np.divide(common, union, out=np.zeros_like(common), where=union > 0.0)
    return np.minimum(ious, 1.0)  # areas are rounded


def outlines_of(truth: LabelledObjects) -> Sequence[Any]:
    """Return the outline of every object, in COCO's terms. Raises DatasetError (`dataset.label`) where one has none."""
    if len(truth.outlines) != len(truth) or None in truth.outlines:
        found, remedy = "a labelled object without an outline", "label outlines, or evaluate the boxes by task detect"
        raise DatasetError("dataset.label", found, "the outline of every object", remedy)
    return truth.outlines
