"""Pair the objects of two predictions of one frame: what is served for each object that the reference sees."""

from __future__ import annotations

import numpy as np

from agent.vision.decode import Classification, Prediction
from agent.vision.detections import Detections, iou_matrix
from agent.vision.fidelity import MATCH_IOU

# The reference's class of an object, and the served class; None where the object was not detected.
Answer = tuple[int, int | None]


def answers(served: Prediction | None, reference: Prediction) -> list[Answer]:
    """Return the served class of each object of the reference.

    served: None serves nothing, e.g. where outputs are not finite.

    - classify: the frame is the one object.
    - detect: objects are paired one to one at IoU 0.5, greedily by score as `detections.match` does: first among equal
      classes, then the rest among all. A detector may give one object two classes, and that these change places in the
      order of scores is no confusion.
    - raw: there are no objects.
    """
    if isinstance(reference, Classification):
        return [(reference.class_id, served.class_id if isinstance(served, Classification) else None)]
    if not isinstance(reference, Detections):
        return []
    classes: list[int | None] = [None] * len(reference)
    if isinstance(served, Detections):
        for index, paired in _pairs(served, reference):
            classes[paired] = int(served.classes[index])
    return list(zip(reference.classes.tolist(), classes, strict=True))


def _pairs(served: Detections, reference: Detections) -> list[tuple[int, int]]:
    """Return the (served, reference) indices of the same objects."""
    overlaps = iou_matrix(served.boxes, reference.boxes)
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
