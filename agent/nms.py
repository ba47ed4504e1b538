"""Non-maximum suppression, class by class or of all classes together, on OpenCV's batched kernel."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.detections import Detections, FloatArray


def keep_best(candidates: Detections, count: int) -> Detections:
    """The `count` candidates of the highest scores, best first."""
    return candidates[(-candidates.scores).argsort(kind="stable")[:count]]


def suppress_overlaps(
    candidates: Detections, iou_threshold: float, max_candidates: int, is_agnostic: bool = False
) -> Detections:
    """The candidates that no better one overlaps by more than `iou_threshold`, best first.

    A better one of their class; of any class where `is_agnostic`. A box without area overlaps none. Only the
    `max_candidates` best are considered: the kernel is quadratic, and a collapsed engine that calls everything an
    object must not hold up the video. Boxes must be finite.
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
    has_area = (boxes[:, 2:] > 0.0).all(axis=1)  # OpenCV takes all without for one and the same box
    solid, flat = has_area.nonzero()[0], (~has_area).nonzero()[0]
    kept = _kept(boxes[solid], scores[solid], classes[solid], iou_threshold) if len(solid) else solid
    return keep_best(candidates[np.sort(np.concatenate((flat, solid[kept])))], max_candidates)


def _kept(
    rectangles: NDArray[np.float64], scores: FloatArray, classes: NDArray[np.int32], iou_threshold: float
) -> NDArray[np.intp]:
    """Indices of what is not suppressed, best first, equal scores in their order. Moves the rectangles."""
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
