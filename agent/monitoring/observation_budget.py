"""How often the observer may look: a share of the time that inference takes, and faster for a while when it matters."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence

from agent.common.timing import RandomInterval

_SILENT_S, _GAPS = 2.0, 3.0  # after which a camera is passed over, or so many times what it took last


class CameraRota:
    """Whose frame is observed next: cameras take turns, and one that delivers nothing keeps nobody waiting.

    `now_ts` is the capture time that they have in common. Of recordings each has a time of its own, so that it goes on
    as theirs do in the mean, and begins at 0.
    """

    def __init__(self, cameras: Sequence[str]) -> None:
        self.now_ts = 0.0
        self._order = deque(cameras)
        self._heard_s: dict[str, float] = {}  # monotonic
        self._gap_s: dict[str, float] = {}
        self._last_ts: dict[str, float] = {}

    def is_turn(self, camera: str, ts: float, now_s: float) -> bool:
        """Whether it is the turn of this camera, which has a frame of capture time `ts` now (monotonic s)."""
        self._gap_s[camera] = now_s - self._heard_s.get(camera, now_s)
        self._heard_s[camera] = now_s
        while self._is_silent(self._order[0], now_s):
            self._order.rotate(-1)
        heard = sum(not self._is_silent(each, now_s) for each in self._order)
        self.now_ts += max(0.0, ts - self._last_ts.get(camera, ts)) / heard
        self._last_ts[camera] = ts
        return self._order[0] == camera

    def observed(self) -> None:
        """A frame of the camera whose turn it was is taken."""
        self._order.rotate(-1)

    def _is_silent(self, camera: str, now_s: float) -> bool:
        patience_s = max(_SILENT_S, _GAPS * self._gap_s.get(camera, 0.0))
        return now_s - self._heard_s.get(camera, -math.inf) > patience_s


_PAID_BACK = 0.5  # of what is earned, as long as there is debt
_SAVED = 1.5  # observations at most: who rested may not look often afterwards
_RECENT = 0.1  # weight of the newest observation in what a usual one takes
_SLOW = 2.0  # usual observations: what one takes beyond is paid back as debt is, and keeps nobody from looking
_FORGIVEN = 2.0  # of the slowest observations: what they take passes no limit


class ObservationBudget:
    """Says which frames are observed; `ts` are capture times, all else is wall time of whoever spends it.

    What frames take to be inferred earns `share` of that. At the normal pace an observation waits until the one before
    it is earned, and for `period_s` in any case. At the alert pace it waits for `alert_period_s` only and runs up debt,
    which half of all earnings then pays back: in the long run no more is spent than was earned, and meanwhile the scene
    is looked at half as often, but looked at. Debt has a limit, `most_at_once` usual observations; beyond it the normal
    pace holds. What slow observations take is debt too, and one or two of them make nobody blind; but where they alone
    have passed the limit, nothing is due until all earnings have paid that down. So in the long run the share holds
    whatever fails, even if nothing else was ever seen. A share of None does not count: the periods alone hold. All gaps
    are random.
    """

    def __init__(self, share: float | None, period_s: float, alert_period_s: float, most_at_once: int) -> None:
        self._share = share
        self._period_s, self._alert_period_s = period_s, alert_period_s
        self._most_at_once = most_at_once
        self._clock = RandomInterval(period_s)
        self._random = random.Random(0)
        self._alert = self._on_credit = False
        self._balance_s = self._wanted_s = 0.0  # an observation is due when the first reaches the second
        self._debt_s = self._usual_s = 0.0
        self._overdue_s = self._slowest_s = 0.0  # of the debt, what slow observations made; the slowest of these
        self._inferred_s = self._spent_s = 0.0

    @property
    def debt_s(self) -> float:
        """What was spent ahead, and is being paid back."""
        return self._debt_s

    @property
    def spent(self) -> float:
        """Of all inference so far, how much more was spent on observing: 0.02 for one part in fifty."""
        return self._spent_s / self._inferred_s if self._inferred_s else 0.0

    def set_pace(self, alert: bool) -> None:
        """Observe at the alert pace, or at the normal one."""
        self._alert = alert

    def earn(self, inferred_s: float) -> None:
        """A frame took so long to be inferred."""
        self._inferred_s += inferred_s
        if self._share is None:
            return
        earned_s = self._share * inferred_s
        repaid_s = min(self._debt_s, earned_s if self._is_broke else _PAID_BACK * earned_s)
        self._debt_s -= repaid_s
        self._overdue_s = max(0.0, self._overdue_s - repaid_s)
        if not self._overdue_s:
            self._slowest_s = 0.0
        self._balance_s = min(self._balance_s + earned_s - repaid_s, _SAVED * self._usual_s)

    def spend(self, observed_s: float, failed: bool = False) -> None:
        """The observation that was due last took so long; one that failed says nothing of what a usual one takes."""
        self._spent_s += observed_s
        expected_s = min(observed_s, _SLOW * self._usual_s)
        billed_s = 0.0 if self._on_credit else expected_s
        self._balance_s -= billed_s
        if self._share is not None:
            self._debt_s += observed_s - billed_s
            self._overdue_s += observed_s - expected_s
            self._slowest_s = max(self._slowest_s, observed_s)
        if not self._on_credit:
            self._wanted_s = self._random.uniform(-0.5, 0.5) * billed_s
        if failed:
            return
        if observed_s < self._usual_s or not self._usual_s:  # the first one, which warms up, is no measure for long
            self._usual_s += 0.5 * (observed_s - self._usual_s)
        else:
            self._usual_s += _RECENT * (min(observed_s, _SLOW * self._usual_s) - self._usual_s)

    def due(self, ts: float) -> bool:
        """Whether a frame of capture time `ts` is to be observed."""
        if self._is_broke:
            return False
        affordable = self._share is None or self._debt_s < self._most_at_once * self._usual_s
        quick = self._alert and affordable
        if self._share is not None and not quick and self._balance_s < self._wanted_s:
            return False
        period_s = self._alert_period_s if quick else self._period_s
        if period_s != self._clock.period_s:
            self._clock.change(period_s)
        if not self._clock.due(ts):
            return False
        self._on_credit = quick and self._share is not None
        return True

    @property
    def _is_broke(self) -> bool:
        """Whether slow observations have taken so much that it has to be paid down first."""
        return self._overdue_s > self._most_at_once * self._usual_s + _FORGIVEN * self._slowest_s
