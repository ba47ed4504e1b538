"""When a new model is tried, and when again; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device import carry_out
from executor_bench import Desk, ask, desk, refuse_journal

from agent.commands.deliveries import StagedModel
from agent.commands.dispatcher import CommandProgress
from agent.common.errors import AgentError
from agent.contract.commands import CancelArgs, CommandResult
from agent.core import facts as fact
from agent.daemon.handlers import EngineHandlers
from agent.jobs import workshop
from agent.jobs.child_process import JobOutcome
from agent.serving.trial import Probation

__all__ = ["desk"]  # the fixture


def tries(at: Desk) -> list[dict[str, Any]]:
    """The trials of models so far, by what was requested."""
    return [dict(record.request) for record in at.executor.journal.records() if record.trigger == "model"]


def changes(at: Desk, content: str = "another content") -> None:
    """The model's file has another content."""
    at.executor.take(fact.ModelChanged(content))


def test_a_new_model_supersedes_what_is_under_way(desk: Callable[..., Desk]) -> None:
    at = desk()
    assert ask(at, "c1")
    changes(at)
    at.tick()
    at.tick()
    assert at.results[-1].error is not None
    assert "superseded by a newer model" in at.results[-1].error.message
    assert tries(at) == [{"content": "another content"}]


def test_a_model_that_the_journal_takes_no_job_for_is_tried_later(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk()
    changes(at)
    with monkeypatch.context() as patched:
        refuse_journal(patched)
        at.tick()
        assert tries(at) == []
    at.clock.turn(60.0)
    at.tick()
    assert len(tries(at)) == 1


@pytest.mark.parametrize(
    ("code", "reported", "trials"),
    [
        ("recalibration.memory", "recalibration.memory", 2),
        ("engine.graph", "model.changed", 1),
        ("", "", 2),
    ],
)
def test_a_trial_that_says_nothing_of_the_model_is_repeated_after_a_minute(
    desk: Callable[..., Desk], code: str, reported: str, trials: int
) -> None:
    """Without a code the job is abandoned, as by an operator's rollback."""
    at = desk()
    changes(at)
    at.tick()
    if code:
        at.finish(JobOutcome(error=AgentError(code, "", "", "")))
    else:
        at.cancel()
    assert any(reported in line for line in at.events)
    at.tick()
    assert len(tries(at)) == 1
    at.clock.turn(60.0)
    at.cancel()  # what else has begun meanwhile
    at.tick()
    assert len(tries(at)) == trials


def cancel(at: Desk) -> None:
    """Cancel by command."""
    answers: list[CommandResult] = []
    carry_out(EngineHandlers(at.executor), "cancel", CancelArgs(), answers.append, "cancel")
    assert answers[-1].status == "SUCCEEDED"


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
        at.executor.try_model(staged)
        self.file = staged.file

    def _take_up(self) -> None:
        self.taken_up += 1

    def ends(self, **outcome: Any) -> None:
        self.at.finish(JobOutcome(**outcome))
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
    model = Delivered(at, tmp_path)
    monkeypatch.setattr(Probation, "is_finished", property(lambda _: not model.lasts))
    return model


def test_a_delivered_model_takes_its_place_only_once_the_job_has_passed_it(delivered: Delivered) -> None:
    delivered.at.tick()
    delivered.builds()
    assert delivered.at.executor.state.candidate is not None, "it answers live frames"
    assert (delivered.served.read_bytes(), delivered.taken_up) == (b"before", 0)
    delivered.passes_probation()
    assert (delivered.served.read_bytes(), delivered.taken_up) == (b"new", 1)
    model = delivered.at.executor.state.model
    assert model is not None
    changes(delivered.at, model.content)  # the watch has seen it
    assert delivered.at.executor.state.needs_new_run
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
    assert delivered.at.executor.state.model is None, "the next try is the sender's"


@pytest.mark.parametrize("begun", [False, True])
def test_a_delivered_model_is_cancelled_before_its_trial_and_in_it(delivered: Delivered, begun: bool) -> None:
    if begun:
        delivered.at.tick()
    cancel(delivered.at)
    assert delivered.results[-1].error is not None
    assert "the operator cancels it" in delivered.results[-1].error.message
    delivered.at.tick()
    job = delivered.at.executor.state.job
    assert job is None or job.kind.trigger != "model"
    assert not delivered.file.exists()
    assert delivered.served.read_bytes() == b"before"


def test_a_place_that_refuses_fails_the_job(delivered: Delivered) -> None:
    delivered.at.tick()
    delivered.served.unlink()
    delivered.served.mkdir()
    delivered.builds()
    delivered.passes_probation()
    assert delivered.results[-1].status == "FAILED"
    assert delivered.at.executor.state.needs_new_run, "with the model that is there"


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
    delivered.at.clock.turn(60.0)
    delivered.at.tick()
    assert delivered.at.executor.state.model is None
    assert not delivered.at.executor.state.needs_new_run


def test_the_owners_consent_reaches_the_job(delivered: Delivered, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = StagedModel(delivered.part, delivered.served, CommandProgress("m2", lambda _: None), lambda: None, True)
    staged.stage(0)
    accepted: list[bool] = []
    monkeypatch.setattr(workshop, "write_reference_job", lambda *job: accepted.append(job[-1]))
    monkeypatch.setattr(workshop, "JobProcess", lambda *_, **__: None)
    delivered.at.executor.try_model(staged)
    for _ in range(3):
        delivered.at.tick()
    assert accepted == [True]


@pytest.mark.parametrize("end", ["another", "the former", "cancelled"])
def test_a_model_on_probation_that_is_superseded_is_taken_back_and_never_committed(
    delivered: Delivered, end: str
) -> None:
    """Else the next run would serve the newer file untried."""
    at = delivered.at
    delivered.at.tick()
    delivered.builds()
    assert at.executor.state.candidate is not None
    if end == "cancelled":
        cancel(at)
    else:
        changes(at, "a newer content")
    if end == "the former":
        changes(at, "")
    assert at.executor.state.candidate is None
    delivered.passes_probation()
    assert not at.executor.state.needs_new_run
    assert (delivered.served.read_bytes(), delivered.results[-1].status) == (b"before", "FAILED")
    at.tick()
    tried_next = {"content": "a newer content"} in tries(at)
    assert tried_next is (end == "another")
