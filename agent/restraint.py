"""What keeps the daemon from acting too often by itself, however often it is started again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.errors import AgentError
from agent.state_file import StateFile

_SCHEMA = 1
_DAY_S = 86_400.0
_STEP_S = 1.0  # by which a clock has been set, and not only slewed


class Restraint:
    """At most `per_day` jobs in any 24 hours; a pause after a job that failed, and one after a switch of regimes.

    Within a process only monotonic time counts. The file at `path` has wall-clock times, which are written anew when
    that clock has been set. A time from the future counts as now: whatever a clock was set to, a restart makes nothing
    wait longer than its own pause, or a day. A file that is none of this version's is begun anew. A disk that refuses
    is told of once.
    """

    def __init__(
        self,
        path: Path | None,
        per_day: int,
        job_pause_s: float,
        switch_pause_s: float,
        on_error: Callable[[AgentError], None],
    ) -> None:
        """path: None keeps nothing over a restart, as for a recording, which is news each time."""
        self._file = StateFile(path, _SCHEMA, "restraint.write", on_error)
        self._job_pause_s, self._switch_pause_s = job_pause_s, switch_pause_s
        self._jobs_s: deque[float] = deque(maxlen=per_day)  # monotonic times, as the two below
        self._failed_s = self._switched_s = -math.inf
        self._ahead_s = time.time() - time.monotonic()  # of the wall clock, when it was last looked at
        if self._file.read(self._take) is not None:
            self._write()  # what came from the future would hold again at every start

    @property
    def may_start(self) -> bool:
        """Whether a job may start by itself."""
        self._follow_clock()
        return time.monotonic() - self._failed_s >= self._job_pause_s

    @property
    def may_switch(self) -> bool:
        """Whether there may be a switch of regimes."""
        self._follow_clock()
        return time.monotonic() - self._switched_s >= self._switch_pause_s

    def takes_job(self) -> bool:
        """Whether there may be one more job today, which then counts."""
        now_s = time.monotonic()
        if len(self._jobs_s) == self._jobs_s.maxlen and now_s - self._jobs_s[0] < _DAY_S:
            return False
        self._jobs_s.append(now_s)
        self._write()
        return True

    def pause_jobs(self) -> None:
        """A job has failed: what failed it may pass, but not at once."""
        self._failed_s = time.monotonic()
        self._write()

    def pause_switches(self) -> None:
        """There is a switch of regimes now."""
        self._switched_s = time.monotonic()
        self._write()

    def _follow_clock(self) -> None:
        if abs(time.time() - time.monotonic() - self._ahead_s) > _STEP_S:
            self._write()

    def _take(self, document: Mapping[str, Any]) -> bool:
        """Go on with what `_write` kept. Raises KeyError, TypeError, ValueError for anything else."""
        jobs_s = sorted(self._as_monotonic(wall_s) for wall_s in document["jobs"])
        failed_s, switched_s = (
            -math.inf if document[key] is None else self._as_monotonic(document[key]) for key in ("failed", "switched")
        )
        self._jobs_s.extend(jobs_s)  # of more than are allowed now the newest count
        self._failed_s, self._switched_s = failed_s, switched_s
        return True

    def _as_monotonic(self, wall_s: Any) -> float:
        """Raises ValueError, TypeError for what is no time."""
        if not math.isfinite(wall_s):
            raise ValueError("a time that no clock shows")
        return min(float(wall_s) - self._ahead_s, time.monotonic())

    def _write(self) -> None:
        self._ahead_s = time.time() - time.monotonic()
        jobs = [time_s + self._ahead_s for time_s in self._jobs_s]
        failed, switched = (
            time_s + self._ahead_s if math.isfinite(time_s) else None for time_s in (self._failed_s, self._switched_s)
        )
        self._file.write({"jobs": jobs, "failed": failed, "switched": switched})
