"""Would a recalibration on the newest frames gain more than is tolerated? Judged on frames that come after them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

from calibrate.evidence import DriftDetector

_ENOUGH = 8  # frames, for scales that mean something
_IN_A_ROW = 2  # suspicious blocks: one is soon there
_LOOK_S = 60.0  # looking closely at a suspicion
_REST_S = 120.0, 1920.0  # from the beginning of one look to that of the next: doubled while suspicion comes back
_FORGIVEN_S = 600.0  # without suspicion
_WARNED_S = 600.0  # looking closely at a warning: one that lasts must not use up the credit
_WARNING_ENDS = 10.0  # the e-value; it began at 100
UNSEEN_S = 30.0  # between two observations, beyond which time that passed was not seen

Seen = TypeVar("Seen")
Scales = TypeVar("Scales")


class Recent(Generic[Seen, Scales]):
    """The scales that the newest frames would be given: of 8 to 24 of them, until the newest 8 are together."""

    def __init__(self, merge: Callable[[Seen, Seen], Seen], best: Callable[[Seen], Scales]) -> None:
        self.seen: Seen | None = None
        self.scales: Scales | None = None  # None while too few frames were seen
        self._merge, self._best = merge, best
        self._frames = 0

    def add(self, block: Seen, frames: int) -> None:
        if self._frames >= 2 * _ENOUGH:
            self.seen, self._frames = None, 0
        self.seen = block if self.seen is None else self._merge(self.seen, block)
        self._frames += frames
        if self._frames >= _ENOUGH:
            self.scales = self._best(self.seen)

    def restart(self) -> None:
        """What was seen says nothing of what comes."""
        self.seen, self.scales, self._frames = None, None, 0


class GainEvidence(Generic[Seen, Scales]):
    """Evidence from blocks of frames, one at a time, for a drift detector.

    The best scales of a block flatter it: of one frame, by half a dB in the mean, and by more than 2 now and then. So a
    block counts by the scales of the frames *before* it: by what a recalibration on those would gain on this one. These
    are chosen without looking at it, so that the detector's guarantee is about that gain, and until there are enough
    of them nothing counts.

    Blocks in a row that would gain too much under scales of their own are worth a closer look; where the newest frames'
    scales do not suit them either, the scene has just changed, and what was seen before is dropped.
    """

    def __init__(
        self,
        detector: DriftDetector,
        tolerance_db: float,
        merge: Callable[[Seen, Seen], Seen],
        best: Callable[[Seen], Scales],
    ) -> None:
        self.detector = detector
        self.recent = Recent(merge, best)
        self.warns = False
        self._tolerance_db = tolerance_db
        self._suspicious = 0  # blocks in a row
        self._looked_s = self._unsuspected_s = inf  # since the last look began, and since there was a suspicion
        self._rest_s, self._warned_s = _REST_S[0], 0.0

    @property
    def looks_closely(self) -> bool:
        """Whether more frames should be observed than usual."""
        return self._looked_s < _LOOK_S or (self.warns and self._warned_s < _WARNED_S)

    def update(self, block: Seen, frames: int, seconds: float, own_db: float, gain_db: float | None) -> None:
        """Take a block of so many frames that lasted so long.

        own_db: the gain in dB under the block's own best scales; gain_db: under `recent.scales`, None without them.
        """
        if gain_db is not None:
            self.detector.update(gain_db)
        self._suspicious = self._suspicious + 1 if own_db > self._tolerance_db else 0
        self._watch_closely(min(seconds, UNSEEN_S))
        if self._suspicious >= _IN_A_ROW and gain_db is not None and own_db - gain_db > self._tolerance_db:
            self.recent.restart()
        self.recent.add(block, frames)

    def _watch_closely(self, seconds: float) -> None:
        self._looked_s += seconds
        self._unsuspected_s += seconds
        if self._suspicious >= _IN_A_ROW:
            if self._looked_s >= self._rest_s:
                again = self._unsuspected_s < _FORGIVEN_S
                self._looked_s, self._rest_s = 0.0, min(2.0 * self._rest_s, _REST_S[1]) if again else _REST_S[0]
            self._unsuspected_s = 0.0
        before, e_value = self.warns, self.detector.e_value
        self.warns = self.detector.warning_detected or (before and e_value >= _WARNING_ENDS)
        self._warned_s = self._warned_s + seconds if before and self.warns else 0.0
