"""Whom the frames belong to: a few to the search, the others, which it never sees, to the certificate."""

from __future__ import annotations

from dataclasses import dataclass

from agent.planning.certificate import check_frames
from agent.planning.found import PlanOptions
from agent.planning.held_out import RandomFrames
from agent.planning.trial import ERROR, MAX_CANDIDATES, Terms

SEARCH_FRAMES = 24  # at most a quarter of the source, and no fewer than 8
_FEWEST = 8


@dataclass(frozen=True)
class Split:
    """search: the frames at the beginning of the random order. certificate: those left; None for a live camera.

    terms: with as many candidates as the frames allow, since each takes its share of the error.
    """

    search: int
    certificate: int | None
    terms: Terms

    @property
    def told(self) -> str:
        """What the certificate is going to need, in a line for people."""
        certificate = "" if self.certificate is None else f"{self.certificate} "
        return (
            f"{self.search} frames to search with, {certificate}others to certify on: a plan that loses nothing is "
            f"certified after {self.terms.needed} with something on them, or a few less, for a loss of at most "
            f"{self.terms.max_loss:g} with {100.0 * (1.0 - ERROR):g} % confidence; one that loses something takes more"
        )


def split_frames(frames: RandomFrames, options: PlanOptions) -> Split:
    """Raises AgentError (`plan.frames`) where there are too few for any certificate, CameraError as the source does."""
    count = frames.count
    search = SEARCH_FRAMES if count is None else min(SEARCH_FRAMES, max(_FEWEST, count // 4))
    left = None if count is None else count - search
    terms = [Terms(options.max_loss, options.max_confusion, n) for n in range(MAX_CANDIDATES, 0, -1)]
    chosen = next((each for each in terms if left is None or each.needed <= left), terms[-1])
    check_frames(frames, search, chosen)
    return Split(search, left, chosen)
