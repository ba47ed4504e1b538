"""One candidate's trial: what is asked of it, what was measured so far, and what that decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from agent.model_spec import ModelSpec
from agent.planning.disagreement import Answer, ConfusedPair, Disagreement
from calibrate.loss_bound import LossBound, frames_needed

MAX_CANDIDATES = 5
ERROR = 0.05  # of all candidates of a search together
# Draws per candidate, in multiples of the fewest. Of candidates with half the loss that is asked all 14 simulated were
# accepted by 16, of those with 0.7 of it 6 of 14 by 20.
_LIMIT = 20
_FASTER = 0.97  # of float's latency at most: the medians of equal engines differ by 1.5 %, see certificate.py


@dataclass(frozen=True)
class Terms:
    """What is asked of each of `candidates` candidates, which were chosen beforehand.

    max_loss: of 1 - fidelity, from 1e-4 on. max_confusion: of the objects of a class that are served as one other. Both
    are fractions in (0, 1).
    """

    max_loss: float
    max_confusion: float
    candidates: int = MAX_CANDIDATES

    @property
    def error(self) -> float:
        """The error of one candidate's bounds."""
        return ERROR / self.candidates

    @cached_property
    def needed(self) -> int:
        """The fewest telling frames that can certify a candidate."""
        return frames_needed(self.max_loss, self.error)


@dataclass(frozen=True)
class Trial:
    """How a candidate did beside the reference and the float engine.

    loss: mean over `frames` frames; on empty_frames others neither engine nor reference found anything, so they agree
    without telling anything. upper, lower: its anytime-valid bounds. Latencies are medians in ms over the same frames,
    in turn in one process, after a warm-up. confused: pairs of classes above max_loss, though the mean may be small.
    """

    loss: float
    upper: float
    lower: float
    frames: int
    empty_frames: int
    latency_ms: float
    latency_float_ms: float
    confused: tuple[ConfusedPair, ...]
    accepted: bool
    reason: str

    @property
    def is_faster(self) -> bool:
        """Whether it took less time than float by more than chance."""
        return self.latency_ms <= _FASTER * self.latency_float_ms


@dataclass(frozen=True)
class Measurement:
    """One frame, as the journal keeps it. latencies_ms: of candidate and float engine, where they were timed."""

    loss: float
    empty: bool
    answers: Sequence[Answer]
    latencies_ms: tuple[float, float] | None


class Tally:
    """A candidate's measurements so far, and what they decide."""

    def __init__(self, terms: Terms) -> None:
        self.bound = LossBound(terms.error)
        self._terms = terms
        self._disagreement = Disagreement()
        self._empty_frames = 0
        self._latencies_ms: list[tuple[float, float]] = []

    def add(self, measurement: Measurement) -> None:
        if measurement.latencies_ms is not None:
            self._latencies_ms.append(measurement.latencies_ms)
        if measurement.empty:
            self._empty_frames += 1
            return
        self.bound.update(measurement.loss)
        self._disagreement.add(measurement.answers)

    @property
    def is_decided(self) -> bool:
        """Whether more frames would change nothing, or too little."""
        if self._loses_more or self._is_futile or self._is_hopeless:
            return True
        return self._keeps_loss and not self._disagreement.looks_worse(self._terms.max_confusion)

    @property
    def _keeps_loss(self) -> bool:
        return self.bound.upper <= self._terms.max_loss

    @property
    def _loses_more(self) -> bool:
        return self.bound.lower >= self._terms.max_loss

    @property
    def _is_futile(self) -> bool:
        """The mean itself is too high, on frames enough for it to be near the truth; refusing early is no promise."""
        return self.bound.n >= max(100, self._terms.needed) and self.bound.mean >= self._terms.max_loss

    @property
    def _is_hopeless(self) -> bool:
        """Too many draws; or none of the first tells anything, where one in _LIMIT must for the others to suffice."""
        draws = self.bound.n + self._empty_frames
        return draws >= (_LIMIT if self.bound.n else 1) * self._terms.needed

    def trial(self, spec: ModelSpec, ended: str) -> Trial:
        """The result; `ended` says why there were no more frames where the measurements decide nothing.

        A trial that ended early for a small loss has no pair that looks worse than max_confusion. So the pairs that
        refuse a candidate are those of a number of draws that was fixed beforehand, as their bound wants it.
        """
        tolerance = min(self._terms.max_loss, self._terms.max_confusion)
        pairs = self._disagreement.confused(spec.label, tolerance, self._terms.error)
        worst = pairs[0] if pairs and pairs[0].low > self._terms.max_confusion else None
        latency_ms, latency_float_ms = (median(column) for column in zip(*self._latencies_ms, strict=True))
        return Trial(
            loss=self.bound.mean,
            upper=self.bound.upper,
            lower=self.bound.lower,
            frames=self.bound.n,
            empty_frames=self._empty_frames,
            latency_ms=latency_ms,
            latency_float_ms=latency_float_ms,
            confused=pairs,
            accepted=self._keeps_loss and not self._loses_more and not self._is_futile and worst is None,
            reason=self._reason(worst, self._ended() or ended),
        )

    def _ended(self) -> str:
        """Why more frames were not asked for, where that was not for want of them."""
        if self._is_hopeless:
            return "more would take too long"
        return "more would hardly lower it" if self._is_futile else ""

    def _reason(self, worst: ConfusedPair | None, ended: str) -> str:
        asked = f"at most {self._terms.max_loss:g} is asked"
        told = f"on {self.bound.n} frames, {self._empty_frames} others empty"
        if self._loses_more:
            return f"loss at least {self.bound.lower:.3g} {told}; {asked}"
        if self._keeps_loss and worst is not None:
            return (
                f"'{worst.reference}' served as '{worst.candidate}' on {worst.count} of {worst.of} frames, at least "
                f"{worst.low:.3g} of all; at most {self._terms.max_confusion:g} is asked"
            )
        if self._keeps_loss and not self._is_futile:
            return f"loss at most {self.bound.upper:.3g} {told}; {asked}"
        if not self.bound.n:
            return f"nothing found on any of {self._empty_frames} frames, which tells nothing; {ended}"
        return f"loss {self.bound.mean:.3g}, perhaps {self.bound.upper:.3g}, {told}, and {ended}; {asked}"
