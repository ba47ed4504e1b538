"""Fidelity below what the owner accepts, though the scales fit the scene: then INT8 itself is what costs it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.common.errors import AgentError
from agent.common.state_files import StateFile
from agent.planning.precision_raise import EXHAUSTED
from calibrate.errors import TaredError

_ATTEMPTS_SCHEMA = 1
_MOST = 100  # artefacts
# What tells of a candidate: by its verdict, as its child compared it, or on probation.
_REFUSED = (
    *(f"recalibration.{reason}" for reason in ("refused", "deadline", "crash")),
    *(f"probation.{reason}" for reason in ("fidelity", "latency", "output", "error", "hang")),
)
_RECALLED = "probation.recalled"


class PrecisionAttempts:
    """What was tried in vain, by the artefact whose fidelity it was for, and what is not to be tried.

    It holds as long as the owner's word is the same, in the file at `path` over restarts too, for the last hundred
    artefacts. A file of another word, or one that cannot be understood, is begun anew.
    """

    def __init__(self, path: Path | None, origin: str, on_error: Callable[[AgentError], None]) -> None:
        """path: None keeps nothing over a restart, as for a recording. origin: the owner's word, of `Service`.

        Raises AgentError (`attempts.schema`) for the file of a newer tared.
        """
        self._origin = origin
        self._file = StateFile(path, _ATTEMPTS_SCHEMA, "attempts.write", on_error)
        # How many candidates were refused; None where there is to be no other. The latest is the last.
        self._refused: dict[str, int | None] = self._file.read(self._take) or {}

    def next_rung(self, artefact: str) -> int:
        """What to try next for it, as in `Raising`; 0 where nothing is left to try, or nothing to be tried."""
        refused = self._refused.get(artefact, 0)
        return 0 if refused is None else refused + 1

    def failed(self, artefact: str, error: TaredError) -> None:
        """An attempt ended with this error.

        Only what was refused, by its verdict or for what it did, and that nothing is left, tell of precision: a full
        disk, a child that was killed, or a job that took too long do not, and it is tried again as it was. What the
        operator took back on probation is forbidden.
        """
        refused = self._refused.get(artefact, 0)
        if error.code in (EXHAUSTED, _RECALLED):
            self._note(artefact, None)
        elif error.code in _REFUSED and refused is not None:
            self._note(artefact, refused + 1)

    def forbid(self, artefact: str) -> None:
        """Precision was raised for it, and the operator took that back: not again, and no further."""
        self._note(artefact, None)

    def _note(self, artefact: str, refused: int | None) -> None:
        self._refused.pop(artefact, None)
        self._refused[artefact] = refused
        self._refused = dict(list(self._refused.items())[-_MOST:])
        self._file.write({"origin": self._origin, "refused": self._refused})

    def _take(self, document: Mapping[str, Any]) -> dict[str, int | None]:
        """Raises KeyError, TypeError, ValueError for what `_note` has not written, and for another word's."""
        rows = list(document["refused"].items())[-_MOST:]
        if document["origin"] != self._origin or not all(each is None or each > 0 for _, each in rows):
            raise ValueError("attempts of another word, or that nobody made")
        return {artefact: None if each is None else int(each) for artefact, each in rows}


ROLLBACK_LOOP = "recalibration.rollback_loop"
_SCHEMA = 2
_ADDED: Mapping[int, Mapping[str, Any]] = {1: {"rollbacks": []}}
_DAY_S = 86_400.0
_STEP_S = 1.0  # by which a clock has been set, and not only slewed


class AutomationLimits:
    """At most `per_day` jobs in any 24 hours; a pause after a job that failed, and one after a switch of regimes. After
    `rollbacks_per_day` candidates that were taken out of service again, neither until a day is over.

    Within a process only monotonic time counts. The file at `path` has wall-clock times, which are written anew when
    that clock has been set. A time from the future counts as now: whatever a clock was set to, a restart makes nothing
    wait longer than its own pause, or a day. One that lies ahead by more than a day is dropped: on a board that starts
    without the time it would count as now at every boot. A file that cannot be understood is begun anew. A disk
    that refuses is told of once.
    """

    def __init__(
        self,
        path: Path | None,
        per_day: int,
        job_pause_s: float,
        switch_pause_s: float,
        rollbacks_per_day: int,
        on_error: Callable[[AgentError], None],
    ) -> None:
        """path: None keeps nothing over a restart, as for a recording, which is news each time.

        Raises AgentError (`restraint.schema`) for the file of a newer tared.
        """
        self._file = StateFile(path, _SCHEMA, "restraint.write", on_error, _ADDED)
        self._on_error = on_error
        self._job_pause_s, self._switch_pause_s = job_pause_s, switch_pause_s
        self._jobs_s: deque[float] = deque(maxlen=per_day)  # monotonic times, as all below
        self._rollbacks_s: deque[float] = deque(maxlen=rollbacks_per_day)
        self._failed_s = self._switched_s = -math.inf
        self._ahead_s = time.time() - time.monotonic()  # of the wall clock, when it was last looked at
        if self._file.read(self._take) is not None:
            self._write()  # what came from the future would hold again at every start
        if self.loops:
            self._tell_of_loop()

    @property
    def loops(self) -> bool:
        """Whether as many rollbacks as are allowed lie within a day."""
        rollbacks_s = self._rollbacks_s
        return len(rollbacks_s) == rollbacks_s.maxlen and time.monotonic() - rollbacks_s[0] < _DAY_S

    @property
    def may_start(self) -> bool:
        """Whether a job may start by itself."""
        self._follow_clock()
        return not self.loops and time.monotonic() - self._failed_s >= self._job_pause_s

    @property
    def may_switch(self) -> bool:
        """Whether there may be a switch of regimes."""
        self._follow_clock()
        return not self.loops and time.monotonic() - self._switched_s >= self._switch_pause_s

    @property
    def has_job_left(self) -> bool:
        """Whether there may be one more job today."""
        return len(self._jobs_s) != self._jobs_s.maxlen or time.monotonic() - self._jobs_s[0] >= _DAY_S

    def takes_job(self) -> bool:
        """Whether there may be one more job today, which then counts."""
        if not self.has_job_left:
            return False
        self._jobs_s.append(time.monotonic())
        self._write()
        return True

    def pause_jobs(self) -> None:
        """A job has failed: what failed it may pass, but not at once."""
        self._failed_s = time.monotonic()
        self._write()

    def rolled_back(self) -> None:
        """A candidate was taken out of service again, or the process ended while it was on probation.

        Where that was one too many, on_error hears `recalibration.rollback_loop`, and again at each restart.
        """
        looped = self.loops
        self._rollbacks_s.append(time.monotonic())
        self._write()
        if self.loops and not looped:
            self._tell_of_loop()

    def clear_rollbacks(self) -> None:
        """A candidate that the operator asked for stays: the cause is removed."""
        if self._rollbacks_s:
            self._rollbacks_s.clear()
            self._write()

    def pause_switches(self) -> None:
        """There is a switch of regimes now."""
        self._switched_s = time.monotonic()
        self._write()

    def _tell_of_loop(self) -> None:
        found = f"{len(self._rollbacks_s)} candidates rolled back in a day"
        remedy = "see the rollback events; command a recalibration once their cause is removed"
        expected = "candidates that stay: none starts by itself any more"
        self._on_error(AgentError(ROLLBACK_LOOP, found, expected, remedy))

    def _follow_clock(self) -> None:
        if abs(time.time() - time.monotonic() - self._ahead_s) > _STEP_S:
            self._write()

    def _take(self, document: Mapping[str, Any]) -> bool:
        """Go on with what `_write` kept. Raises KeyError, TypeError, ValueError for anything else."""
        jobs_s, rollbacks_s = (
            sorted(filter(math.isfinite, (self._as_monotonic(wall_s) for wall_s in document[key])))
            for key in ("jobs", "rollbacks")
        )
        failed_s, switched_s = (
            -math.inf if document[key] is None else self._as_monotonic(document[key]) for key in ("failed", "switched")
        )
        self._jobs_s.extend(jobs_s)  # of more than are allowed now the newest count
        self._rollbacks_s.extend(rollbacks_s)
        self._failed_s, self._switched_s = failed_s, switched_s
        return True

    def _as_monotonic(self, wall_s: Any) -> float:
        """-inf for what is dropped. Raises ValueError, TypeError for what is no time."""
        if not math.isfinite(wall_s):
            raise ValueError("a time that no clock shows")
        time_s, now_s = float(wall_s) - self._ahead_s, time.monotonic()
        return min(time_s, now_s) if time_s <= now_s + _DAY_S else -math.inf

    def _write(self) -> None:
        self._ahead_s = time.time() - time.monotonic()
        jobs, rollbacks = (
            [time_s + self._ahead_s for time_s in times_s] for times_s in (self._jobs_s, self._rollbacks_s)
        )
        failed, switched = (
            time_s + self._ahead_s if math.isfinite(time_s) else None for time_s in (self._failed_s, self._switched_s)
        )
        self._file.write({"jobs": jobs, "rollbacks": rollbacks, "failed": failed, "switched": switched})
