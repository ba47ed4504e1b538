"""Compare an engine's answer with the reference engine's for the same frame: its fidelity, and object by object.

`fidelity` says how far the two agree, and `answers` what is served for each object that the reference sees.

For classification, the loss 1 - mean fidelity bounds the change of accuracy without any labels: an answer that differs
from the reference's can turn at most one frame from right to wrong, or back.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass

import numpy as np

from agent.vision.decode import Classification, Prediction, RawOutputs
from agent.vision.detections import Detections, LabelledBoxes, iou_matrix, match

MATCH_IOU = 0.5

# The reference's class of an object, and the served class; None where the object was not detected.
ServedClass = tuple[int, int | None]


@dataclass(frozen=True)
class MatchCounts:
    """True positives, false positives and false negatives; sums over frames are made with `+`."""

    true_positives: int = 0
    false_positives: int = 0
    false_negatives: int = 0

    def __add__(self, other: MatchCounts) -> MatchCounts:
        return MatchCounts(*map(operator.add, astuple(self), astuple(other)))

    @property
    def f1(self) -> float:
        """F1 in [0, 1]; 1 where there is no object and no detection."""
        errors = self.false_positives + self.false_negatives
        return 1.0 if errors == 0 else 2 * self.true_positives / (2 * self.true_positives + errors)


@dataclass(frozen=True)
class Fidelity:
    """The fidelity of one frame in [0, 1].

    `is_empty`: both engines detected nothing. Such frames agree by default. An average has to count them apart, or an
    empty scene would look like proof.
    """

    value: float
    is_empty: bool = False


def count_matches(detections: Detections, truth: LabelledBoxes) -> MatchCounts:
    """Count the detections that match labels, or a reference engine's detections, at IoU 0.5.

    Both are in pixels of the same image. Matches are class-aware, one to one, greedy by score (see
    `agent.vision.detections.match`).
    """
    hits = int(match(detections, truth, MATCH_IOU).sum())
    return MatchCounts(hits, len(detections) - hits, len(truth) - hits)


def is_empty(prediction: Prediction) -> bool:
    """Return True for a detector's answer without a detection; other predictions are never empty."""
    return isinstance(prediction, Detections) and not len(prediction)


def fidelity(served: Prediction, reference: Prediction, min_sqnr_db: float = 20.0) -> Fidelity:
    """Return the fidelity of a served prediction against the reference engine's for the same frame.

    - classify: 1 for the same top-1.
    - detect: F1 of the matches at IoU 0.5; 1 when both are empty.
    - raw: 1 when every output reaches `min_sqnr_db`.

    Raises TypeError on predictions of different tasks.
    """
    if isinstance(served, Classification) and isinstance(reference, Classification):
        return Fidelity(float(served.class_id == reference.class_id))
    if isinstance(served, Detections) and isinstance(reference, Detections):
        return Fidelity(count_matches(served, reference).f1, is_empty=is_empty(served) and is_empty(reference))
    if isinstance(served, dict) and isinstance(reference, dict):
        return Fidelity(float(sqnr_db(served, reference) >= min_sqnr_db))
    raise TypeError(f"predictions of two tasks: {type(served).__name__} and {type(reference).__name__}")


def sqnr_db(served: RawOutputs, reference: RawOutputs) -> float:
    """Return 10 log10(sum ref^2 / sum (served - ref)^2) in dB, the signal to quantisation noise of the worst output.

    The worst one counts, since pooled outputs would hide a small one behind a large one. No noise at all is +inf;
    noise on an all-zero reference, or noise that is not finite, is -inf.
    """
    return min(_output_sqnr_db(served[name], output) for name, output in reference.items())


def _output_sqnr_db(served: np.ndarray, reference: np.ndarray) -> float:
    signal = reference.astype(np.float64)
    with np.errstate(all="ignore"):
        noise_power = np.square(served - signal).sum()
        signal_power = np.square(signal).sum()
        if noise_power == 0.0:
            return np.inf
        ratio_db = 10.0 * np.log10(signal_power / noise_power)
    return float(ratio_db) if np.isfinite(noise_power) else -np.inf


def answers(served: Prediction | None, reference: Prediction) -> list[ServedClass]:
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
