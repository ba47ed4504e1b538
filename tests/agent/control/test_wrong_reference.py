"""Work of a reference that is proven wrong is replaced, also where the process ended in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from executor_bench import Desk, desk

from agent.monitoring.audit import Mismatch

__all__ = ["desk"]  # the fixture

FOUND = Mismatch(50.0, "out", 3.0, 50.0, "camera", 7, 0.7, "conv1")


def found_by_an_earlier_process(at: Desk, is_answered: bool) -> list[str]:
    """Return what is called once a job makes up for it."""
    pipeline, answers = cast("Any", at.executor.pipeline), list[str]()
    pipeline.mismatch, pipeline.open_mismatch = FOUND, None if is_answered else FOUND
    pipeline.answer_mismatch = lambda: answers.append("answered")
    at.events.clear()
    at.executor.start(0)
    return answers


def test_a_mismatch_that_the_process_before_could_not_act_on_is_reported_and_starts_a_job(
    desk: Callable[..., Desk],
) -> None:
    at = desk()
    answers = found_by_an_earlier_process(at, is_answered=False)
    assert [line.split()[0] for line in at.events].count("reference") == 1
    assert at.executor.config.observe.reference == "onnxruntime"
    assert answers == []
    at.tick()
    assert at.executor.state.job is not None
    assert (at.executor.state.job.kind.trigger, answers) == ("reference", ["answered"])


def test_a_mismatch_that_was_answered_is_no_news(desk: Callable[..., Desk]) -> None:
    at = desk()
    assert found_by_an_earlier_process(at, is_answered=True) == []
    at.tick()
    assert "reference" not in [line.split()[0] for line in at.events]
    assert at.executor.state.job is not None
    assert at.executor.state.job.kind.trigger != "reference"
