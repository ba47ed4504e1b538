"""Judge objects that have more than a box, a mask or key points or four corners, by panoptic quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import DatasetError
from agent.vision.boxes import FloatArray, LabelledBoxes, iou_matrix
from agent.vision.detections import MATCH_IOU, Detections, matched_overlaps

if TYPE_CHECKING:
    from agent.vision.datasets.labelled_images import LabelledObjects

# The loss that tasks of objects with shapes accept. Masks of the sample's head are a point of AP down at 0.18, its
# oriented boxes at 0.16, and PP-OCR's at 0.21. Boxes of YOLOX-Nano are at 0.20, and FastestDet's at 0.21, compared by
# panoptic quality: benchmarks.harm --by-overlap.
OVERLAP_LOSS = 0.15
_SHOWN = 80  # characters
_FAR_PX = 1e9
_PAIRS = 1024  # at a time; a mask of 160 x 160 takes 3 KB
_MOST_PAIRS = 128**2  # are compared of two answers: a thousand objects have a million


class Shapes(Detections):
    """Detections of which each has a shape; `overlaps` compares the shapes."""

    def fidelity(self, reference: Detections) -> float:
        return panoptic_quality(self, reference)

    def accuracy(self, truth: LabelledBoxes) -> float | None:
        """Return panoptic quality to the label's objects, of which the shapes alone are compared."""
        count = len(self) + len(truth)
        return float(2.0 * matched_overlaps(self, truth).sum() / count) if count else None


def panoptic_quality(served: Detections, reference: Detections) -> float:
    """Return panoptic quality (Kirillov et al. 2019), here over all classes together; 1 when both are empty.

    It is the sum of what the matches count over half of the sum of both counts. F1 would hide harm: every match at IoU
    0.5 would count as a whole one. Here a match counts as far as the shapes overlap, or the boxes if that is less, and
    as far as the scores are the same. The best matches are made first, so that neither answer's order matters.
    """
    count = len(served) + len(reference)
    if not count:
        return 1.0
    same_class = served.classes[:, np.newaxis] == reference.classes
    overlaps = np.where(same_class, served.overlaps(reference, same_class), 0.0)
    apart = np.abs(served.scores[:, np.newaxis].astype(np.float64) - reference.scores)
    credits = np.minimum(overlaps, _box_ious(served, reference)) * (1.0 - np.minimum(apart, 1.0))
    rows, columns = (overlaps >= MATCH_IOU).nonzero()
    best_first = np.argsort(-credits[rows, columns], kind="stable").tolist()
    total, ours, theirs = 0.0, set[int](), set[int]()
    for row, column in zip(rows[best_first].tolist(), columns[best_first].tolist(), strict=True):
        if row not in ours and column not in theirs:
            ours.add(row)
            theirs.add(column)
            total += float(credits[row, column])
    return 2.0 * total / count


def _box_ious(first: Detections, second: Detections) -> NDArray[np.float64]:
    """Return the IoU of the boxes, (n, m), in which equal boxes without an area have 1."""
    ious = iou_matrix(first.boxes, second.boxes).astype(np.float64)
    ious[(first.boxes[:, np.newaxis] == second.boxes).all(axis=2)] = 1.0
    return ious


def comparable(
    boxes: FloatArray, others: FloatArray, wanted: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_] | None:
    """Return which pairs of shapes are compared, bool (n, m): those that are wanted; None: all.

    Of two crowds, of more than 128 objects each, it is for each shape those whose boxes overlap its own most.
    """
    if len(boxes) * len(others) <= _MOST_PAIRS:
        return wanted
    ious = iou_matrix(boxes, others)
    if wanted is not None:
        ious[~wanted] = 0.0
    compared = ious > 0.0
    most = max(1, _MOST_PAIRS // len(boxes))
    if np.count_nonzero(compared) > _MOST_PAIRS and most < len(others):
        nearest = np.zeros_like(compared)
        np.put_along_axis(nearest, np.argpartition(-ious, most, axis=1)[:, :most], values=True, axis=1)
        compared &= nearest
    return compared


def shape_ious(
    boxes: FloatArray,
    others: FloatArray,
    intersections: Callable[[NDArray[np.intp], NDArray[np.intp]], NDArray[np.float64]],
    areas: tuple[NDArray[np.float64], NDArray[np.float64]],
    wanted: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Return the IoU of every shape of one set with every shape of another: (n, m), in [0, 1].

    Args:
        boxes: (n, 4), x1 y1 x2 y2 around each shape.
        others: (m, 4), likewise.
        intersections: Returns the area that is common to shapes of these indices, (pairs,).
        areas: (n,) and (m,), of the shapes.
        wanted: (n, m), the pairs that are asked for; None: all.
    """
    ious = np.zeros((len(boxes), len(others)))
    starts = np.maximum(boxes[:, np.newaxis, :2], others[np.newaxis, :, :2])
    ends = np.minimum(boxes[:, np.newaxis, 2:], others[np.newaxis, :, 2:])
    may_overlap = (ends > starts).all(axis=2)
    rows, columns = (may_overlap if wanted is None else may_overlap & wanted).nonzero()
    for first in range(0, len(rows), _PAIRS):
        some, other = rows[first : first + _PAIRS], columns[first : first + _PAIRS]
        own, their = areas[0][some], areas[1][other]
        common = np.minimum(intersections(some, other), np.minimum(own, their))  # a thin shape's is rounding alone
        union = own + their - common
        ious[some, other] = np.divide(common, union, out=np.zeros_like(common), where=union > 0.0)
    return np.minimum(ious, 1.0)  # areas are rounded


def outlines_of(truth: LabelledObjects) -> Sequence[Any]:
    """Return the outline of every object, as pycocotools takes it. Raises DatasetError (`dataset.label`)."""
    from agent.vision.datasets.outlines import checked_outline

    try:
        return [checked_outline(each, *truth.size) for each in truth.outlines]
    except ValueError as error:
        found = "a labelled object without an outline, or with one that is none"
        remedy = "correct the label, or evaluate the boxes by task detect"
        raise DatasetError("dataset.label", found, str(error), remedy) from None


def points_of(truth: LabelledObjects, count: int) -> FloatArray:
    """Return the key points of every object, (n, count, 3); an object without any has none labelled.

    Raises DatasetError (`dataset.label`) for another number of them, or what is no number.
    """
    points = np.zeros((len(truth), count, 3), np.float32)
    for row, given in zip(points, truth.keypoints, strict=True):
        if not given:
            continue
        if not _are_numbers(given) or len(given) != 3 * count:
            found = f"key points {str(given)[:_SHOWN]}"
            raise DatasetError("dataset.label", found, f"{count} times x, y, v, as the model has", "correct the label")
        row[:] = np.array(given, np.float32).reshape(count, 3)
    return points


def _are_numbers(values: Any) -> bool:
    """Return whether this is a list of numbers of a sane size; NaN is not at most anything."""
    if not isinstance(values, list):
        return False
    return all(isinstance(each, int | float) and abs(each) <= _FAR_PX for each in values)
