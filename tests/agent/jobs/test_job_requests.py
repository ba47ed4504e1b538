"""Requests for jobs, also those of an earlier process; no frame is served."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from device import NOW, Device, payload
from executor_bench import Desk, ask, desk, refuse_journal
from kept import kept_in
from turned_clock import TurnedClock

from agent.commands.dispatcher import CommandDispatcher
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult
from agent.contract.messages import Birth
from agent.control.snapshot import take_snapshot
from agent.core import facts as fact
from agent.core.kinds import Scheduled
from agent.core.state import JobState
from agent.daemon.status import progress_line
from agent.jobs.headroom import Headroom
from agent.jobs.job import JobJournal
from agent.jobs.recovery import CrashRecovery
from agent.uplink.reporter import Reporter

__all__ = ["desk"]  # the fixture


def advance(at: Desk, step: str, percent: int) -> None:
    """The job's child has come so far."""
    assert at.executor.state.job is not None
    at.executor.take(fact.ChildAdvanced(at.executor.state.job.id, step, percent))


def test_the_same_request_twice_is_one_job(desk: Callable[..., Desk]) -> None:
    at = desk()
    assert ask(at, "c1", 64)
    assert ask(at, "c2", 64)
    assert not ask(at, "c3", 65)
    at.cancel()
    for command in ("c1", "c2"):
        sent = [result for result in at.results if result.id == command]
        assert [sent[0].status, sent[1].step, sent[-1].status] == ["ACCEPTED", "COLLECTING", "FAILED"]
    (job,) = at.executor.journal.records()
    assert (job.command_ids, job.state) == (("c1", "c2"), JobState.CANCELLED)
    assert ask(at, "c4", 64), "a new one, once that is over"


def test_a_job_that_has_its_frames_is_not_joined(desk: Callable[..., Desk]) -> None:
    at = desk()
    assert ask(at, "c1", 64)
    advance(at, "CALIBRATING", 40)
    assert not ask(at, "c2", 64)


def test_a_frame_path_that_fails_fails_the_job(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    at = desk()
    assert ask(at, "c1")
    monkeypatch.setattr(at.executor.pipeline, "error", OSError("no engine"), raising=False)
    at.executor.stop("the source has ended")
    (record,) = at.executor.journal.records()
    assert record.state is JobState.FAILED
    assert record.error is not None
    assert record.error.code == "swap.stopped"
    assert "no engine" in record.error.found


def test_step_and_percent_reach_the_sender_the_events_and_the_terminal(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk()
    assert ask(at, "c1")
    shown = []
    for step, percent in (("CALIBRATING", 40), ("BUILDING", 50), ("BUILDING", 51), ("BUILDING", 60)):
        advance(at, step, percent)
        shown.append(progress_line(take_snapshot(at.executor), 0).rpartition("  ")[2])
    monkeypatch.setattr(Headroom, "reason_to_pause", lambda _: "thermal zone at 80 C")
    assert at.executor.state.job is not None
    working = replace(at.executor.state.job, child_since_s=at.clock.monotonic_s())
    at.executor.state = replace(at.executor.state, job=working)
    at.tick()
    shown.append(progress_line(take_snapshot(at.executor), 0).rpartition("  ")[2])
    steps = [
        ("COLLECTING", 0),
        ("CALIBRATING", 40),
        ("BUILDING", 50),
        ("BUILDING", 60),
    ]  # each ten percent
    assert [(each.step, each.percent) for each in at.results if each.step] == steps
    events = [f"job {{'trigger': 'command', 'step': '{step}', 'percent': {percent}}}" for step, percent in steps]
    assert [event for event in at.events if event.startswith("job ") and "waits" not in event] == events
    building = "BUILDING 60 %"
    assert shown == ["CALIBRATING 40 %", *["BUILDING 50 %"] * 2, building, f"{building}, waits: thermal zone at 80 C"]


@pytest.mark.parametrize("step", ["SINGING", "COLLECTING", "PROBATION"])
def test_a_step_that_cannot_follow_ends_the_job_alone(desk: Callable[..., Desk], step: str) -> None:
    at = desk()
    assert ask(at, "c1")
    advance(at, "BUILDING", 50)
    assert at.executor.state.job is not None
    assert at.executor.state.job.percent == 50
    advance(at, step, 60)
    assert at.results[-1].error is not None
    assert at.results[-1].error.code == "recalibration.child"
    assert at.executor.state.job is None
    assert at.executor.journal.records()[-1].state is JobState.FAILED


def test_the_clock_starts_a_job_once(desk: Callable[..., Desk]) -> None:
    now = time.strftime("%H:%M", time.localtime(TurnedClock().wall_s()))
    at = desk(schedule=[now], cooldown_s=0.0, raise_precision=False)
    at.tick()
    job = at.executor.state.job
    assert job is not None
    assert isinstance(job.kind, Scheduled)
    assert job.kind.due[-5:] == now
    at.cancel()
    at.tick()
    assert at.executor.state.job is None
    again = desk(schedule=[now], cooldown_s=0.0, raise_precision=False)
    again.tick()
    assert again.executor.state.job is None, "the journal knows"


@pytest.mark.parametrize(
    ("trigger", "states", "end"),
    [
        ("command", [], JobState.FAILED),
        ("command", [JobState.COLLECTING, JobState.BUILDING], JobState.FAILED),
        ("command", [JobState.PROBATION], JobState.ROLLED_BACK),
        ("current", [JobState.PROBATION], JobState.COMMITTED),
        ("model", [JobState.BUILDING], JobState.COMMITTED),
        ("runtime", [JobState.BUILDING], JobState.FAILED),
    ],
)
def test_a_job_whose_process_is_gone_is_concluded_once(
    tmp_path: Path, trigger: str, states: list[JobState], end: JobState
) -> None:
    journal = JobJournal(kept_in(tmp_path))
    journal.start("a", trigger, {"content": "now"}, ["c1", "c2"])
    for state in states:
        journal.enter("a", state, artefact="0123" if state is JobState.PROBATION else None)
    (tmp_path / "artefacts" / "0123").mkdir(parents=True)
    (tmp_path / "current").symlink_to("artefacts/0123" if trigger == "current" else "artefacts/4567")
    reporter = Reporter(None, Birth(agent_version="0"))
    past = CrashRecovery(tmp_path, kept_in(tmp_path), reporter)
    assert past.command_results == []
    concluded = past.end_unfinished_jobs("now")
    assert journal.records()[0].state is end
    assert concluded.rolled_back == (end is JobState.ROLLED_BACK)
    status = "SUCCEEDED" if end is JobState.COMMITTED else "FAILED"
    assert [(result.id, result.status) for result in concluded.results] == [("c1", status), ("c2", status)]
    later = CrashRecovery(tmp_path, kept_in(tmp_path), reporter)
    assert (later.command_results, later.end_unfinished_jobs("now").results) == (concluded.results, [])


@pytest.mark.parametrize(
    ("current", "ends", "rolled_back"),
    [
        ("4567", [JobState.ROLLED_BACK, JobState.COMMITTED], 1),
        ("", [JobState.ROLLED_BACK, JobState.COMMITTED], 1),  # the reference served
        ("0123", [JobState.COMMITTED, JobState.ROLLED_BACK], 0),  # kept before it could be taken back
    ],
)
def test_a_rollback_of_what_was_on_probation_is_concluded_with_it(
    tmp_path: Path, current: str, ends: list[JobState], rolled_back: int
) -> None:
    journal = JobJournal(kept_in(tmp_path))
    for job, trigger, artefact in (("a", "command", "0123"), ("b", "rollback", "4567")):
        journal.start(job, trigger, {}, [job])
        journal.enter(job, JobState.PROBATION, artefact=artefact)
    (tmp_path / "artefacts" / "0123").mkdir(parents=True)
    if current:
        (tmp_path / "current").symlink_to(f"artefacts/{current}")
    concluded = CrashRecovery(
        tmp_path, kept_in(tmp_path), Reporter(None, Birth(agent_version="0"))
    ).end_unfinished_jobs("now")
    assert [record.state for record in journal.records()] == ends
    assert concluded.rolled_back == rolled_back


def test_a_rebuild_for_another_runtime_that_was_interrupted_is_known_until_another_ends(tmp_path: Path) -> None:
    reporter = Reporter(None, Birth(agent_version="0"))
    journal = JobJournal(kept_in(tmp_path))
    assert not CrashRecovery(tmp_path, kept_in(tmp_path), reporter).rebuild_interrupted
    journal.start("a", "runtime", {}, [])
    journal.enter("a", JobState.BUILDING)
    past = CrashRecovery(tmp_path, kept_in(tmp_path), reporter)
    assert past.rebuild_interrupted
    past.end_unfinished_jobs("")
    journal.start("b", "command", {}, [])
    journal.enter("b", JobState.CANCELLED)
    assert CrashRecovery(tmp_path, kept_in(tmp_path), reporter).rebuild_interrupted
    journal.start("c", "runtime", {}, [])
    journal.enter("c", JobState.FAILED, error=AgentError("artefact.runtime", "an engine", "another", "build it"))
    assert not CrashRecovery(tmp_path, kept_in(tmp_path), reporter).rebuild_interrupted


@pytest.mark.parametrize(("instead_of", "end"), [("4567", JobState.FAILED), ("0123", JobState.COMMITTED)])
def test_a_rebuild_for_another_runtime_that_became_current_was_committed(
    tmp_path: Path, instead_of: str, end: JobState
) -> None:
    """Else the next change of the runtime would be built at no start."""
    journal = JobJournal(kept_in(tmp_path))
    journal.start("a", "runtime", {"instead_of": instead_of}, [])
    journal.enter("a", JobState.BUILDING)
    (tmp_path / "current").symlink_to("artefacts/4567")
    past = CrashRecovery(tmp_path, kept_in(tmp_path), Reporter(None, Birth(agent_version="0")))
    past.end_unfinished_jobs("")
    assert journal.records()[0].state is end
    assert CrashRecovery(tmp_path, kept_in(tmp_path), Reporter(None, Birth(agent_version="0"))).rebuild_interrupted is (
        end is JobState.FAILED
    )


def test_a_command_that_an_earlier_process_carried_out_is_answered_and_not_repeated() -> None:
    device, published = Device(), list[CommandResult]()
    desk = CommandDispatcher(device.handlers(), published.append)
    known = CommandResult(id="c1", status="SUCCEEDED", result={"artefact": "0123"})
    news = CommandResult(id="c2", status="SUCCEEDED")
    desk.restore([known], [news])
    assert published == [news]
    desk.receive(payload(id="c1"), NOW)
    desk.receive(payload(id="c2"), NOW, retained=True)
    assert published == [news, known, news]
    assert device.status_calls == 0


@pytest.mark.parametrize(("refuses", "end"), [(True, JobState.FAILED), (False, JobState.COMMITTED)])
def test_the_job_of_a_rebuild_ends_though_its_first_step_cannot_be_journaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool, end: JobState
) -> None:
    past = CrashRecovery(tmp_path, kept_in(tmp_path), Reporter(None, Birth(agent_version="0")))
    with monkeypatch.context() as patched:
        if refuses:
            refuse_journal(patched, "enter")
        past.on_start_error(AgentError("artefact.runtime", "another", "this one", ""))
    past.engine_started("0123", degraded=False)
    assert [record.state for record in past.journal.records()] == [end]
