"""Non-maximum suppression, class by class, on OpenCV's batched kernel."""

from __future__ import annotations

import cv2
import numpy as np

from agent.detections import Detections


def suppress_overlaps(candidates: Detections, iou_threshold: float, max_candidates: int) -> Detections:
    """The candidates that no better one of their class overlaps by more than `iou_threshold`, best first.

    Only the `max_candidates` best are considered: the kernel is quadratic, and a collapsed engine that
    calls everything an object must not hold up the video. Boxes must be finite.
    """
    best = np.argsort(-candidates.scores, kind="stable")[:max_candidates]
    ranked = candidates[best]
    if len(ranked) < 2:
        return ranked
    corners = ranked.boxes.astype(np.float64)
    # OpenCV keeps classes apart by shifting each along the diagonal, far enough only from zero upwards.
    corners -= corners.min()
    rectangles = np.hstack((corners[:, :2], corners[:, 2:] - corners[:, :2]))
    kept = cv2.dnn.NMSBoxesBatched(
        rectangles,  # type: ignore[arg-type]  # the stub knows lists only; arrays pass without a copy per box
        ranked.scores,  # type: ignore[arg-type]  # likewise
        ranked.classes.astype(np.int32),  # type: ignore[arg-type]  # likewise
        -1.0,  # scores were filtered before; OpenCV would drop scores equal to its threshold
        iou_threshold,
    )
    return ranked[np.asarray(kept, np.intp)]
