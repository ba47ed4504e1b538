"""A job from its first frame to its candidate: collecting, headroom, and the child process."""

from __future__ import annotations

import math

from agent.collection.selection import HELD_OUT_EVERY
from agent.common.errors import AgentError
from agent.core import actions as act
from agent.core import ending
from agent.core import facts as fact
from agent.core.causes import UNSERVABLE, Cause, cause_of
from agent.core.kinds import FleetCalibration, NewModel, OfflineStart, RaisedPrecision, Requested, Scheduled, Trigger
from agent.core.state import JOINABLE, WORK, Job, JobState
from agent.core.turn import Turn
from agent.validation.verdict import MIN_INFORMATIVE

_COLLECTED_PERCENT = 40  # share of the whole job; the child reports the rest
_TRY_AGAIN = "see the log, then try again"


def collects_enough(job: Job, collected: tuple[int, int]) -> bool:
    """Return True once the job has the frames that it needs, or needs none: what it waits for then is headroom."""
    return not job.kind.collects or _counts(job, collected) == (job.frames, MIN_INFORMATIVE)


def _counts(job: Job, collected: tuple[int, int]) -> tuple[int, int]:
    return min(collected[0], job.frames), min(collected[1], MIN_INFORMATIVE)


def begin_collection(turn: Turn, job: Job) -> None:
    kind, calibration = job.kind, turn.settings.calibration
    frames, max_loss = calibration.frames, None
    if isinstance(kind, (OfflineStart, FleetCalibration)):  # needed for the verdict alone
        frames = (HELD_OUT_EVERY - 1) * turn.settings.observe.held_out  # by then as many are held out
    if isinstance(kind, Requested):
        frames, max_loss = kind.frames or frames, kind.max_loss
    turn.change_job(job.id, frames=frames, max_loss=max_loss, until_s=turn.patience_s)
    turn.do(act.MakeRoom())  # before minutes of collecting, which a full disk would waste
    turn.enter(JobState.COLLECTING, 0)
    if isinstance(kind, OfflineStart):
        message = f"the first calibration begins with {kind.setting}: {kind.path}"
        turn.note(message=message)
    if kind.trigger is Trigger.COMMAND or isinstance(kind, OfflineStart):
        turn.do(act.RestartCollection(hurried=True))
    elif isinstance(kind, Scheduled) or turn.state.refusal(turn.facts.settings) is not None:
        turn.do(act.RestartCollection())  # no frame of the refused job's scene


def move(turn: Turn, job: Job) -> None:
    if job.child_since_s is not None:
        supervise(turn, job)
        return
    if job.state not in JOINABLE:
        return
    if not collects_enough(job, turn.facts.collected):
        collect(turn, job)
        return
    headroom = turn.facts.headroom
    if isinstance(headroom, AgentError):
        ending.give_up(turn, headroom)
        return
    wait(turn, headroom)
    if headroom:
        turn.change_job(job.id, until_s=turn.patience_s)  # frames that have to be collected again take their time
        return
    turn.do(act.MakeRoom())
    if isinstance(job.kind, NewModel):
        turn.enter(JobState.BUILDING, 0)
    else:
        turn.do(act.ReportSelection(turn.job))
        turn.enter(JobState.CALIBRATING, _COLLECTED_PERCENT)
    turn.change_job(job.id, child_since_s=turn.now.monotonic_s)
    turn.do(act.HandOver(turn.job))


def collect(turn: Turn, job: Job) -> None:
    """Wait for frames. Each frame that counts restarts the time limit, because a slow camera needs its time."""
    counts, timeout_s = _counts(job, turn.facts.collected), turn.settings.recalibration.timeout_s
    if turn.now.monotonic_s > job.until_s:
        found, remedy = f"{counts[0]} of {job.frames} frames", "check the camera, ask for fewer frames"
        if counts[0] == job.frames:
            found = f"only {counts[1]} of the frames that judge show something"
            remedy = "wait until something is in view"
        found = f"{JobState.COLLECTING.value}: {found}, and no more for {timeout_s:.0f} s"
        remedy = f"{remedy}, or raise recalibration.timeout_s"
        error = AgentError("recalibration.timeout", found, "as many frames as the job asked for", remedy)
        ending.give_up(turn, error)
        return
    came = any(now > last for now, last in zip(counts, job.counts, strict=True))
    turn.change_job(job.id, counts=counts, until_s=turn.patience_s if came else job.until_s)
    percent = min(_COLLECTED_PERCENT * turn.facts.collected[0] // job.frames, _COLLECTED_PERCENT - 1)
    turn.enter(JobState.COLLECTING, percent)


def supervise(turn: Turn, job: Job) -> None:
    """Pause the child when the board cannot afford it, and limit its time."""
    headroom, timeout_s = turn.facts.headroom, turn.settings.recalibration.timeout_s
    if isinstance(headroom, AgentError):
        ending.give_up(turn, headroom)
        return
    if job.child_since_s is not None and (turn.now.monotonic_s - job.child_since_s - turn.facts.paused_s > timeout_s):
        found = f"the candidate process took longer than {timeout_s:.0f} s"
        remedy = "see in the log what the job was doing, or raise recalibration.timeout_s"
        error = AgentError("recalibration.timeout", found, "a candidate within recalibration.timeout_s", remedy)
        ending.give_up(turn, error)
        return
    if bool(headroom) != job.is_paused:
        turn.do(act.PauseChild() if headroom else act.ResumeChild())
        turn.change_job(job.id, is_paused=bool(headroom))
    wait(turn, headroom)


def wait(turn: Turn, reason: str) -> None:
    """Report why the job stands still; another reason while it does is kept: mostly only its figures change."""
    job = turn.job
    if bool(reason) != bool(job.waits):
        turn.note(percent=job.percent, waits=reason or "no more")
    turn.change_job(job.id, waits=reason)


def child_advanced(turn: Turn, event: fact.ChildAdvanced) -> None:
    job = turn.state.job
    if job is None or job.id != event.job:
        return
    state = next((each for each in WORK if each.value == event.step), None)
    if state is None or (state is not job.state and not job.state.may_become(state)):
        found = f"a job at {job.state.value} that goes to {event.step}"
        ending.give_up(turn, AgentError("recalibration.child", found, "the next step of the job", _TRY_AGAIN))
        return
    turn.enter(state, event.percent)


def child_ended(turn: Turn, event: fact.ChildEnded) -> None:
    job, error = turn.state.job, event.error
    if job is None or job.id != event.job:
        return
    turn.change_job(job.id, child_since_s=None)
    if event.verdict is not None:
        turn.change_job(job.id, fidelity=event.verdict.fidelity)
        if not isinstance(job.kind, RaisedPrecision):  # which gains otherwise
            turn.do(act.LearnGain(event.verdict))
    if error is None:
        turn.do(act.Load(turn.job, event.artefact))
        return
    if isinstance(job.kind, NewModel) and cause_of(error) not in (Cause.ANSWERS, Cause.BOARD):
        found = f"the model's file has changed, and cannot be served: {error.code}: {error.found}"
        remedy = f"{error.remedy}; the engine in service keeps serving until then"
        error = AgentError(UNSERVABLE, found, error.expected, remedy)
    ending.fail(turn, error)


def frames_ended(turn: Turn) -> None:
    """Let a job that collects go on with the frames there are, since no more will come, or give it up."""
    job, (collected, informative) = turn.state.job, turn.facts.collected
    turn.set(no_start_before_s=math.inf)
    if job is None or not job.is_collecting or not job.kind.collects:
        return
    if not collected or informative < MIN_INFORMATIVE:
        found = f"the recording has ended, and only {informative} of the frames that judge show something"
        remedy = "play the recording in a loop (camera.loop: true), or use a longer one"
        ending.give_up(turn, AgentError("recalibration.frames", found, f"at least {MIN_INFORMATIVE}", remedy))
    elif collected < job.frames:
        message = f"the recording has ended: the job continues with {collected} of {job.frames} frames"
        turn.note(percent=job.percent, message=message)
        turn.change_job(job.id, frames=collected, until_s=turn.patience_s)
