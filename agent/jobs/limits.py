"""Limit what the daemon starts by itself: how often, after what pause, and which precision it tries next.

`AutomationLimits` counts jobs, failures, switches and rollbacks. Nothing starts by itself after too many rollbacks in a
day. `PrecisionAttempts` remembers, for each artefact of low fidelity, which rungs were tried in vain.
Both survive a restart in files of the state directory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.state_files import StateFile
from agent.planning.raising import EXHAUSTED
from calibrate.errors import TaredError

ROLLBACK_LOOP = "recalibration.rollback_loop"

_SCHEMA = 2
_DAY_S = 86_400.0
_STEP_S = 1.0  # a clock that moved by more was set, and not only slewed


@dataclass
class AutomationLimits:
    """Limits for jobs and switches that the daemon starts by itself.

    1. At most `per_day` jobs in any 24 hours.
    2. A pause after a job that failed, and another one after a switch of regimes.
    3. After `rollbacks_per_day` candidates that were rolled back within a day: neither job nor switch until a day after
       the first of them.

    Within a process only monotonic time counts. The file holds wall-clock times, which are written again when that
    clock has been set. A time from the future counts as now: whatever a clock was set to, a restart makes nothing wait
    longer than its own pause, or a day. A time that lies ahead by more than a day is dropped: on a board that starts
    without the time it would count as now at every boot.

    It starts with the limits of earlier processes. A file that cannot be parsed is started from scratch.

    Args:
        path: The file; None keeps nothing over a restart, as for a recording.
        on_error: Called with ROLLBACK_LOOP, and once for a disk that refuses.

    Raises AgentError (`restraint.schema`) for the file of a newer tared.
    """

    path: Path | None
    per_day: int
    job_pause_s: float
    switch_pause_s: float
    rollbacks_per_day: int
    on_error: Callable[[AgentError], None]
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self._file = StateFile(self.path, _SCHEMA, "restraint.write", self.on_error)
        self._jobs_s: deque[float] = deque(maxlen=self.per_day)  # monotonic times, as all below
        self._rollbacks_s: deque[float] = deque(maxlen=self.rollbacks_per_day)
        self._failed_s = self._switched_s = -math.inf
        # The wall clock's lead over the monotonic one, when they were last compared.
        self._ahead_s = self.clock.wall_s() - self.clock.monotonic_s()
        if self._file.read(self._restore) is not None:
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
        """Write the file again if the wall clock was set."""
        if abs(self.clock.wall_s() - self.clock.monotonic_s() - self._ahead_s) > _STEP_S:
            self._write()

    def _restore(self, document: Mapping[str, Any]) -> bool:
        """Go on with what `_write` kept. Raises KeyError, TypeError, ValueError for anything else."""
        jobs_s, rollbacks_s = (
            sorted(filter(math.isfinite, (self._as_monotonic(wall_s) for wall_s in document[key])))
            for key in ("jobs", "rollbacks")
        )
        failed_s, switched_s = (
            -math.inf if document[key] is None else self._as_monotonic(document[key]) for key in ("failed", "switched")
        )
        self._jobs_s.extend(jobs_s)  # where more are kept than are allowed now, the newest count
        self._rollbacks_s.extend(rollbacks_s)
        self._failed_s, self._switched_s = failed_s, switched_s
        return True

    def _as_monotonic(self, wall_s: Any) -> float:
        """Return -inf for a time that is dropped. Raises ValueError, TypeError for what is no time."""
        if not math.isfinite(wall_s):
            raise ValueError("a time that no clock shows")
        time_s, now_s = float(wall_s) - self._ahead_s, self.clock.monotonic_s()
        return min(time_s, now_s) if time_s <= now_s + _DAY_S else -math.inf

    def _write(self) -> None:
        self._ahead_s = self.clock.wall_s() - self.clock.monotonic_s()
        jobs, rollbacks = (
            [time_s + self._ahead_s for time_s in times_s] for times_s in (self._jobs_s, self._rollbacks_s)
        )
        failed, switched = (
            time_s + self._ahead_s if math.isfinite(time_s) else None for time_s in (self._failed_s, self._switched_s)
        )
        self._file.write({"jobs": jobs, "rollbacks": rollbacks, "failed": failed, "switched": switched})


_ATTEMPTS_SCHEMA = 1
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
    artefacts. A file of others, or one that cannot be parsed, is started from scratch.
    """

    def __init__(self, path: Path | None, origin: str, on_error: Callable[[AgentError], None]) -> None:
        """Read the attempts of earlier processes.

        Args:
            path: The file; None keeps nothing over a restart, as for a recording.
            origin: Fingerprint of what the attempts depend on, as `raising_id` (agent.jobs.refusal) returns it.
            on_error: Called once for a disk that refuses.

        Raises AgentError (`attempts.schema`) for the file of a newer tared.
        """
        self._origin = origin
        self._file = StateFile(path, _ATTEMPTS_SCHEMA, "attempts.write", on_error)
        # By artefact, how many candidates were refused; None: no other is allowed. The latest artefact is the last.
        self._refused: dict[str, int | None] = self._file.read(self._parse) or {}

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
        self._file.write({"origin": self._origin, "refused": self._refused})

    def _parse(self, document: Mapping[str, Any]) -> dict[str, int | None]:
        """Raises KeyError, TypeError, ValueError for what `_note` has not written, and for other rules."""
        rows = list(document["refused"].items())[-_MOST_ARTEFACTS:]
        if document["origin"] != self._origin or not all(each is None or each > 0 for _, each in rows):
            raise ValueError("attempts under other rules, or attempts that never took place")
        return {artefact: None if each is None else int(each) for artefact, each in rows}
