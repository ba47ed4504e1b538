"""The states of a job, and which may follow which."""

from __future__ import annotations

from enum import Enum


class JobState(str, Enum):
    """In the order in which a job goes through them; a job may pass over some, and never goes back."""

    REQUESTED = "REQUESTED"
    COLLECTING = "COLLECTING"
    CALIBRATING = "CALIBRATING"
    PLANNING = "PLANNING"
    BUILDING = "BUILDING"
    VALIDATING = "VALIDATING"
    PROBATION = "PROBATION"
    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def over(self) -> bool:
        """Whether a job ends in it."""
        return self in _OVER

    def may_become(self, later: JobState) -> bool:
        """Whether a job may go from this state to the later one."""
        if self.over:
            return False
        if later is JobState.COMMITTED:
            return self in _SERVES_NEXT
        if later is JobState.ROLLED_BACK:
            return self is JobState.PROBATION
        return later.over or _ORDER.index(self) < _ORDER.index(later)


_ORDER = tuple(JobState)
WORK = _ORDER[: _ORDER.index(JobState.PROBATION)]  # in which there is no candidate yet
_OVER = frozenset({JobState.COMMITTED, JobState.ROLLED_BACK, JobState.FAILED, JobState.CANCELLED})
# What was built for another runtime or of another model is not on probation: there is nothing to go back to.
_SERVES_NEXT = frozenset({JobState.BUILDING, JobState.PROBATION})
