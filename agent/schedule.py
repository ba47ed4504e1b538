"""Jobs by the clock: at each listed local time of each day, once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from agent.errors import AgentError
from agent.job_journal import JobJournal

_LATE_S = 3600.0  # within which a time still counts: the daemon was busy, or not there
_DAY_S = 86_400.0
_SET_S = 1_735_689_600.0  # 1 January 2025, UTC: a clock before that has not been set since the board has power


def answered_times(journal: JobJournal) -> list[str]:
    """What earlier processes answered, as `Schedule.due` named it."""
    try:
        records = journal.records()
    except AgentError:  # told of when it was opened, and no job begins that cannot be journaled
        return []
    return [str(record.request.get("due")) for record in records if record.trigger == "schedule"]


class Schedule:
    """Local times of day as HH:MM. `fired` is what earlier processes answered, as `due` named it.

    A time is named with its day, so that a clock that is set back finds it answered, and one that is set forward finds
    each time at most once. A time that summer time leaves out is taken an hour later; one that comes twice counts once.
    """

    def __init__(self, times: Sequence[str], fired: Iterable[str] = ()) -> None:
        self._times = [(int(hour), int(minute)) for hour, minute in (each.split(":") for each in times)]
        self._fired = set(fired)

    def due(self, now_s: float) -> str:
        """The latest time that waits for an answer at this wall-clock time, as `2026-01-31 03:00`; empty for none."""
        if now_s < _SET_S:
            return ""
        found = [
            (began_s, name)
            for day_s in (now_s, now_s - _DAY_S)  # shortly after midnight an evening's time may still wait
            for began_s, name in self._of_day(time.localtime(day_s))
            if 0.0 <= now_s - began_s < _LATE_S and name not in self._fired
        ]
        return max(found)[1] if found else ""

    def answered(self, name: str) -> None:
        """A job was begun for it."""
        self._fired.add(name)

    def _of_day(self, day: time.struct_time) -> list[tuple[float, str]]:
        return [
            (
                time.mktime((day.tm_year, day.tm_mon, day.tm_mday, hour, minute, 0, 0, 0, -1)),
                f"{day.tm_year:04}-{day.tm_mon:02}-{day.tm_mday:02} {hour:02}:{minute:02}",
            )
            for hour, minute in self._times
        ]
