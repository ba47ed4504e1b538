"""When a new model is tried, and when again; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_job_requests import ask
from test_raising_operations import Desk, desk
from test_refused_journal import refuse_journal

from agent import new_model
from agent.errors import AgentError
from agent.job import Job
from agent.outcome import Outcome

__all__ = ["desk"]  # the fixture


def test_a_new_model_supersedes_what_is_under_way(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    at = desk()
    assert ask(at, "c1")
    built: list[Any] = []
    monkeypatch.setattr(at.operations._jobs, "build_reference", built.append)
    at.operations.new_model.found("another content")
    at.tick()
    at.tick()
    assert at.results[-1].error is not None
    assert "superseded by a newer model" in at.results[-1].error.message
    (report,) = built
    assert (report.trigger, report.request) == ("model", {"content": "another content"})


def found_model(at: Desk, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A new content of the model's file is there; the reports of its trials."""
    built: list[Any] = []

    def build(report: Any) -> None:
        built.append(report)
        at.operations._jobs._begin(Job("model", 1, "max", report))

    monkeypatch.setattr(at.operations._jobs, "build_reference", build)
    monkeypatch.setattr(at.operations._jobs, "tick", lambda: None)
    at.operations.new_model.found("another content")
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
    at.operations._retry_s = 0.0
    at.tick()
    assert len(built) == 1


@pytest.mark.parametrize(
    ("code", "told", "trials"),
    [
        ("recalibration.memory", "recalibration.memory", 2),
        ("store.write", "store.write", 2),
        ("recalibration.crash", "model.changed", 1),
        ("engine.graph", "model.changed", 1),
        ("", "", 2),
    ],
)
def test_a_trial_that_says_nothing_of_the_model_is_repeated_after_a_minute(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, code: str, told: str, trials: int
) -> None:
    """Without a code the job is abandoned, as by an operator's rollback."""
    at = desk()
    built = found_model(at, monkeypatch)
    at.tick()
    job = at.operations._jobs.job
    assert job is not None
    if code:
        at.operations._jobs._finish(job, Outcome(error=AgentError(code, "", "", "")))
    else:
        at.cancel()
    assert any(told in line for line in at.told)
    at.tick()
    assert len(built) == 1
    at.operations.new_model._try_at_s -= new_model._AGAIN_S
    at.cancel()  # what else has begun meanwhile
    at.tick()
    assert len(built) == trials
