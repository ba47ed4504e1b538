"""Hold detections, match them to the truth, and suppress those that overlap better ones.

Every decoder of boxes returns `Detections`, those of users too. Boxes are float32 (n, 4) x1 y1 x2 y2 everywhere, in
pixels of the network input until `Detections.in_frame` moves them to the frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.vision.answer import Answer, Hits, MatchCounts, ServedClass, Wanted
from agent.vision.boxes import FloatArray, LabelledBoxes, iou_matrix
from agent.vision.drawing import Picture, draw_box
from agent.vision.policy import Policy
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec

if TYPE_CHECKING:  # in `typing` since Python 3.11
    from typing_extensions import Self

MATCH_IOU = 0.5


@dataclass(frozen=True, eq=False, kw_only=True)
class Detections(LabelledBoxes, Answer):
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

    def overlaps(self, truth: LabelledBoxes, wanted: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Return how far each detection is where each object of the truth is, in [0, 1]: (n, m), the boxes' IoU.

        wanted: bool (n, m), the pairs that are asked for; the others may be 0. None: all.
        """
        del wanted
        return iou_matrix(self.boxes, truth.boxes)

    @property
    def is_empty(self) -> bool:
        return not len(self)

    @property
    def classes_seen(self) -> frozenset[int]:
        return frozenset(self.classes.tolist())

    @property
    def confidence(self) -> float:
        return float(self.scores.max()) if len(self) else math.nan

    def fidelity(self, reference: Detections) -> float:
        """Return F1 of the matches at IoU 0.5; 1 when both are empty."""
        return count_matches(self, reference).f1

    def pairs(self, served: Detections | None) -> list[ServedClass]:
        """Return the served class of each object, paired one to one at IoU 0.5, greedily by score as `match` does.

        Objects are paired first among equal classes, then the rest among all. A detector may give one object two
        classes, and that these change places in the order of scores is no confusion.
        """
        classes: list[int | None] = [None] * len(self)
        if served is not None:
            for index, paired in _paired(served, self):
                classes[paired] = int(served.classes[index])
        return list(zip(self.classes.tolist(), classes, strict=True))

    def accuracy(self, truth: LabelledBoxes) -> float | None:
        """Return F1 of the matches at IoU 0.5."""
        return count_matches(self, truth).f1 if len(self) or len(truth) else None

    def hits(self, truth: LabelledBoxes, wanted: Wanted | None = None) -> Hits:
        found = self
        if wanted is not None:
            found = self[wanted(self.classes, self.boxes)]
            truth = truth[wanted(truth.classes, truth.boxes)]
        return Hits(found.classes, found.scores, match(found, truth, MATCH_IOU), truth.classes)

    def sureness(self, reference: Detections) -> float:
        """Return minus the mistakes to expect for each object that the reference sees.

        They are what its scores lack to 1, and the detections that only one of the two has.
        """
        matches = count_matches(self, reference)
        mistakes = float((1.0 - reference.scores).sum()) + matches.false_positives + matches.false_negatives
        return -mistakes / max(1, len(reference))

    def bounded(self, limit: float) -> Self:
        """Return the detections with scores of at most 1, and with corners in order, each within `limit` of the origin.

        limit: In pixels. In the suppression a finite box far outside would swallow the precision of all others.
        """
        boxes = np.clip(self.boxes, -limit, limit)
        boxes = np.hstack((np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])))
        return replace(self, boxes=boxes, scores=np.minimum(self.scores, 1))

    def in_frame(self, geometry: Geometry | None) -> Detections:
        return replace(self, boxes=geometry.to_frame(self.boxes)) if geometry is not None else self

    def as_dict(self, spec: ModelSpec) -> dict[str, Any]:
        boxes = np.round(self.boxes.astype(float), 2).tolist()
        rows = zip(self.classes.tolist(), self.scores.tolist(), boxes, strict=True)
        return {
            "detections": [
                {"class": number, "label": spec.label(number), "score": round(score, 4), "box": box}
                for number, score, box in rows
            ]
        }

    def summary(self, spec: ModelSpec) -> str:
        """Return the classes with their numbers."""
        classes, counts = np.unique(self.classes, return_counts=True)
        named = (f"{count} {spec.label(int(each))}" for each, count in zip(classes, counts, strict=True))
        return ", ".join(named) or "nothing"

    def draw(self, picture: Picture, spec: ModelSpec) -> None:
        rows = zip(self.boxes, self.classes.tolist(), self.scores.tolist(), strict=True)
        for box, class_id, score in rows:
            draw_box(picture, box, f"{spec.label(class_id)} {score:.2f}", class_id)

    def shown(self, policy: Policy, camera: str, geometry: Geometry | None) -> Detections:
        boxes, size = self.boxes, (1, 1)
        if geometry is not None:
            boxes, size = geometry.to_frame(boxes), (geometry.frame_height_px, geometry.frame_width_px)
        elif policy.masks.get(camera):
            raise ValueError("masks need the size of the frame, which a geometry has")
        return self[policy.is_passed(self.scores) & policy.is_wanted(self.classes, boxes, camera, size)]

    def left_out(self, shown: Detections) -> int:
        return len(self) - len(shown)


DetectionsT = TypeVar("DetectionsT", bound=Detections)


def count_matches(detections: Detections, truth: LabelledBoxes) -> MatchCounts:
    """Count the detections that match labels, or a reference engine's detections, at IoU 0.5.

    Both are in pixels of the same image. Matches are class-aware, one to one, greedy by score (see `match`).
    """
    hits = int(match(detections, truth, MATCH_IOU).sum())
    return MatchCounts(hits, len(detections) - hits, len(truth) - hits)


def _paired(served: Detections, reference: Detections) -> list[tuple[int, int]]:
    """Return the (served, reference) indices of the same objects."""
    overlaps = served.overlaps(reference)
    overlaps[overlaps < MATCH_IOU] = 0.0
    same_class = served.classes[:, np.newaxis] == reference.classes[np.newaxis]
    pairs = []
    for allowed in (same_class, ~same_class):
        for index in np.argsort(-served.scores, kind="stable"):
            open_overlaps = np.where(allowed[index], overlaps[index], 0.0)
            if open_overlaps.any():
                best = int(open_overlaps.argmax())
                pairs.append((int(index), best))
                overlaps[index], overlaps[:, best] = 0.0, 0.0
    return pairs


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
    return matched_overlaps(detections, truth, iou_threshold) > 0.0


def matched_overlaps(
    detections: Detections, truth: LabelledBoxes, iou_threshold: float = MATCH_IOU
) -> NDArray[np.float64]:
    """Return the overlap of each detection with the object that it claims by `match`: (detections,); 0 without one."""
    same_class = detections.classes[:, np.newaxis] == truth.classes[np.newaxis]
    overlaps = np.where(same_class, detections.overlaps(truth, same_class), 0.0)
    matched = np.zeros(len(detections))
    claimed = np.zeros(len(truth), np.bool_)
    by_score = np.argsort(-detections.scores, kind="stable")
    for index in by_score[overlaps[by_score].max(axis=1, initial=0.0) >= iou_threshold]:
        open_overlaps = np.where(claimed, 0.0, overlaps[index])
        best = open_overlaps.argmax()
        if open_overlaps[best] >= iou_threshold:
            matched[index], claimed[best] = open_overlaps[best], True
    return matched


def keep_best(candidates: DetectionsT, count: int) -> DetectionsT:
    """Return the `count` candidates of the highest scores, best first; equal scores in their order."""
    return candidates[(-candidates.scores).argsort(kind="stable")[:count]]


def suppress_overlaps(
    candidates: DetectionsT, iou_threshold: float, max_candidates: int, is_agnostic: bool = False
) -> DetectionsT:
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
