"""An error before, at or after each state of a job fails it alone; its sender has the error, and the next job succeeds.

The daemon's own objects run with a scripted child, and a frame path that serves at once.
"""

from __future__ import annotations

import errno
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from device import carry_out
from job_bench import JobDeskBench

from agent.collection.collection import SharedCollection
from agent.common.errors import AgentError
from agent.contract.commands import CancelArgs, CommandResult
from agent.core.state import JobState
from agent.daemon.handlers import EngineHandlers
from agent.jobs import workshop
from agent.jobs.child_process import JobOutcome
from agent.jobs.headroom import Headroom
from agent.jobs.job import JobJournal
from agent.models.engine_service import EngineService
from agent.serving.trial import TrialEvents
from calibrate.errors import CalibrationError
from engines.errors import EngineError
from engines.interface import Engine
from engines.store.artefact import Store
from engines.store.retention import StoreCleaner

ENGINE_FAILS = EngineError("engine.fails", "one that fails", "one that works", "none")


@dataclass(frozen=True)
class Fault:
    """A fault, and the end of its job. owner, name: the function that raises `error`, once. outcome: the child's."""

    code: str
    owner: Any = None
    name: str = ""
    error: BaseException | None = None
    outcome: JobOutcome | None = None
    end: str = "FAILED"
    serves_new: bool = False

    def happens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.owner is None:
            return
        true = getattr(self.owner, self.name)

        def failing(*_: object, **__: object) -> None:
            monkeypatch.setattr(self.owner, self.name, true)
            assert self.error is not None
            raise self.error

        monkeypatch.setattr(self.owner, self.name, failing)


FULL = OSError(errno.ENOSPC, "No space left on device")
FAULTS = {
    "no room": Fault("store.room", StoreCleaner, "ensure_room", EngineError("store.room", "none", "some", "free some")),
    "too hot to start": Fault("headroom.delay", Headroom, "reason_to_wait", AgentError("headroom.delay", "", "", "")),
    "too hot to go on": Fault("headroom.pause", Headroom, "reason_to_pause", AgentError("headroom.pause", "", "", "")),
    "the frames cannot be written": Fault("recalibration.disk", workshop, "write_job", FULL),
    "no process": Fault("recalibration.child", workshop, "JobProcess", OSError(errno.EAGAIN, "no more")),
    "the candidate's engine": Fault("engine.fails", EngineService, "load", ENGINE_FAILS),
    "the candidate's calibration": Fault(
        "calibration.model", EngineService, "load", CalibrationError("calibration.model", "a", "b", "c")
    ),
    "current": Fault("store.write", Store, "promote", EngineError("store.write", "a", "b", "c"), serves_new=True),
    **{
        f"the child says {code}": Fault(code, outcome=JobOutcome(error=AgentError(code, "a", "b", "c")))
        for code in (
            "engine.build", "recalibration.refused",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_fails_its_job_alone(
    job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    fault, before = FAULTS[name], job_desk.service.serving.id
    fault.happens(monkeypatch)
    job_desk.recalibrate(fault.outcome)
    check(job_desk, tmp_path / "state", before if not fault.serves_new else job_desk.other.id, fault.code, fault.end)


# The states as they are written, and how the journal then has the job: a state that cannot be written is not begun.
JOURNALED = {
    "REQUESTED": "",
    "COLLECTING": "FAILED",
    "BUILDING": "FAILED",
    "PROBATION": "FAILED",
}
REFUSALS = [sqlite3.OperationalError("disk I/O error"), FULL]


@pytest.mark.parametrize(
    ("state", "refusal"), [*((state, REFUSALS[0]) for state in JOURNALED), ("BUILDING", REFUSALS[1])]
)
def test_a_state_that_cannot_be_journaled_is_not_begun(
    job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, refusal: Exception
) -> None:
    before = job_desk.service.serving.id
    refuse(monkeypatch, state, refusal)
    job_desk.recalibrate(steps=("PLANNING", "BUILDING", "VALIDATING"))
    check(job_desk, tmp_path / "state", before, "state.write", JOURNALED[state])


@pytest.mark.parametrize(
    ("end", "written"),
    [
        ("COMMITTED", "PROBATION"),
        ("ROLLED_BACK", "PROBATION"),
        ("FAILED", "VALIDATING"),
        ("CANCELLED", "COLLECTING"),
    ],
)
def test_an_end_that_cannot_be_journaled_is_reported_all_the_same(
    job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch, end: str, written: str
) -> None:
    """The next start finds it out, from what was written last."""
    pipeline: Any = job_desk.executor.pipeline
    refuse(monkeypatch, end, REFUSALS[0])
    with monkeypatch.context() as patch:
        if end == "ROLLED_BACK":
            patch.setattr(pipeline, "start_trial", fail_at_once)
        elif end == "CANCELLED":
            patch.setattr(SharedCollection, "counts", (0, 0))
        job_desk.recalibrate(JobOutcome(error=ENGINE_FAILS) if end == "FAILED" else None)
        answers: list[CommandResult] = []
        carry_out(EngineHandlers(job_desk.executor), "cancel", CancelArgs(), answers.append, "cancel")
        assert (answers[-1].status == "SUCCEEDED") is (end == "CANCELLED")
    (final,) = job_desk.finals()
    assert final.status == ("SUCCEEDED" if end == "COMMITTED" else "FAILED")
    assert job_desk.journal.records()[-1].state.value == written
    job_desk.recalibrate()
    assert job_desk.finals()[-1].status == "SUCCEEDED"


def test_a_selection_that_cannot_be_kept_takes_nothing_from_the_job(job_desk: JobDeskBench, tmp_path: Path) -> None:
    (tmp_path / "state" / "selection.json").mkdir()
    (tmp_path / "state" / "selection.png").mkdir()
    job_desk.recalibrate()
    assert job_desk.finals()[-1].status == "SUCCEEDED"
    assert job_desk.left(tmp_path / "state") == []


def test_an_observer_that_fails_while_frames_are_collected(
    job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job waits for it, and is given up once it has waited for too long."""
    before = job_desk.service.serving.id
    with monkeypatch.context() as patch:
        patch.setattr(SharedCollection, "counts", (0, 0))
        job_desk.recalibrate()
        assert job_desk.executor.state.job is not None
        assert job_desk.executor.state.job.state is JobState.COLLECTING
        job_desk.clock.turn(1e6)
        job_desk.executor.tick({"camera": replace(job_desk.state, outage="observer.run")})
    check(job_desk, tmp_path / "state", before, "recalibration.timeout", "FAILED")


def fail_at_once(_identity: str, engine: Engine, events: TrialEvents, **_: object) -> None:
    """In place of a frame path on which a candidate serves."""
    engine.close()
    events.failed(AgentError("probation.error", "a kernel that fails", "an answer to every frame", "none"), 1.0, True)


def refuse(monkeypatch: pytest.MonkeyPatch, state: str, refusal: Exception) -> None:
    """The journal cannot be opened, once, when this state is written."""
    name = "start" if state == "REQUESTED" else "enter"
    write = getattr(JobJournal, name)

    def connect(*_: object, **__: object) -> None:
        raise refusal

    def writing(journal: JobJournal, job: str, entered: Any, *more: Any, **outcome: Any) -> None:
        """entered: by `enter`, the state."""
        if name == "enter" and entered.value != state:
            write(journal, job, entered, *more, **outcome)
            return
        monkeypatch.setattr(JobJournal, name, write)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", connect)
            write(journal, job, entered, *more, **outcome)

    monkeypatch.setattr(JobJournal, name, writing)


def check(job_desk: JobDeskBench, state_dir: Path, serves: str, code: str, end: str) -> None:
    """The job has ended so, for one sender, and left nothing; the next one is committed."""
    (final,) = job_desk.finals()
    assert (final.status, final.error.code if final.error else None) == ("FAILED", code)
    assert [each.state.value for each in job_desk.journal.records()] == ([end] if end else [])
    assert job_desk.service.serving.id == serves
    assert job_desk.executor.state.job is None
    assert job_desk.executor.state.trial is None
    assert job_desk.left(state_dir) == []
    job_desk.recalibrate()
    assert job_desk.finals()[-1].status == "SUCCEEDED", job_desk.finals()
    assert job_desk.service.serving.id == (state_dir / "current").readlink().name == job_desk.other.id
    assert job_desk.left(state_dir) == []
