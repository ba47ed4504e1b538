"""Which classes an engine takes for which, beside the reference, and what a candidate newly confuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agent.planning.disagreement import Answer, Disagreement
from calibrate.confusion import Pair, confused_pairs

_ERROR = 0.05


class Misreading:
    """Counts the answers of one engine, frame by frame."""

    def __init__(self) -> None:
        self._disagreement = Disagreement()
        self._wrong: Counter[int] = Counter()

    def add(self, frame: Sequence[Answer]) -> None:
        """Take the `agent.planning.disagreement.answers` of one frame."""
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


def newly_confused(candidate: Misreading, serving: Misreading | None, tolerance: float) -> tuple[Pair, ...]:
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
