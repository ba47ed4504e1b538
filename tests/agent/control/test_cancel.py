"""Commands to cancel; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trouble_bench import Desk, desk

from agent.commands.authority import Releases
from agent.commands.deliveries import FileReceiver, ModelAdmission, StagedModel
from agent.commands.dispatcher import CommandProgress
from agent.common.errors import CommandError
from agent.contract.commands import CancelArgs, CommandResult, ModelArgs
from agent.daemon.handlers import engine_handlers
from agent.state.store import StateStore

__all__ = ["desk"]  # the fixture


def cancelled(at: Desk, delivery: FileReceiver[StagedModel] | None = None) -> CommandResult:
    """Return the result of a command to cancel."""
    deliveries = (delivery,) if delivery is not None else ()
    handlers = engine_handlers(at.operations, deliveries)
    answers: list[CommandResult] = []
    handlers["cancel"](CancelArgs(), CommandProgress("c2", answers.append))
    return answers[-1]


def test_a_job_that_waits_for_headroom_can_be_cancelled(desk: Callable[..., Desk]) -> None:
    at = desk()
    assert at.tick() == "alarm"
    job = at.operations.jobs.job
    assert job is not None
    job.tracker.report_waiting("no memory")
    assert cancelled(at).status == "SUCCEEDED"
    assert at.tick() == "", "not again at once, though the alarm is still on"
    (record,) = at.journal.records()
    assert record.state.value == "CANCELLED"


def test_frames_are_observed_at_the_alert_pace_near_an_alarm_and_while_a_job_collects(
    desk: Callable[..., Desk],
) -> None:
    at = desk()
    for closely in (False, True, False):
        at.tick(times=1, state="calm", closely=closely)
    at.recalibrate()
    at.tick(times=1, state="calm")
    cancelled(at)
    at.tick(times=1, state="calm")
    assert at.paces == [False, True, False, True, False]
    at = desk()
    at.operations.service.calibration = None
    at.operations.tick({"camera": replace(at.state, drift=None)})
    assert at.paces == [True], "nothing is calibrated yet"


def test_a_candidate_on_probation_can_be_cancelled(desk: Callable[..., Desk]) -> None:
    at = desk(frames=100)
    at.recalibrate()
    at.accept()
    assert cancelled(at).status == "SUCCEEDED"
    assert not at.operations.swap.is_active
    assert [(job.trigger, job.state.value) for job in at.journal.records()] == [
        ("command", "ROLLED_BACK"),
        ("rollback", "COMMITTED"),
    ]


def test_a_model_on_its_way_can_be_cancelled(desk: Callable[..., Desk], tmp_path: Path) -> None:
    at, results = desk(), list[CommandResult]()
    releases = Releases(None, StateStore(None))
    bring = at.operations.new_model.deliver
    admit = ModelAdmission(tmp_path / "m.onnx", True, 0, releases)
    delivery = FileReceiver(tmp_path / "in", 0, lambda _: None, admit, bring)
    delivery.start(ModelArgs(sha256="0" * 64, size=1), CommandProgress("m1", results.append))
    assert cancelled(at, delivery).status == "SUCCEEDED"
    assert results[-1].status == "FAILED"
    with pytest.raises(CommandError, match=r"command\.nothing"):
        cancelled(at, delivery)
