"""Hold boxes with classes, match detections to the truth, and suppress detections that overlap better ones.

Every decoder returns `Detections`, those of users too. Boxes are float32 (n, 4) x1 y1 x2 y2 everywhere, in pixels of
the network input until `agent.vision.decode` moves them to the frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
Size = tuple[int, int]  # (height, width) in pixels, mostly of the network input


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledBoxes:
    """Hold the objects of one image.

    Args:
        boxes: float32 (n, 4), x1 y1 x2 y2 in pixels.
        classes: int64 (n,), numbers of classes from 0.
    """

    boxes: FloatArray
    classes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boxes)


NO_BOXES = LabelledBoxes(boxes=np.zeros((0, 4), np.float32), classes=np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False, kw_only=True)
class Detections(LabelledBoxes):
    """Hold the detections of one image.

    Args:
        scores: float32 (n,), in [0, 1].
        boxes: float32 (n, 4), x1 y1 x2 y2 in pixels.
        classes: int64 (n,), numbers of classes from 0.

    A mask, indices or a slice selects detections.

    >>> boxes = np.float32([[0, 0, 10, 10], [5, 5, 9, 9]])
    >>> found = Detections(boxes=boxes, classes=np.array([0, 2]), scores=np.float32([0.9, 0.4]))
    >>> len(found), found[found.scores > 0.5].classes.tolist()
    (2, [0])
    """

    scores: FloatArray

    def __getitem__(self, selection: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Detections:
        return Detections(boxes=self.boxes[selection], classes=self.classes[selection], scores=self.scores[selection])


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


def match(detections: Detections, truth: LabelledBoxes, iou_threshold: float) -> NDArray[np.bool_]:
    """Mark the detections that are true: bool (detections,).

    Matching is greedy by score, as COCO counts: the surest detection first claims the unclaimed object of its class
    that it overlaps most, if that overlap reaches the threshold.

    Args:
        detections: Of one image.
        truth: The objects of the same image.
        iou_threshold: Least intersection over union, above 0.

    >>> box = np.float32([[0, 0, 10, 10]])
    >>> found = Detections(boxes=np.repeat(box, 2, axis=0), classes=np.zeros(2, int), scores=np.float32([0.5, 0.9]))
    >>> match(found, LabelledBoxes(boxes=box, classes=np.zeros(1, int)), 0.5).tolist()     # one object, claimed once
    [False, True]
    """
    same_class = detections.classes[:, np.newaxis] == truth.classes[np.newaxis]
    overlaps = np.where(same_class, iou_matrix(detections.boxes, truth.boxes), 0.0)
    hits = np.zeros(len(detections), np.bool_)
    claimed = np.zeros(len(truth), np.bool_)
    by_score = np.argsort(-detections.scores, kind="stable")
    for index in by_score[overlaps[by_score].max(axis=1, initial=0.0) >= iou_threshold]:
        open_overlaps = np.where(claimed, 0.0, overlaps[index])
        best = open_overlaps.argmax()
        if open_overlaps[best] >= iou_threshold:
            hits[index] = claimed[best] = True
    return hits


def keep_best(candidates: Detections, count: int) -> Detections:
    """Return the `count` candidates of the highest scores, best first; equal scores in their order."""
    return candidates[(-candidates.scores).argsort(kind="stable")[:count]]


def suppress_overlaps(
    candidates: Detections, iou_threshold: float, max_candidates: int, is_agnostic: bool = False
) -> Detections:
    """Return the candidates that no better one overlaps by more than `iou_threshold`, best first.

    A box without area overlaps none.

    Args:
        candidates: Of one image; the boxes must be finite.
        iou_threshold: Intersection over union up to which both stay, in [0, 1].
        max_candidates: Only so many of the best are considered: the kernel is quadratic, and a collapsed engine that
            calls everything an object must not hold up the video.
        is_agnostic: True if a better candidate of any class suppresses another one; False: only one of its class.
    """
    if len(candidates) < 2:
        return candidates
    if len(candidates) > max_candidates:
        candidates = keep_best(candidates, max_candidates)
    boxes, scores = candidates.boxes.astype(np.float64), candidates.scores
    classes = np.zeros(len(boxes), np.int32) if is_agnostic else candidates.classes.astype(np.int32)
    boxes[:, 2:] -= boxes[:, :2]  # from here on x y width height
    if boxes[:, 2:].min() > 0.0:
        return candidates[_kept(boxes, scores, classes, iou_threshold)]
    has_area = (boxes[:, 2:] > 0.0).all(axis=1)  # to OpenCV all boxes without area are one and the same
    solid, flat = has_area.nonzero()[0], (~has_area).nonzero()[0]
    kept = _kept(boxes[solid], scores[solid], classes[solid], iou_threshold) if len(solid) else solid
    return keep_best(candidates[np.sort(np.concatenate((flat, solid[kept])))], max_candidates)


def _kept(
    rectangles: NDArray[np.float64], scores: FloatArray, classes: NDArray[np.int32], iou_threshold: float
) -> NDArray[np.intp]:
    """Return the indices of the candidates to keep, best first, equal scores in their order. Moves the rectangles."""
    # OpenCV keeps classes apart by shifting each along the diagonal, far enough only from zero upwards.
    rectangles[:, :2] -= rectangles[:, :2].min()
    kept = cv2.dnn.NMSBoxesBatched(
        rectangles,  # type: ignore[arg-type]  # the stub knows lists only; arrays pass without a copy per box
        scores,  # type: ignore[arg-type]  # likewise
        classes,  # type: ignore[arg-type]  # likewise
        -1.0,  # scores were filtered before; OpenCV would drop scores equal to its threshold
        iou_threshold,
    )
    return np.asarray(kept, np.intp)
