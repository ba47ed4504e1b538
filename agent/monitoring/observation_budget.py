"""Decide how often frames are observed: within a share of the inference time, and faster for a while on credit.

`ObservationBudget` limits the rate over all cameras. `CameraRota` decides which camera's frame is observed next.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence

from agent.common.timing import RandomInterval

_SAVED = 1.5  # observations that the normal pace may save up: after a pause it does not catch up
_REPAID = 0.5  # part of the earnings that repays, while there is debt
_SLOW = 2.0  # usual observations: what one takes beyond that is paid on credit
_RECENT = 0.1  # weight of the newest observation in the usual time
_EXHAUSTED = 2.0  # bursts of debt: nothing is observed until some of it is repaid


class ObservationBudget:
    """Say which frames are observed: a token bucket for the normal pace, and credit for a burst.

    1. Each second of inference earns `share` seconds of observing.
    2. At the normal pace an observation waits for `period_s`, and until the bucket holds the time of a usual one.
       Both are drawn at random around their means, so that no rhythm of the scene is aliased.
    3. At the alert pace it waits for `alert_period_s` only and is paid on credit: its time becomes debt.
    4. Half of all earnings repay debt; the normal pace goes on with the other half, at half its rate.
    5. From a burst of debt on, `burst` usual observations, an alert gets the normal pace. From two bursts on nothing
       is observed. Only observations that take far longer than usual lead there, for the excess is debt as well.

    So in the long run no more than `share` is spent, whatever fails: never more than two bursts and one observation
    ahead. Times are wall time of the observer; `ts` is capture time.
    """

    def __init__(self, share: float | None, period_s: float, alert_period_s: float, burst: int) -> None:
        """Args:
        share: Of the inference time; None: the two periods alone count.
        period_s: Seconds of capture time between two observations at the normal pace, in the mean.
        alert_period_s: The same at the alert pace.
        burst: Usual observations that an alert may be ahead of the earnings.
        """
        self._share = share
        self._period_s, self._alert_period_s = period_s, alert_period_s
        self._burst = burst
        self._interval = RandomInterval(period_s)
        self._random = random.Random(0)
        self._is_alert = self._on_credit = False
        self._tokens_s = self._needed_s = 0.0  # normal pace: an observation is due when the first reaches the second
        self.debt_s = self._usual_s = 0.0  # spent ahead of the earnings, being repaid; what one usually takes
        self._inferred_s = self._spent_s = 0.0

    @property
    def spent_share(self) -> float:
        """The time spent on observing, relative to all inference so far: 0.02 for one part in fifty."""
        return self._spent_s / self._inferred_s if self._inferred_s else 0.0

    def set_pace(self, alert: bool) -> None:
        """Observe at the alert pace, or at the normal one."""
        self._is_alert = alert

    def earn(self, inferred_s: float) -> None:
        """Count the inference time of a frame."""
        self._inferred_s += inferred_s
        earned_s = (self._share or 0.0) * inferred_s
        repaid_s = min(self.debt_s, earned_s if self._is_exhausted else _REPAID * earned_s)
        self.debt_s -= repaid_s
        self._tokens_s = min(self._tokens_s + earned_s - repaid_s, _SAVED * self._usual_s)

    def spend(self, observed_s: float, failed: bool = False) -> None:
        """Pay for the observation that was due last; the time of one that failed says nothing of a usual one."""
        self._spent_s += observed_s
        if self._share is not None:
            paid_s = 0.0 if self._on_credit else min(observed_s, _SLOW * self._usual_s)
            self._tokens_s -= paid_s
            self.debt_s += observed_s - paid_s
            if not self._on_credit:
                self._needed_s = self._random.uniform(-0.5, 0.5) * paid_s
        if not failed:  # the first observation warms up, and is no measure for long
            is_faster = observed_s < self._usual_s or not self._usual_s
            self._usual_s += (0.5 if is_faster else _RECENT) * (observed_s - self._usual_s)

    def due(self, ts: float) -> bool:
        """Say whether a frame of capture time `ts` is observed."""
        if self._is_exhausted:
            return False
        is_quick = self._is_alert and (self._share is None or self.debt_s < self._burst * self._usual_s)
        if self._share is not None and not is_quick and self._tokens_s < self._needed_s:
            return False
        period_s = self._alert_period_s if is_quick else self._period_s
        if period_s != self._interval.period_s:
            self._interval.set_period(period_s)
        if not self._interval.due(ts):
            return False
        self._on_credit = is_quick and self._share is not None
        return True

    @property
    def _is_exhausted(self) -> bool:
        return self.debt_s > _EXHAUSTED * self._burst * self._usual_s


# Seconds after which a camera that delivers nothing is passed over, or so many times its last gap if that is longer.
_SILENT_S, _GAPS = 2.0, 3.0


class CameraRota:
    """Say whose frame is observed next: cameras take turns, and one that delivers nothing keeps nobody waiting.

    `now_ts` is the capture time that they have in common. Each recording has a time of its own, so `now_ts` begins at
    0 and advances as theirs do in the mean.
    """

    def __init__(self, cameras: Sequence[str]) -> None:
        self.now_ts = 0.0
        self._order = deque(cameras)
        self._last_frame_s: dict[str, float] = {}  # monotonic
        self._gap_s: dict[str, float] = {}
        self._last_ts: dict[str, float] = {}

    def is_turn(self, camera: str, ts: float, now_s: float) -> bool:
        """Note a frame of capture time `ts` at `now_s` (monotonic); return whether it is this camera's turn."""
        self._gap_s[camera] = now_s - self._last_frame_s.get(camera, now_s)
        self._last_frame_s[camera] = now_s
        while self._is_silent(self._order[0], now_s):
            self._order.rotate(-1)
        delivering = sum(not self._is_silent(each, now_s) for each in self._order)
        self.now_ts += max(0.0, ts - self._last_ts.get(camera, ts)) / delivering
        self._last_ts[camera] = ts
        return self._order[0] == camera

    def end_turn(self) -> None:
        """Pass the turn on: a frame of the camera whose turn it was is observed."""
        self._order.rotate(-1)

    def _is_silent(self, camera: str, now_s: float) -> bool:
        patience_s = max(_SILENT_S, _GAPS * self._gap_s.get(camera, 0.0))
        return now_s - self._last_frame_s.get(camera, -math.inf) > patience_s
