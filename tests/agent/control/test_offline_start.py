"""A board without a calibration whose owner has done work offline: with which work its first jobs begin."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executor_bench import snapshot_of
from job_bench import JobDeskBench, ScriptedChild, job_desk, two_engines
from unexpected import unexpected

from agent.common.errors import AgentError
from agent.control.reasons import explain
from agent.core.state import JobState
from agent.jobs.child_process import JobOutcome
from agent.jobs.offline_queue import OfflineQueue
from engines.calibration import load_calibration, save_calibration

__all__ = ["job_desk", "two_engines"]  # fixtures

REFUSED = AgentError("recalibration.refused", "a loss of 0.45", "at most 0.1", "keep layers float")
FULL = AgentError("recalibration.disk", "a full disk", "room", "free some")


class Board:
    """The bench without a calibration; `start` names the artefact that served before."""

    def __init__(self, at: JobDeskBench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.executor, self.events = at, at.executor, list[dict[str, Any]]()
        self.artefact = at.other.path
        self.file = self.artefact.parent.parent / "calibration.json"
        save_calibration(load_calibration(self.artefact / "calibration.json"), self.file)
        monkeypatch.setattr(at.executor.reporter, "event", lambda kind, *_, **rest: self._note(kind, rest))
        at.service.calibration = None
        self.states = {"camera": replace(at.state, drift=None)}

    def begin(self, *, start: Path | None = None, file: Path | None = None, **recalibration: Any) -> None:
        """A new process with these settings."""
        before = self.at.executor
        config = before.config.model_copy(
            update={
                "start": start,
                "calibration": before.config.calibration.model_copy(update={"file": file, "frames": 8}),
                "recalibration": before.config.recalibration.model_copy(update={"cooldown_s": 0.0, **recalibration}),
            }
        )
        self.executor = replace(before, config=config)
        self.executor.start(0)

    def job(self, error: AgentError) -> str:
        """Run the job that is due, which ends with this error: the setting that it began with, or `own`."""
        for _ in range(3):
            self.executor.tick(self.states)
        job = self.executor.state.job
        assert job is not None, "no job is due"
        assert job.child_since_s is not None
        asked = json.loads((ScriptedChild.latest.directory / "job.json").read_text())
        ScriptedChild.latest.ends_with(JobOutcome(error=error))
        return str(asked["offline"]["setting"]) if asked["offline"] is not None else "own"

    @property
    def degraded(self) -> str:
        return explain(snapshot_of(self.executor, self.states)).degraded

    @property
    def errors(self) -> list[str]:
        return [str(each["message"]) for each in self.events if each["kind"] == "error" and "step" not in each]

    def _note(self, kind: str, rest: dict[str, Any]) -> None:
        self.events.append({"kind": kind, **rest})


@pytest.fixture
def board(job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch) -> Board:
    return Board(job_desk, monkeypatch)


def test_an_artefact_comes_before_a_calibration_and_both_before_the_boards_own_frames(board: Board) -> None:
    board.begin(start=board.artefact, file=board.file)
    assert [board.job(REFUSED) for _ in range(3)] == ["start", "calibration.file", "own"]
    messages = [each["message"] for each in board.events if each["kind"] == "job" and "message" in each]
    assert messages[0] == f"the first calibration begins with start: {board.artefact}"


def test_only_frames_for_the_verdict_are_collected(board: Board) -> None:
    board.begin(start=board.artefact)
    board.executor.tick(board.states)
    job = board.executor.state.job
    assert job is not None
    assert job.frames == 3 * board.executor.config.observe.held_out
    assert board.executor.pipeline.observer.collection._hurried
    board.job(REFUSED)
    assert not board.executor.pipeline.observer.collection._hurried, "the board's own frames are chosen"


def test_refused_work_is_not_tried_again_after_a_restart_unless_a_setting_has_changed(board: Board) -> None:
    board.begin(start=board.artefact)
    assert board.job(REFUSED) == "start"
    board.begin(start=board.artefact)
    assert board.job(FULL) == "own"
    assert f"start: {board.artefact} is not used: a loss of 0.45; keep layers float" in board.degraded
    board.begin(start=board.artefact, max_loss=0.5)
    assert board.job(REFUSED) == "start"


def test_the_files_are_tried_again_once_they_have_changed(board: Board) -> None:
    board.begin(file=board.file)
    assert board.job(REFUSED) == "calibration.file"
    calibration = load_calibration(board.file)
    save_calibration(
        replace(calibration, amax={name: 2.0 * amax for name, amax in calibration.amax.items()}), board.file
    )
    board.begin(file=board.file)
    assert board.job(REFUSED) == "calibration.file"


def test_an_engine_with_which_the_daemon_ended_on_probation_is_not_tried_again(board: Board) -> None:
    board.begin(start=board.artefact)
    board.executor.tick(board.states)
    job = board.executor.state.job
    assert job is not None
    interrupted = AgentError("recalibration.interrupted", "the daemon ended at PROBATION", "a daemon", "see the log")
    board.at.journal.enter(job.id, JobState.PROBATION, artefact="0123")
    board.at.journal.enter(job.id, JobState.ROLLED_BACK, error=interrupted)
    board.begin(start=board.artefact)
    assert board.job(FULL) == "own"


def test_an_earlier_refusal_of_the_boards_own_calibration_holds_no_offline_work_back(board: Board) -> None:
    board.begin()
    assert board.job(REFUSED) == "own"
    board.begin(start=board.artefact)
    assert board.job(REFUSED) == "start"


def test_a_file_that_cannot_be_used_is_reported_once_and_the_board_calibrates_by_itself(board: Board) -> None:
    board.begin(start=board.artefact / "gone", file=board.file)
    assert [board.job(FULL) for _ in range(2)] == ["calibration.file"] * 2
    (error,) = board.errors
    assert error.startswith(f"artefact.missing: start: {board.artefact / 'gone'} is not used: no manifest.json in ")
    assert error.endswith("; expected an artefact directory; make one with 'tared build'; the board goes on without it")
    board.executor.tick(board.states)
    assert "is not used: no manifest.json in " in board.degraded


def test_while_an_engine_serves_nothing_is_read(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.at.service.start(unexpected).close()
    monkeypatch.setattr(OfflineQueue, "works", lambda *_: pytest.fail("an engine serves"))
    board.begin(start=board.artefact)
    board.executor.tick(board.states)
    assert board.executor.state.job is None


def test_a_plan_that_is_not_used_is_reported_and_named_while_the_reference_serves(board: Board) -> None:
    unused = AgentError("plan.node", "plan: p.json is not used: node 'x'", "nodes", "plan again")
    board.executor = replace(board.executor, unused_plan=unused)
    board.executor.start(0)
    assert board.errors == [str(unused)]
    assert "; plan: p.json is not used: node 'x'; plan again" in board.degraded
