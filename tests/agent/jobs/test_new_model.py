"""When a new model is tried, and when again; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from executor_bench import Desk, ask, desk, refuse_journal

from agent.commands.deliveries import StagedModel
from agent.commands.dispatcher import CommandProgress
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult
from agent.jobs.child_process import JobOutcome
from agent.jobs.job import Job
from agent.serving.trial import Probation

__all__ = ["desk"]  # the fixture


def test_a_new_model_supersedes_what_is_under_way(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    at = desk()
    assert ask(at, "c1")
    built: list[Any] = []
    monkeypatch.setattr(at.executor.jobs, "start", lambda job: built.append(job.tracker))
    at.executor.new_model.content_changed("another content")
    at.tick()
    at.tick()
    assert at.results[-1].error is not None
    assert "superseded by a newer model" in at.results[-1].error.message
    (report,) = built
    assert (report.trigger, report.request) == ("model", {"content": "another content"})


def found_model(at: Desk, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A new content of the model's file is there; the reports of its trials."""
    built: list[Any] = []
    start = at.executor.jobs.start

    def build(job: Job) -> None:
        if job.tracker.trigger == "model":
            built.append(job.tracker)
        start(job)

    monkeypatch.setattr(at.executor.jobs, "start", build)
    monkeypatch.setattr(at.executor.jobs, "tick", lambda: None)
    at.executor.new_model.content_changed("another content")
    return built


def test_a_model_that_the_journal_takes_no_job_for_is_tried_later(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk()
    built = found_model(at, monkeypatch)
    with monkeypatch.context() as patched:
        refuse_journal(patched)
        at.tick()
        assert built == []
    at.clock.turn(60.0)
    at.tick()
    assert len(built) == 1


@pytest.mark.parametrize(
    ("code", "reported", "trials"),
    [
        ("recalibration.memory", "recalibration.memory", 2),
        ("engine.graph", "model.changed", 1),
        ("", "", 2),
    ],
)
def test_a_trial_that_says_nothing_of_the_model_is_repeated_after_a_minute(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, code: str, reported: str, trials: int
) -> None:
    """Without a code the job is abandoned, as by an operator's rollback."""
    at = desk()
    built = found_model(at, monkeypatch)
    at.tick()
    job = at.executor.jobs.job
    assert job is not None
    if code:
        at.executor.jobs._finish(job, JobOutcome(error=AgentError(code, "", "", "")))
    else:
        at.cancel()
    assert any(reported in line for line in at.events)
    at.tick()
    assert len(built) == 1
    at.clock.turn(60.0)
    at.cancel()  # what else has begun meanwhile
    at.tick()
    assert len(built) == trials


class Delivered:
    """A model that was delivered beside the one that is served."""

    def __init__(self, at: Desk, folder: Path) -> None:
        self.at = at
        self.served, self.part = folder / "served.onnx", folder / "part"
        self.served.write_bytes(b"before")
        self.part.write_bytes(b"new")
        self.results: list[CommandResult] = []
        self.taken_up = 0
        self.lasts = True  # a probation
        staged = StagedModel(self.part, self.served, CommandProgress("m1", self.results.append), self._take_up)
        staged.stage(0)
        at.executor.new_model.deliver(staged)
        self.file = staged.file

    def _take_up(self) -> None:
        self.taken_up += 1

    def ends(self, **outcome: Any) -> None:
        job = self.at.executor.jobs.job
        assert job is not None
        assert (job.staged.file if job.staged is not None else None) == self.file
        self.at.executor.jobs._finish(job, JobOutcome(**outcome))
        self.at.tick()

    def builds(self) -> None:
        """The child has built the model's engine, here another one of today's model; it answers a first frame."""
        self.ends(artefact=self.at.raised.path)

    def passes_probation(self) -> None:
        self.lasts = False
        self.at.tick()


@pytest.fixture
def delivered(desk: Callable[..., Desk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Delivered:
    at = desk()
    found_model(at, monkeypatch)
    model = Delivered(at, tmp_path)
    monkeypatch.setattr(Probation, "is_finished", property(lambda _: not model.lasts))
    return model


def test_a_delivered_model_takes_its_place_only_once_the_job_has_passed_it(delivered: Delivered) -> None:
    delivered.at.tick()
    delivered.builds()
    assert delivered.at.executor.swap.candidate is not None, "it answers live frames"
    assert (delivered.served.read_bytes(), delivered.taken_up) == (b"before", 0)
    delivered.passes_probation()
    assert (delivered.served.read_bytes(), delivered.taken_up) == (b"new", 1)
    tried = delivered.at.executor.new_model
    tried.content_changed(tried._content)  # the watch has seen it
    assert tried.needs_new_run
    assert delivered.at.service.store.target("current") != delivered.at.raised.id, "that of today's model"
    assert not delivered.results[-1].final, "the next run reports it, with the job's end"


@pytest.mark.parametrize(("code", "kept"), [("recalibration.memory", True), ("engine.graph", False)])
def test_a_delivered_model_that_the_job_refuses_leaves_what_serves(delivered: Delivered, code: str, kept: bool) -> None:
    delivered.at.tick()
    delivered.ends(error=AgentError(code, "", "", ""))
    assert delivered.results[-1].status == "FAILED"
    assert (delivered.served.read_bytes(), delivered.taken_up) == (b"before", 0)
    assert (delivered.file.exists(), delivered.part.exists()) == (False, kept)
    delivered.at.clock.turn(60.0)
    delivered.at.tick()
    assert not delivered.at.executor.new_model._is_untried, "the next try is the sender's"


@pytest.mark.parametrize("begun", [False, True])
def test_a_delivered_model_is_cancelled_before_its_trial_and_in_it(delivered: Delivered, begun: bool) -> None:
    if begun:
        delivered.at.tick()
    assert delivered.at.executor.cancel()
    assert delivered.results[-1].error is not None
    assert "the operator cancels it" in delivered.results[-1].error.message
    delivered.at.tick()
    assert delivered.at.executor.jobs.job is None or delivered.at.executor.jobs.job.tracker.trigger != "model"
    assert not delivered.file.exists()
    assert delivered.served.read_bytes() == b"before"


def test_a_place_that_refuses_fails_the_job(delivered: Delivered) -> None:
    delivered.at.tick()
    delivered.served.unlink()
    delivered.served.mkdir()
    delivered.builds()
    delivered.passes_probation()
    assert delivered.results[-1].status == "FAILED"
    assert delivered.at.executor.new_model.needs_new_run, "with the model that is there"


@pytest.mark.parametrize("code", ["probation.output", "model.answers"])
def test_a_delivered_model_that_needs_consent_or_fails_on_live_frames_is_not_tried_again(
    delivered: Delivered, code: str
) -> None:
    """The received file stays, so that the owner's consent costs no second transfer."""
    delivered.at.tick()
    error = AgentError(code, "other answers", "", "")
    if code == "model.answers":
        delivered.ends(error=error)
    else:
        delivered.builds()
        delivered.at.executor.pipeline.loop.roll_back(error)
        delivered.at.tick()
    assert delivered.results[-1].error is not None
    assert delivered.results[-1].error.code == code
    assert (delivered.served.read_bytes(), delivered.part.exists(), delivered.file.exists()) == (b"before", True, False)
    tried = delivered.at.executor.new_model
    delivered.at.clock.turn(60.0)
    delivered.at.tick()
    assert not tried._is_untried
    assert not tried.needs_new_run


def test_the_owners_consent_reaches_the_job(delivered: Delivered) -> None:
    delivered.at.executor.new_model.drop("another is sent")
    staged = StagedModel(delivered.part, delivered.served, CommandProgress("m2", lambda _: None), lambda: None, True)
    staged.stage(0)
    delivered.at.executor.new_model.deliver(staged)
    delivered.at.tick()
    job = delivered.at.executor.jobs.job
    assert job is not None
    assert job.staged is not None
    assert job.staged.accepted


@pytest.mark.parametrize("end", ["another", "the former", "cancelled"])
def test_a_model_on_probation_that_is_superseded_is_taken_back_and_never_committed(
    delivered: Delivered, end: str
) -> None:
    """Else the next run would serve the newer file untried."""
    at = delivered.at
    delivered.at.tick()
    delivered.builds()
    assert at.executor.swap.candidate is not None
    if end == "cancelled":
        assert at.executor.cancel()
    elif end == "another":
        at.executor.new_model.content_changed("a newer content")
    else:
        at.executor.new_model.drop("the former serves again")
        at.executor.new_model.content_changed("")
    assert at.executor.swap.candidate is None
    delivered.passes_probation()
    assert not at.executor.new_model.needs_new_run
    assert (delivered.served.read_bytes(), delivered.results[-1].status) == (b"before", "FAILED")
    at.tick()
    job = at.executor.jobs.job
    tried_next = job is not None and job.tracker.request == {"content": "a newer content"}
    assert tried_next is (end == "another")
