"""Propose a policy for a regime from its labels: a score threshold that is better beyond doubt, classes never right.

A threshold is chosen on every second labelled frame and judged on the others, by F1 over all objects, weighted for all
observed time (calibrate.statistics.sampling). Nothing is applied: the owner confirms it by the command `policy`.

The interval of the gain holds for all looks at one threshold. Whoever asks again after every label, and confirms the
first proposal that comes, is misled somewhat more often than it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.labelling.accuracy import up_to_the_first_waiting
from agent.labelling.store import DrawnFrame
from agent.vision.policy import Policy
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from calibrate.statistics.evidence import Interval
from calibrate.statistics.sampling import MIN_LABELS, Ratio, SampledTotals

MIN_FRAMES = 2 * MIN_LABELS  # labelled, of a regime
_MOST_THRESHOLDS = 40
_NEVER_RIGHT = 0.2  # the upper bound of a class's precision
_ERROR = 0.05
_F1: Ratio = (2.0, 0.0, 0.0), (2.0, 1.0, 1.0)  # weights of true positives, false positives and false negatives
_PRECISION: Ratio = (1.0, 0.0, 0.0), (1.0, 1.0, 0.0)


@dataclass(frozen=True)
class PolicyProposal:
    """The policy that the labels of one regime speak for.

    Args:
        labels: Labelled frames behind it.
        present: The score threshold today.
        score_threshold: A better one; None where none is beyond doubt.
        f1, f1_present: On the frames that did not choose the threshold; None without one.
        gain: Their difference.
        never_right: By class: its precision.
        classes: Those of interest without these; empty where all stay.
    """

    artefact: str
    labels: int
    present: float
    score_threshold: float | None
    f1: Interval | None
    f1_present: Interval | None
    gain: Interval | None
    never_right: Mapping[int, Interval]
    classes: tuple[int, ...]

    def document(self, spec: ModelSpec) -> dict[str, Any]:
        """Return all of it in JSON's types, with the names of classes."""
        document = asdict(self)
        document["never_right"] = {spec.label(number): each for number, each in document["never_right"].items()}
        document["classes"] = [spec.label(number) for number in self.classes]
        return document


@dataclass(frozen=True)
class _Labelled:
    """The answer to a labelled frame: scores, classes and whether each is right, (n,) each.

    shown: How many objects are there.
    """

    draw: DrawnFrame
    scores: NDArray[np.floating[Any]]
    classes: NDArray[np.int64]
    right: NDArray[np.bool_]
    shown: int

    @classmethod
    def from_frame(cls, frame: DrawnFrame, policy: Policy) -> _Labelled:
        """Take what the policy's classes and masks leave of a frame."""
        wanted = partial(policy.is_wanted, camera=frame.camera, size=(frame.height, frame.width))
        hits = frame.served.hits(frame.label, wanted)
        return cls(frame, hits.scores, hits.found, hits.right, len(hits.shown))

    def counts(self, threshold: float) -> tuple[float, float, float]:
        """Return true positives, false positives and false negatives at a threshold.

        Boxes are matched surest first, so that leaving out the unsure ones changes no match of the others.
        """
        passed = self.scores >= threshold
        hits = float((self.right & passed).sum())
        return hits, float(passed.sum()) - hits, self.shown - hits


def propose(
    frames: Sequence[DrawnFrame], regime: str, spec: ModelSpec, policy: Policy | None = None
) -> PolicyProposal | None:
    """Return what the labels of a regime speak for; None where they do not speak for anything.

    Args:
        frames: Drawn frames of any regime, in the order of their draws; those of a camera count up to the first that
            waits for its label.
        policy: Today's, with masks as shares of the frames.
    """
    policy = policy or Policy()
    counted = up_to_the_first_waiting([frame for frame in frames if frame.regime == regime])
    labelled = [_Labelled.from_frame(frame, policy) for frame in counted if frame.is_labelled]
    if len(labelled) < MIN_FRAMES:
        return None
    lowest = open_task(spec).least_score
    present = policy.score_threshold if policy.score_threshold is not None else lowest
    threshold = _best_threshold(labelled[::2], lowest, present)
    judged = _totals(labelled[1::2], 0.5, lambda frame: [(*frame.counts(present), *frame.counts(threshold))])
    before, after = _of_six(_F1, 0), _of_six(_F1, 1)
    gain = judged.difference(0, after, before, _ERROR)
    is_better = threshold != present and gain.low > 0.0
    never_right = _never_right(labelled, present)
    wanted = policy.classes if policy.classes is not None else range(len(spec.labels))
    classes = tuple(sorted(set(wanted) - never_right.keys())) if never_right else ()
    if not is_better and not classes:
        return None
    return PolicyProposal(
        regime,
        len(labelled),
        present,
        threshold if is_better else None,
        judged.ratio(0, *after) if is_better else None,
        judged.ratio(0, *before) if is_better else None,
        gain if is_better else None,
        never_right if classes else {},
        classes,
    )


def _best_threshold(labelled: Sequence[_Labelled], lowest: float, present: float) -> float:
    """Return the threshold with the best F1 on these frames; the present one where no other is better."""
    scores = np.concatenate([frame.scores for frame in labelled])
    tried = {present}
    if scores.size:
        spread = np.quantile(scores, np.linspace(0.0, 1.0, _MOST_THRESHOLDS), method="inverted_cdf")
        tried |= {float(each) for each in spread.astype(np.float64).round(3) if each >= lowest}
    weights = np.array([frame.draw.weight / frame.draw.probability for frame in labelled])
    each = np.repeat(weights, [len(frame.scores) for frame in labelled])
    right = np.concatenate([frame.right for frame in labelled])
    shown = float(weights @ [frame.shown for frame in labelled])

    def f1(threshold: float) -> float:
        passed = scores >= threshold
        return float(2.0 * each[passed & right].sum() / max(each[passed].sum() + shown, 1e-12))

    return max(sorted(tried), key=lambda threshold: (f1(threshold), threshold == present))


def _never_right(labelled: Sequence[_Labelled], threshold: float) -> dict[int, Interval]:
    """Return the precision of the classes that are hardly ever right, with bounds that hold for all classes at once."""
    classes = sorted({int(number) for frame in labelled for number in frame.classes[frame.scores >= threshold]})
    if not classes:
        return {}

    def counts(frame: _Labelled) -> list[tuple[float, ...]]:
        passed = frame.scores >= threshold
        rows = [passed & (frame.classes == number) for number in classes]
        return [(float((row & frame.right).sum()), float((row & ~frame.right).sum()), 0.0) for row in rows]

    totals = _totals(labelled, 1.0, counts)
    intervals = {
        number: totals.ratio(group, *_PRECISION, _ERROR / len(classes)) for group, number in enumerate(classes)
    }
    return {number: each for number, each in intervals.items() if each.high < _NEVER_RIGHT}


def _totals(
    labelled: Sequence[_Labelled], share: float, counts: Callable[[_Labelled], Sequence[Sequence[float]]]
) -> SampledTotals:
    """Return the totals of these frames over all cameras.

    share: Of the labelled frames, how many these are. counts: (groups, counts) of a frame.
    """
    by_frame = [counts(frame) for frame in labelled]
    shape = len(by_frame[0]), len(by_frame[0][0])
    by_camera: dict[str, SampledTotals] = {}
    for frame, found in zip(labelled, by_frame, strict=True):
        draw = frame.draw
        totals = by_camera.setdefault(draw.camera, SampledTotals(*shape))
        totals.add(draw.stratum, draw.weight, draw.probability * share, draw.seen, found)
    whole = SampledTotals(*shape)
    for totals in by_camera.values():
        whole += totals
    return whole


def _of_six(ratio: Ratio, place: int) -> Ratio:
    """Return a ratio of three counts for the first or the second three of six."""
    numerator, denominator = ([0.0] * 3 * place + [*weights] + [0.0] * 3 * (1 - place) for weights in ratio)
    return numerator, denominator
