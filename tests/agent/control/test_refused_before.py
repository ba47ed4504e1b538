"""After a refusal no job begins by itself until something has changed, or a command or the schedule wants one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from job_bench import JobDeskBench, ScriptedChild, job_desk, two_engines
from kept import spoil
from unexpected import unexpected

import agent.core.due as due_module
from agent.commands.dispatcher import CommandProgress
from agent.common.errors import AgentError
from agent.contract.commands import RecalibrateArgs
from agent.control.executor import Executor
from agent.core.state import JobState
from agent.jobs.child_process import JobOutcome
from agent.jobs.fingerprints import settings_id
from agent.jobs.job import JobJournal
from agent.monitoring.camera_monitor import CameraState

__all__ = ["job_desk", "two_engines"]  # fixtures

MINUTE, DAY = 60.0, 86_400.0
REFUSED = AgentError("recalibration.refused", "a loss of 0.45", "at most 0.1", "raise recalibration.max_loss")
FULL = AgentError("recalibration.disk", "a full disk", "room", "free some")


class Board:
    """A board without a calibration whose jobs all end with `outcome`, on a turned clock."""

    def __init__(self, at: JobDeskBench, monkeypatch: pytest.MonkeyPatch, **recalibration: Any) -> None:
        self.at, self.outcome = at, REFUSED
        self.restarts = 0
        monkeypatch.setattr(type(at.executor.pipeline.observer.collection), "restart", self._restart)
        at.service.calibration = None
        self.state = replace(at.state, drift=None)
        self.at.configure(automatic=True, **recalibration)

    @property
    def executor(self) -> Executor:
        return self.at.executor

    @property
    def jobs(self) -> list[str]:
        return [record.trigger for record in self.at.journal.records()]

    def pass_s(self, seconds: float, state: CameraState | None = None) -> None:
        """Look once a minute; a child that works is done by the next look."""
        for _ in range(int(seconds / MINUTE)):
            self.at.clock.turn(MINUTE)
            for _ in range(2):  # a job begins, and has its frames
                self.executor.tick({"camera": state or self.state})
            job = self.executor.state.job
            if job is not None and job.child_since_s is not None:
                ScriptedChild.latest.ends_with(JobOutcome(error=self.outcome))

    def moved(self) -> CameraState:
        """Frames as they are observed once the scene is another one than that of the refusal."""
        since = self.at.state.drift
        assert since is not None
        return replace(self.state, since_refusal=replace(since, state="alarm"))

    def reboot(self) -> None:
        """The same board with a new process."""
        self.at.executor = replace(self.executor)
        self.executor.start(0)

    def _restart(self, *_: object, **__: object) -> None:
        self.restarts += 1


@pytest.fixture
def board(job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch) -> Board:
    return Board(job_desk, monkeypatch)


def test_a_model_that_no_plan_suits_is_refused_once_and_24_hours_pass_without_a_second_job(board: Board) -> None:
    board.pass_s(DAY)
    assert board.jobs == ["first-start"]
    (record,) = board.at.journal.records()
    assert record.error is not None
    assert (record.state.value, record.error.found) == ("FAILED", "a loss of 0.45")
    held_back = board.executor.state.held_back
    assert held_back is not None
    assert (held_back.code, "a loss of 0.45" in held_back.found) == ("recalibration.unchanged", True)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_scene_that_has_changed_is_tried_with_frames_of_its_own(board: Board, restarts: bool) -> None:
    board.pass_s(DAY)
    if restarts:
        board.reboot()
    board.pass_s(DAY)
    assert len(board.jobs) == 1
    known = board.restarts
    board.pass_s(MINUTE, board.moved())
    assert board.jobs == ["first-start", "first-start"]
    assert board.restarts == known + 1
    board.pass_s(DAY)
    assert len(board.jobs) == 2


def test_a_kill_before_the_journal_has_the_end_does_not_forget_the_refusal(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = JobJournal.enter

    def entering(journal: JobJournal, job: str, state: JobState, **outcome: Any) -> None:
        if state is JobState.FAILED:
            raise SystemExit
        enter(journal, job, state, **outcome)

    monkeypatch.setattr(JobJournal, "enter", entering)
    with pytest.raises(SystemExit):
        board.pass_s(MINUTE)
    monkeypatch.undo()
    board.reboot()
    refusal = board.executor.state.refusal(settings_id(board.executor.config, board.at.service))
    assert refusal is not None
    assert refusal.error.code == "recalibration.refused"


def test_a_scene_that_shows_nothing_is_no_other_scene(board: Board) -> None:
    board.pass_s(DAY)
    covered = board.moved()
    board.pass_s(DAY, replace(covered, view=replace(covered.view, trouble="blind")))
    assert len(board.jobs) == 1
    assert board.executor.state.held_back is not None
    assert board.executor.state.held_back.code == "view.blind"


def test_evidence_from_under_a_cover_is_dropped_with_it(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.pass_s(MINUTE)
    compared: list[object] = []
    (monitor,) = board.executor.pipeline.observer.monitors.values()
    monkeypatch.setattr(monitor, "compare_with_refused", compared.append)
    covered = replace(board.state, view=replace(board.state.view, trouble="blind"))
    for state, times in ((board.state, 0), (covered, 1), (covered, 1), (board.state, 2)):
        board.pass_s(MINUTE, state)
        assert len(compared) == times
    assert None not in compared


@pytest.mark.parametrize(
    ("changes", "jobs"),
    [({"max_loss": 0.5}, 2), ({"max_slowdown": 2.0}, 2), ({"per_day": 5}, 1), ({"max_loss": 0.1}, 1)],
)
def test_other_settings_are_tried_and_those_that_no_candidate_depends_on_are_not(
    board: Board, changes: dict[str, float], jobs: int
) -> None:
    board.pass_s(DAY)
    board.at.configure(**changes)
    board.pass_s(DAY)
    assert len(board.jobs) == jobs


def test_a_new_runtime_is_tried(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.pass_s(DAY)
    monkeypatch.setattr(board.at.service.backend, "flags", lambda: {"version": "another"}, raising=False)
    board.reboot()
    board.pass_s(DAY)
    assert len(board.jobs) == 2


def test_a_command_and_the_schedule_start_a_job_after_a_refusal(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.pass_s(DAY)
    answer = CommandProgress("c1", lambda _: None)
    board.executor.recalibrate(answer, RecalibrateArgs())
    board.pass_s(DAY)
    assert board.jobs == ["first-start", "command"]
    due = iter(["2026-01-31 03:00"])
    monkeypatch.setattr(due_module, "scheduled", lambda *_: next(due, ""))
    board.pass_s(DAY)
    assert board.jobs == ["first-start", "command", "schedule"]


def test_a_command_with_settings_of_its_own_neither_adds_a_refusal_nor_replaces_one(board: Board) -> None:
    board.outcome = FULL
    board.pass_s(MINUTE)
    board.outcome = REFUSED
    for command in ("c1", "c2"):
        board.executor.recalibrate(CommandProgress(command, lambda _: None), RecalibrateArgs(method="max"))
        board.pass_s(DAY)
    assert board.jobs == ["first-start", "command", "first-start", "command"]


def test_a_job_that_fails_without_a_verdict_is_repeated_up_to_the_daily_cap(board: Board) -> None:
    board.outcome = FULL
    board.pass_s(1200.0)
    assert len(board.jobs) == 2
    board.pass_s(DAY / 2)
    assert len(board.jobs) == 8
    held_back = board.executor.state.held_back
    assert held_back is not None
    assert held_back.code == "recalibration.cap"


@pytest.mark.parametrize("swapped", [False, True])
def test_an_alarm_whose_cure_was_refused_waits_for_another_scene_too(board: Board, swapped: bool) -> None:
    """Also where the engine in service has come into service in this process."""
    board.at.service.start(unexpected).close()
    board.reboot()
    if swapped:
        board.at.configure(automatic=False)
        board.at.recalibrate()
        board.at.configure(automatic=True)
        assert board.at.service.serving.id == board.at.other.id
    before = len(board.jobs)
    assert board.at.state.drift is not None
    board.state = replace(board.state, drift=replace(board.at.state.drift, state="alarm", serving_db=9.0))
    board.pass_s(DAY)
    assert board.jobs[before:] == ["alarm"]
    board.pass_s(MINUTE, board.moved())
    assert board.jobs[before:] == ["alarm", "alarm"]


def test_a_refusal_that_was_lost_is_sought_again(board: Board) -> None:
    board.pass_s(DAY)
    spoil(board.executor.config.state_dir, "DELETE FROM refusal")
    board.reboot()
    board.pass_s(DAY)
    assert len(board.jobs) == 2
