"""Non-maximum suppression, class by class or of all classes together, on OpenCV's batched kernel."""

from __future__ import annotations

import cv2
import numpy as np

from agent.detections import Detections


def keep_best(candidates: Detections, count: int) -> Detections:
    """The `count` candidates of the highest scores, best first."""
    return candidates[np.argsort(-candidates.scores, kind="stable")[:count]]


def suppress_overlaps(
    candidates: Detections, iou_threshold: float, max_candidates: int, is_agnostic: bool = False
) -> Detections:
    """The candidates that no better one overlaps by more than `iou_threshold`, best first.

    A better one of their class; of any class where `is_agnostic`. A box without area overlaps none. Only the
    `max_candidates` best are considered: the kernel is quadratic, and a collapsed engine that calls everything an
    object must not hold up the video. Boxes must be finite.
    """
    ranked = keep_best(candidates, max_candidates)
    corners = ranked.boxes.astype(np.float64)
    has_area = (corners[:, 2:] > corners[:, :2]).all(axis=1)  # OpenCV takes all without for one and the same
    solid = np.flatnonzero(has_area)
    if len(solid) < 2:
        return ranked
    corners = corners[solid]
    # OpenCV keeps classes apart by shifting each along the diagonal, far enough only from zero upwards.
    corners -= corners.min()
    classes = np.zeros(len(solid), np.int32) if is_agnostic else ranked.classes[solid].astype(np.int32)
    rectangles = np.hstack((corners[:, :2], corners[:, 2:] - corners[:, :2]))
    kept = cv2.dnn.NMSBoxesBatched(
        rectangles,  # type: ignore[arg-type]  # the stub knows lists only; arrays pass without a copy per box
        ranked.scores[solid],  # type: ignore[arg-type]  # likewise
        classes,  # type: ignore[arg-type]  # likewise
        -1.0,  # scores were filtered before; OpenCV would drop scores equal to its threshold
        iou_threshold,
    )
    flat = np.flatnonzero(~has_area)
    return ranked[np.sort(np.concatenate((flat, solid[np.asarray(kept, np.intp)])))]
