"""Count where two predictions of a frame disagree: which class is served where the reference says another.

`Disagreement` counts such answers over frames. `tared plan` certifies a plan by it, and a candidate's verdict names the
pairs that are new.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agent.vision.answer import ServedClass
from calibrate.statistics.confusion import confused_pairs

# Times that a pair must be seen before it can appear to be above a limit. Measured by simulating 100 trials of max_loss
# 0.1, which such pairs kept from ending: a candidate that misreads 40 % of a class of 10 % was refused for a limit of
# 20 % in 65 of them (15 otherwise). One that misreads 10 % was never refused, and kept from ending in 7.
_SUSPECT = 2
_LEAST_IOU = 0.5  # with the reference, of the pixels of a class; a larger configured max_loss lowers it


def least_iou(max_loss: float) -> float:
    """Return the IoU with the reference below which a class of pixels is lost."""
    return min(_LEAST_IOU, 1.0 - max_loss)


@dataclass(frozen=True)
class ConfusedPair:
    """In `of` frames the reference sees a `reference`, and in `count` of them a `candidate` is served instead.

    low: lower confidence bound of the share count / of.
    """

    reference: str
    candidate: str
    count: int
    of: int
    low: float


class Disagreement:
    """Counts answers over frames, and names the classes that are confused.

    The objects of a class in one frame are often misread together, so that their answers are not independent. Therefore
    one object per frame is counted of each class of the reference, drawn at random.

    Attributes:
        counts: (reference class, served class) -> frames; the two differ.
        totals: Reference class -> frames with it, whether it was detected or not.
        wrong: Reference class -> frames in which an object of it is misread or not detected.
    """

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self.counts: Counter[tuple[int, int]] = Counter()
        self.totals: Counter[int] = Counter()
        self.wrong: Counter[int] = Counter()

    def add(self, frame: Sequence[ServedClass]) -> None:
        """Count the `answers` of one frame."""
        by_class: dict[int, list[int | None]] = defaultdict(list)
        for reference, served in frame:
            by_class[reference].append(served)
        for reference, choices in by_class.items():
            self.totals[reference] += 1
            drawn = choices[int(self._random.integers(len(choices)))]
            if drawn is not None and drawn != reference:
                self.counts[reference, drawn] += 1
        self.wrong.update({reference for reference, served in frame if served != reference})

    def share(self, reference: int, served: int) -> float:
        """Return the share of the frames with class `reference` in which `served` is the answer."""
        return self.counts[reference, served] / max(self.totals[reference], 1)

    def appears_above(self, limit: float) -> bool:
        """Return True if a pair was seen in more than this share of frames, which may still be chance."""
        return any(
            count >= _SUSPECT and count > limit * self.totals[reference]
            for (reference, _), count in self.counts.items()
        )

    def confused(self, label: Callable[[int], str], tolerance: float, error: float) -> tuple[ConfusedPair, ...]:
        """Return the pairs that are above `tolerance` with a probability of 1 - error, the worst first.

        The probability holds for a single call. Raises ValueError as `calibrate.statistics.confusion.confused_pairs`.
        """
        return tuple(
            ConfusedPair(label(pair.reference), label(pair.candidate), pair.count, pair.total, pair.low)
            for pair in confused_pairs(self.counts, self.totals, tolerance, error)
        )
