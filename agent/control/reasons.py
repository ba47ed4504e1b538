"""Say why the board is degraded, and what keeps a job from starting: one sentence each, with its remedy.

`explain` makes the sentences. The command `status`, the topic `status`, telemetry, metrics, Home Assistant and the
summary all show the same ones. A sentence names no figure that changes from moment to moment, so that it is published
and counted once for each state of affairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agent.control.snapshot import BoardSnapshot
from agent.core.due import CAP, outage_hindrance
from agent.core.state import Hindrance, Job, JobState
from agent.monitoring.camera_monitor import CameraStates
from agent.validation.verdict import MIN_INFORMATIVE
from calibrate.errors import TaredError


@dataclass(frozen=True)
class Reasons:
    """Sentences for people, and a code for programs; each is empty where there is nothing to say.

    Args:
        degraded: Why the float reference serves.
        held_back: Why a job that is due does not start, or does not go on.
        code: Of what holds it back: a configuration key, or an error code.
    """

    degraded: str = ""
    held_back: str = ""
    code: str = ""

    def as_dict(self) -> dict[str, str | None]:
        """Return the reasons as `status` and telemetry have them; None where there is nothing to say."""
        return {
            "degraded": self.degraded or None,
            "held_back": self.held_back or None,
            "held_back_code": self.code or None,
        }

    @property
    def sentence(self) -> str:
        """The one to show where there is room for one."""
        return self.degraded or self.held_back


def explain(board: BoardSnapshot) -> Reasons:
    """Return the reasons as of this moment."""
    job, error = board.state.job, board.state.last_error
    if job is not None:
        hindrance = _job_hindrance(job, board.states, board.collected)
    elif board.is_stuck:
        remedy = "restart the daemon, to free the memory that the candidate holds"
        hindrance = Hindrance("probation.hang", "a candidate that was rolled back still hangs", remedy)
    else:
        hindrance = board.state.held_back
    if hindrance is not None and error is not None and hindrance.code in _AFTER_FAILURES:
        found, remedy = f"{hindrance.found}: {error.found}", f"{error.remedy}; {hindrance.remedy}"
        hindrance = Hindrance(hindrance.code, found, remedy)
    degraded = _degraded(job, hindrance, error, board.unused) if board.is_degraded else ""
    if hindrance is None:
        return Reasons(degraded)
    return Reasons(degraded, f"{hindrance.found}; {hindrance.remedy}", hindrance.code)


_AFTER_FAILURES = ("recalibration.cooldown", CAP)  # hindrances whose cause is the last job's error


def _degraded(
    job: Job | None, hindrance: Hindrance | None, error: TaredError | None, unused: Iterable[TaredError]
) -> str:
    if hindrance is not None:
        found, remedy = hindrance.found, hindrance.remedy
    elif job is not None:
        found, remedy = f"the job that builds an engine is at {job.state.value}", "wait for its end"
    elif error is not None:
        found, remedy = f"the last job made no engine: {error.found}", error.remedy
    else:
        found, remedy = "no job has started yet", "wait for the first frames"
    named = error.found if error is not None and job is None else None
    others = [f"; {each.found}; {each.remedy}" for each in unused if named is None or named not in each.found]
    return f"the float reference serves, because {found}; {remedy}{''.join(others)}"


def _job_hindrance(job: Job, states: CameraStates, counts: tuple[int, int]) -> Hindrance | None:
    """Return what keeps the running job from going on."""
    if job.waits:
        remedy = "cool the board, end other work on it, or change recalibration.headroom"
        return Hindrance("headroom", "the job waits for headroom on the board", remedy)
    if job.state is not JobState.COLLECTING:
        return None
    collected, informative = counts
    if collected < job.frames or informative >= MIN_INFORMATIVE:
        return outage_hindrance(states)
    troubles = sorted({state.view.trouble for state in states.values() if state.view.trouble})
    view = f" (the view is {', '.join(troubles)})" if troubles else ""
    found = f"the job waits for frames on which something is seen{view}"
    return Hindrance("collection", found, "check the camera, or wait until something is in view")
