"""Bound what the board scores from the labels of drawn frames: accuracy, and precision and recall by class.

Accuracy is that of `agent.monitoring.accuracy`: for a classifier the share of right answers, for a detector the mean F1
of the frames on which there is something to find or something was found, for other tasks the mean of what the answers
themselves are compared by, such as panoptic quality. The served answers are scored beside the float
reference's on the same frames: the latter lose by the model, the difference is what INT8 loses.

The intervals are of all observed time, not of the labelled frames (calibrate.statistics.sampling). They hold at all
times at once, each by itself: of twenty classes one may well lie outside its own. Time is counted up to the first frame
of a camera and regime that waits for its label: whoever labels the easy frames first gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.labelling.store import Cell, Counted, DrawnFrame
from agent.vision.answer import Hits
from calibrate.statistics.evidence import Interval
from calibrate.statistics.sampling import STRATA, Ratio, SampledTotals

Score = tuple[float | None, Hits]  # the accuracy of an answer by the frame's label, and what of it is true
_COUNTS = 5  # numbers of each engine: score, frames with a score, true positives, false positives, false negatives
_DOUBT_ERROR = 1e-3  # the probability that sound labels are ever doubted, about
_MOST_SKIPPED, _FEWEST_PASSED = 0.05, 20  # share of the frames, of so many at least
_DOUBT_TIGHTEST = 20.0  # frames at which a doubt arises soonest


@dataclass(frozen=True)
class Scores:
    """accuracy: Of the served answers. reference: Of the float reference's. int8_loss: How much more the latter is."""

    accuracy: Interval
    reference: Interval
    int8_loss: Interval


@dataclass(frozen=True)
class ClassScores:
    """Precision and recall of the served answers for one class, and of the reference's."""

    precision: Interval
    recall: Interval
    reference_precision: Interval
    reference_recall: Interval


@dataclass(frozen=True)
class MeasuredAccuracy:
    """By the labels so far.

    labels: Frames that count. waiting: Drawn frames without a label. skipped: Those of which nobody could say what they
    show. suggested: Of the labels, how many began as the reference's answer. doubt: Why these labels are no random
    sample; empty where nothing speaks against it. cameras, regimes, classes: By name.
    """

    labels: int
    waiting: int
    skipped: int
    suggested: int
    doubt: str
    overall: Scores
    cameras: Mapping[str, Scores]
    regimes: Mapping[str, Scores]
    classes: Mapping[str, ClassScores]

    def document(self, most: int | None = None) -> dict[str, Any]:
        """Return all of it in JSON's types; most: classes and regimes, of which those with the most labels stay."""
        document = asdict(self, dict_factory=_rounded)
        classes = sorted(self.classes, key=lambda name: -self.classes[name].recall.n)
        regimes = sorted(self.regimes, key=lambda name: -self.regimes[name].accuracy.n)
        for key, names in (("classes", classes), ("regimes", regimes)):
            document[key] = {name: document[key][name] for name in names[:most]}
        return document


def _rounded(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in items}


class FrameScores:
    """The scores of labelled frames, each computed once for each label of the frame."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[float | None, list[Score]]] = {}  # by frame, with the time of its label

    def get(self, frame: DrawnFrame) -> list[Score]:
        """Return the score of the served answer and of the reference's."""
        labelled_s, scores = self._kept.get(frame.id, (None, []))
        if not scores or labelled_s != frame.labelled_s:
            truth = frame.label
            scores = [(each.accuracy(truth), each.hits(truth)) for each in (frame.served, frame.reference)]
            self._kept[frame.id] = frame.labelled_s, scores
        return scores


def measured_accuracy(
    frames: Sequence[DrawnFrame],
    labels: Sequence[str] = (),
    counted: Mapping[Cell, Counted] | None = None,
    scores: FrameScores | None = None,
) -> MeasuredAccuracy | None:
    """Return what drawn frames come to, in the order of their draws; None while none counts.

    Args:
        labels: The names of the model's classes.
        counted: Of all frames, drawn or not, by cell; None: nobody has counted.
        scores: Those of an earlier call for these frames; None: each is scored now.
    """
    scores = scores if scores is not None else FrameScores()
    passed = up_to_the_first_waiting(frames)
    labelled = [frame for frame in passed if frame.is_labelled]
    if not labelled:
        return None
    compared = [scores.get(frame) for frame in labelled]
    classes = sorted({int(each) for pair in compared for _, hits in pair for each in (*hits.found, *hits.shown)})
    cells: dict[Cell, SampledTotals] = {}
    for frame, pair in zip(labelled, compared, strict=True):
        totals = cells.setdefault(frame.cell, SampledTotals(1 + len(classes), 2 * _COUNTS))
        counts = np.hstack([count_frame(*each, classes) for each in pair])
        totals.add(frame.stratum, frame.weight, frame.probability, frame.seen, counts.tolist())

    def total(parts: Iterable[SampledTotals]) -> SampledTotals:
        whole = SampledTotals(1 + len(classes), 2 * _COUNTS)
        for part in parts:
            whole += part
        return whole

    def by(part: Callable[[Cell], str]) -> dict[str, Scores]:
        names = sorted({part(cell) for cell in cells})
        return {name: _scores(total(each for cell, each in cells.items() if part(cell) == name)) for name in names}

    overall = total(cells.values())
    return MeasuredAccuracy(
        labels=len(labelled),
        waiting=sum(frame.is_waiting for frame in frames),
        skipped=sum(frame.skipped for frame in passed),
        suggested=sum(frame.suggested for frame in labelled),
        doubt=_doubt(frames, passed, counted),
        overall=_scores(overall),
        cameras=by(lambda cell: cell[0]),
        regimes=by(lambda cell: cell[1]),
        classes={
            labels[number] if number < len(labels) else str(number): _class_scores(overall, group)
            for group, number in enumerate(classes, 1)
        },
    )


def up_to_the_first_waiting(frames: Sequence[DrawnFrame]) -> list[DrawnFrame]:
    """Return for each cell its frames before the first that waits."""
    ended: set[Cell] = set()
    counted = []
    for frame in frames:
        if frame.is_waiting:
            ended.add(frame.cell)
        elif frame.cell not in ended:
            counted.append(frame)
    return counted


def count_frame(score: float | None, hits: Hits, classes: Sequence[int]) -> NDArray[np.float64]:
    """Return (1 + classes, _COUNTS): of the whole frame, then of each class, which has no score of its own."""
    numbers = np.array(classes, np.int64)[:, np.newaxis]
    of_found = np.concatenate([np.ones((1, len(hits.found)), np.bool_), hits.found == numbers])
    of_shown = np.concatenate([np.ones((1, len(hits.shown)), np.bool_), hits.shown == numbers])
    counts = np.zeros((1 + len(classes), _COUNTS))
    counts[:, 2] = (of_found & hits.right).sum(axis=1)
    counts[:, 3] = of_found.sum(axis=1) - counts[:, 2]
    counts[:, 4] = of_shown.sum(axis=1) - counts[:, 2]
    if score is not None:
        counts[0, :2] = score, 1.0
    return counts


def _ratio(numerator: Iterable[int], denominator: Iterable[int]) -> Ratio:
    """numerator, denominator: the places of their counts."""
    weights = np.eye(2 * _COUNTS)
    return weights[[*numerator]].sum(axis=0).tolist(), weights[[*denominator]].sum(axis=0).tolist()


_SERVED, _REFERENCE = _ratio([0], [1]), _ratio([_COUNTS], [_COUNTS + 1])


def _scores(totals: SampledTotals) -> Scores:
    loss = totals.difference(0, _REFERENCE, _SERVED)
    return Scores(totals.ratio(0, *_SERVED), totals.ratio(0, *_REFERENCE), loss)


def _class_scores(totals: SampledTotals, group: int) -> ClassScores:
    def bounds(first: int) -> tuple[Interval, Interval]:
        hits, extra, missed = range(first + 2, first + _COUNTS)
        return totals.ratio(group, *_ratio([hits], [hits, extra])), totals.ratio(group, *_ratio([hits], [hits, missed]))

    return ClassScores(*bounds(0), *bounds(_COUNTS))


def _doubt(frames: Sequence[DrawnFrame], passed: Sequence[DrawnFrame], counted: Mapping[Cell, Counted] | None) -> str:
    """Return why labels are no random sample of the draws, or the draws none of the frames; empty if they may be.

    passed: The frames up to the first that waits; those among them that were skipped are guessed as others of their
    stratum. Sound draws are doubted in one of a thousand streams, at all times together.
    """
    if counted:
        drawn = np.bincount(np.array([frame.stratum for frame in frames], np.int64), minlength=STRATA)
        expected = np.sum([each.expected for each in counted.values()], axis=0)
        if (odd := _odd(drawn, expected)) is not None:
            return (
                f"{drawn[odd]} frames of stratum {odd + 1} of {STRATA} are kept as drawn, {expected[odd]:.1f} were "
                "to be drawn: frames were removed or added"
            )
    skipped = sum(frame.skipped for frame in passed)
    if len(passed) >= _FEWEST_PASSED and skipped > _MOST_SKIPPED * len(passed):
        return f"{skipped} of {len(passed)} frames were skipped: what they show counts for nothing"
    return ""


def _odd(found: NDArray[np.int64], expected: NDArray[np.float64]) -> int | None:
    """Return the stratum whose number is off by more than chance explains; None where none is.

    found - expected is a martingale whose variance is at most `expected`; the bound is that of SampledTotals.
    """
    mixed = expected + _DOUBT_TIGHTEST
    bounds = np.sqrt(mixed * np.log(mixed / (_DOUBT_TIGHTEST * (_DOUBT_ERROR / STRATA) ** 2)))
    excess = np.abs(found - expected) - bounds
    worst = int(excess.argmax())
    return worst if excess[worst] > 0.0 else None
