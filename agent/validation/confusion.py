"""Where two predictions of one frame disagree: which class is served where the reference says another."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agent.vision.decode import Classification, Prediction
from agent.vision.detections import Detections, iou_matrix
from agent.vision.fidelity import MATCH_IOU
from calibrate.confusion import Pair, confused_pairs

# Times that a pair must be seen to look worse than a limit. Where such pairs kept trials of max_loss 0.1 from ending, a
# candidate that misreads 40 % of a class of 10 % was refused for a limit of 20 % in 65 of 100 simulated trials, and in
# 15 else; one that misreads 10 % was never refused, and kept from ending in 7.
_SUSPECT = 2

Answer = tuple[int, int | None]  # the reference's class of an object, and the served one; None where it was not found


def answers(served: Prediction | None, reference: Prediction) -> list[Answer]:
    """What was served for each object of the reference; None serves nothing, e.g. where outputs are not finite.

    classify: the frame is the one object. detect: one to one at IoU 0.5, greedy by score as `detections.match`,
    first among equal classes and then, for what is left, among all: a detector may give one object two classes, and
    that these change places in the order of scores is no confusion. raw: no objects.
    """
    if isinstance(reference, Classification):
        return [(reference.class_id, served.class_id if isinstance(served, Classification) else None)]
    if not isinstance(reference, Detections):
        return []
    given: list[int | None] = [None] * len(reference)
    if isinstance(served, Detections):
        for found, index in _pairs(served, reference):
            given[index] = int(served.classes[found])
    return list(zip(reference.classes.tolist(), given, strict=True))


def _pairs(served: Detections, reference: Detections) -> list[tuple[int, int]]:
    """(served, reference) indices of the same object."""
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


@dataclass(frozen=True)
class ConfusedPair:
    """In `of` frames the reference sees a `reference`, and in `count` of them a `candidate` is served instead.

    low: lower confidence bound of that share.
    """

    reference: str
    candidate: str
    count: int
    of: int
    low: float


class Disagreement:
    """Counts answers over frames, and names the classes that are confused.

    The objects of a class in one frame are often misread together, so that they are no independent answers: of each
    class of the reference one object per frame is counted, drawn at random.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._counts: Counter[tuple[int, int]] = Counter()
        self._totals: Counter[int] = Counter()

    @property
    def counts(self) -> Mapping[tuple[int, int], int]:
        """(reference class, served class) -> frames; the two differ."""
        return self._counts

    @property
    def totals(self) -> Mapping[int, int]:
        """Reference class -> frames with it, whether it was found or not."""
        return self._totals

    def add(self, frame: Sequence[Answer]) -> None:
        """Take the `answers` of one frame."""
        by_class: dict[int, list[int | None]] = defaultdict(list)
        for reference, served in frame:
            by_class[reference].append(served)
        for reference, choices in by_class.items():
            self._totals[reference] += 1
            drawn = choices[int(self._random.integers(len(choices)))]
            if drawn is not None and drawn != reference:
                self._counts[reference, drawn] += 1

    def looks_worse(self, limit: float) -> bool:
        """Whether a pair has been seen in more than this share of frames, which may still be chance."""
        return any(
            count >= _SUSPECT and count > limit * self._totals[reference]
            for (reference, _), count in self._counts.items()
        )

    def confused(self, label: Callable[[int], str], tolerance: float, error: float) -> tuple[ConfusedPair, ...]:
        """The pairs that are above `tolerance` with a probability of 1 - error, the worst first: for one look only.

        Raises ValueError as `calibrate.confusion.confused_pairs`.
        """
        return tuple(
            ConfusedPair(label(pair.reference), label(pair.candidate), pair.count, pair.of, pair.low)
            for pair in confused_pairs(self._counts, self._totals, tolerance, error)
        )


_ERROR = 0.05


class ConfusionCounts:
    """Counts the answers of one engine, frame by frame."""

    def __init__(self) -> None:
        self._disagreement = Disagreement()
        self._wrong: Counter[int] = Counter()

    def add(self, frame: Sequence[Answer]) -> None:
        """Take the `agent.validation.confusion.answers` of one frame."""
        self._disagreement.add(frame)
        self._wrong.update({reference for reference, served in frame if served != reference})

    def confused(self, tolerance: float) -> tuple[Pair, ...]:
        """The pairs of classes whose rate is above `tolerance` in (0, 1), with a probability of 95 %."""
        return confused_pairs(self._disagreement.counts, self._disagreement.totals, tolerance, _ERROR)

    def share(self, reference: int, served: int) -> float:
        """Of the frames with class `reference`, in how many `served` is the answer."""
        return self._disagreement.counts.get((reference, served), 0) / max(self._disagreement.totals[reference], 1)

    def wrong(self, reference: int) -> int:
        """Frames in which an object of class `reference` is taken for another, or not found."""
        return self._wrong[reference]


def newly_confused(candidate: ConfusionCounts, serving: ConfusionCounts | None, tolerance: float) -> tuple[Pair, ...]:
    """The pairs that the candidate confuses in more than `tolerance` of the frames, and that are news.

    They are not where what serves confuses the same pair too, or loses that class as often in whatever way: an engine
    that found nothing in the dark confuses no classes either.
    """
    return tuple(
        pair
        for pair in candidate.confused(tolerance)
        if serving is None
        or (
            serving.share(pair.reference, pair.candidate) <= tolerance
            and serving.wrong(pair.reference) < candidate.wrong(pair.reference)
        )
    )
