"""Limit what the daemon starts by itself: how often, after what pause, and which precision it tries next.

`AutomationLimits` counts jobs, failures, switches and rollbacks. Nothing starts by itself after too many rollbacks in a
day. `PrecisionAttempts` remembers, for each artefact of low fidelity, which rungs were tried in vain.
Both survive a restart in the board's state.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.planning.raising import EXHAUSTED
from agent.state.salvage import Row
from agent.state.store import StateStore
from calibrate.errors import TaredError

ROLLBACK_LOOP = "recalibration.rollback_loop"

_DAY_S = 86_400.0
_STEP_S = 1.0  # a clock that moved by more was set, and not only slewed


@dataclass
class AutomationLimits:
    """Limits for jobs and switches that the daemon starts by itself.

    1. At most `per_day` jobs in any 24 hours.
    2. A pause after a job that failed, and another one after a switch of regimes.
    3. After `rollbacks_per_day` candidates that were rolled back within a day: neither job nor switch until a day after
       the first of them.

    Within a process only monotonic time counts. The state holds wall-clock times, which are written again when that
    clock has been set. A time from the future counts as now: whatever a clock was set to, a restart makes nothing wait
    longer than its own pause, or a day. A time that lies ahead by more than a day is dropped: on a board that starts
    without the time it would count as now at every boot.

    It starts with the limits of earlier processes. on_error is called with ROLLBACK_LOOP.
    """

    state: StateStore
    per_day: int
    job_pause_s: float
    switch_pause_s: float
    rollbacks_per_day: int
    on_error: Callable[[AgentError], None]
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self._jobs_s: deque[float] = deque(maxlen=self.per_day)  # monotonic times, as all below
        self._rollbacks_s: deque[float] = deque(maxlen=self.rollbacks_per_day)
        self._failed_s = self._switched_s = -math.inf
        # The wall clock's lead over the monotonic one, when they were last compared.
        self._ahead_s = self.clock.wall_s() - self.clock.monotonic_s()
        if self.state.read("limits", self._restore) is not None:
            self._write()  # times from the future would hold again at every start
        if self.in_rollback_loop:
            self._report_loop()

    @property
    def in_rollback_loop(self) -> bool:
        """True if as many rollbacks as are allowed lie within a day."""
        rollbacks_s = self._rollbacks_s
        return len(rollbacks_s) == rollbacks_s.maxlen and self.clock.monotonic_s() - rollbacks_s[0] < _DAY_S

    @property
    def may_start(self) -> bool:
        """True if a job may start by itself."""
        self._follow_clock()
        return not self.in_rollback_loop and self.clock.monotonic_s() - self._failed_s >= self.job_pause_s

    @property
    def may_switch(self) -> bool:
        """True if a switch of regimes may start by itself."""
        self._follow_clock()
        return not self.in_rollback_loop and self.clock.monotonic_s() - self._switched_s >= self.switch_pause_s

    @property
    def below_daily_cap(self) -> bool:
        """True if one more job may start by itself today."""
        return len(self._jobs_s) != self._jobs_s.maxlen or self.clock.monotonic_s() - self._jobs_s[0] >= _DAY_S

    def count_job(self) -> bool:
        """Count a job that starts; False, and not counted, if there were too many today."""
        if not self.below_daily_cap:
            return False
        self._jobs_s.append(self.clock.monotonic_s())
        self._write()
        return True

    def pause_jobs(self) -> None:
        """Start the pause after a failed job: its cause may pass, but not at once."""
        self._failed_s = self.clock.monotonic_s()
        self._write()

    def count_rollback(self) -> None:
        """Count a candidate that was taken out of service, or whose process ended during its probation.

        If that was one too many, on_error is called with ROLLBACK_LOOP, and again at each restart.
        """
        looped = self.in_rollback_loop
        self._rollbacks_s.append(self.clock.monotonic_s())
        self._write()
        if self.in_rollback_loop and not looped:
            self._report_loop()

    def clear_rollbacks(self) -> None:
        """Forget the rollbacks: a candidate that the operator requested stays, so their cause is removed."""
        if self._rollbacks_s:
            self._rollbacks_s.clear()
            self._write()

    def pause_switches(self) -> None:
        """Start the pause after a switch of regimes."""
        self._switched_s = self.clock.monotonic_s()
        self._write()

    def _report_loop(self) -> None:
        found = f"{len(self._rollbacks_s)} candidates rolled back in a day"
        remedy = "see the rollback events; recalibrate by command once their cause is gone"
        expected = "candidates that stay in service; no job starts by itself any more"
        self.on_error(AgentError(ROLLBACK_LOOP, found, expected, remedy))

    def _follow_clock(self) -> None:
        """Write the times again if the wall clock was set."""
        if abs(self.clock.wall_s() - self.clock.monotonic_s() - self._ahead_s) > _STEP_S:
            self._write()

    def _restore(self, rows: Sequence[Row]) -> bool:
        """Go on with what `_write` kept. Raises KeyError, ValueError for anything else."""
        times_s: dict[str, list[float]] = {kind: [] for kind in ("job", "rollback", "failed", "switched")}
        for kind, wall_s in rows:
            times_s[kind].append(self._as_monotonic(wall_s))
        jobs_s, rollbacks_s, failed_s, switched_s = (sorted(filter(math.isfinite, each)) for each in times_s.values())
        self._jobs_s.extend(jobs_s)  # where more are kept than are allowed now, the newest count
        self._rollbacks_s.extend(rollbacks_s)
        self._failed_s, self._switched_s = (max(each, default=-math.inf) for each in (failed_s, switched_s))
        return True

    def _as_monotonic(self, wall_s: float) -> float:
        """Return -inf for a time that is dropped. Raises ValueError for what is no time."""
        if not math.isfinite(wall_s):
            raise ValueError("a time that no clock shows")
        time_s, now_s = float(wall_s) - self._ahead_s, self.clock.monotonic_s()
        return min(time_s, now_s) if time_s <= now_s + _DAY_S else -math.inf

    def _write(self) -> None:
        self._ahead_s = self.clock.wall_s() - self.clock.monotonic_s()
        kinds = {"job": self._jobs_s, "rollback": self._rollbacks_s}
        kinds |= {"failed": deque([self._failed_s]), "switched": deque([self._switched_s])}
        rows = [
            (kind, time_s + self._ahead_s)
            for kind, times_s in kinds.items()
            for time_s in times_s
            if math.isfinite(time_s)
        ]
        self.state.write("limits", rows)


_MOST_ARTEFACTS = 100
# The errors that judge a candidate: by its verdict, as its child compared it, or on probation.
REFUSED = (
    *(f"recalibration.{reason}" for reason in ("refused", "deadline", "crash")),
    *(f"probation.{reason}" for reason in ("fidelity", "latency", "output", "error", "hang")),
)
_RECALLED = "probation.recalled"


class PrecisionAttempts:
    """The raises of precision that were tried in vain, by the artefact whose low fidelity they were for.

    They hold as long as the configured plan, the rules and the settings of a raise stay the same, for the last hundred
    artefacts.
    """

    def __init__(self, state: StateStore, origin: str) -> None:
        """Read the attempts of earlier processes.

        origin: Fingerprint of what the attempts depend on, as `raising_id` (agent.jobs.refusal) returns it.
        """
        self._origin = origin
        self._state = state
        # By artefact, how many candidates were refused; None: no other is allowed. The latest artefact is the last.
        self._refused: dict[str, int | None] = state.read("attempts", self._parse) or {}

    def renew(self, origin: str) -> None:
        """Forget all attempts if what they depend on has changed."""
        if origin != self._origin:
            self._origin, self._refused = origin, {}

    def next_rung(self, artefact: str) -> int:
        """Return the rung to begin with for this artefact, as in PrecisionRaise.

        0: none is left, or trying is forbidden.
        """
        refused = self._refused.get(artefact, 0)
        return 0 if refused is None else refused + 1

    def note_failure(self, artefact: str, error: TaredError) -> None:
        """Note that an attempt ended with this error.

        1. A candidate that was refused, by its verdict or on probation, counts: the next rung is tried.
        2. No plan helps, or the operator took the candidate back on probation: no further attempt.
        3. Other errors say nothing of precision, such as a full disk, a killed child or a job that took too long: the
           same rung is tried again.
        """
        refused = self._refused.get(artefact, 0)
        if error.code in (EXHAUSTED, _RECALLED):
            self._note(artefact, None)
        elif error.code in REFUSED and refused is not None:
            self._note(artefact, refused + 1)

    def forbid(self, artefact: str) -> None:
        """Forbid further attempts for this artefact: the operator took back the precision that was raised for it."""
        self._note(artefact, None)

    def _note(self, artefact: str, refused: int | None) -> None:
        self._refused.pop(artefact, None)
        self._refused[artefact] = refused
        self._refused = dict(list(self._refused.items())[-_MOST_ARTEFACTS:])
        self._state.write("attempts", [(each, self._origin, count) for each, count in self._refused.items()])

    def _parse(self, rows: Sequence[Row]) -> dict[str, int | None]:
        """Return nothing of attempts under other rules. Raises ValueError for what `_note` has not written."""
        if not all(count is None or count > 0 for _, _, count in rows):
            raise ValueError("attempts that never took place")
        return {artefact: count for artefact, origin, count in rows[-_MOST_ARTEFACTS:] if origin == self._origin}
