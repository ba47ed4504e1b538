"""Boxes with classes: what a detector said, what is true, and which of the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledBoxes:
    """Objects of one image: boxes float32 (n, 4) x1 y1 x2 y2 in pixels, classes int64 (n,)."""

    boxes: FloatArray
    classes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boxes)


@dataclass(frozen=True, eq=False, kw_only=True)
class Detections(LabelledBoxes):
    """What a detector found in one image, with scores float32 (n,)."""

    scores: FloatArray

    def __getitem__(self, selection: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Detections:
        return Detections(boxes=self.boxes[selection], classes=self.classes[selection], scores=self.scores[selection])


def iou_matrix(a: FloatArray, b: FloatArray) -> NDArray[np.float64]:
    """Intersection over union of boxes (n, 4) with boxes (m, 4): (n, m) in [0, 1]; empty boxes have 0."""
    first, second = a.astype(np.float64)[:, np.newaxis], b.astype(np.float64)[np.newaxis]
    sides = np.minimum(first[..., 2:], second[..., 2:]) - np.maximum(first[..., :2], second[..., :2])
    intersection: NDArray[np.float64] = np.maximum(sides, 0.0).prod(axis=-1)
    union = _areas(first) + _areas(second) - intersection
    return np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0.0)


def match(found: Detections, truth: LabelledBoxes, iou_thresholds: Sequence[float]) -> NDArray[np.bool_]:
    """Which detections are true at each IoU threshold (> 0): bool (thresholds, detections).

    Greedy by score, as COCO counts: the surest detection first claims the unclaimed object of its class
    that it overlaps most, if that overlap reaches the threshold.
    """
    thresholds = np.asarray(iou_thresholds, np.float64)
    same_class = found.classes[:, np.newaxis] == truth.classes[np.newaxis]
    overlaps = np.where(same_class, iou_matrix(found.boxes, truth.boxes), 0.0)
    hits = np.zeros((len(thresholds), len(found)), np.bool_)
    claimed = np.zeros((len(thresholds), len(truth)), np.bool_)
    each = np.arange(len(thresholds))
    by_score = np.argsort(-found.scores, kind="stable")
    for index in by_score[overlaps[by_score].max(axis=1, initial=0.0) >= thresholds.min()]:
        open_overlaps = np.where(claimed, 0.0, overlaps[index])
        best = open_overlaps.argmax(axis=1)
        hits[:, index] = open_overlaps[each, best] >= thresholds
        claimed[each, best] |= hits[:, index]
    return hits


def _areas(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = np.maximum(boxes[..., 2:] - boxes[..., :2], 0.0).prod(axis=-1)
    return areas
