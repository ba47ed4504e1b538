"""Compute the fidelity of an engine: how far its answer agrees with the reference engine's for the same frame.

For classification, the loss 1 - mean fidelity bounds the change of accuracy without any labels: an answer that differs
from the reference's can turn at most one frame from right to wrong, or back.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass

import numpy as np

from agent.vision.decode import Classification, Prediction, RawOutputs
from agent.vision.detections import Detections, LabelledBoxes, match

MATCH_IOU = 0.5


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


def count_matches(detections: Detections, truth: LabelledBoxes, iou_threshold: float = MATCH_IOU) -> MatchCounts:
    """Count the detections that match labels, or a reference engine's detections, in pixels of the same image.

    Matches are class-aware, one to one, greedy by score (see `agent.vision.detections.match`).
    """
    hits = int(match(detections, truth, iou_threshold).sum())
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
