"""Commands to cancel; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from device import carry_out
from trouble_bench import Desk, desk

from agent.collection.collection import SharedCollection
from agent.commands.authority import Releases
from agent.commands.deliveries import FileReceiver, ModelAdmission, StagedModel
from agent.commands.dispatcher import CommandProgress
from agent.contract.commands import CancelArgs, CommandResult, ModelArgs
from agent.daemon.handlers import EngineHandlers
from agent.jobs.headroom import Headroom
from agent.state.store import StateStore

__all__ = ["desk"]  # the fixture


def cancelled(at: Desk, delivery: FileReceiver[StagedModel] | None = None) -> CommandResult:
    """Return the result of a command to cancel."""
    deliveries = {"model": delivery} if delivery is not None else {}
    answers: list[CommandResult] = []
    carry_out(EngineHandlers(at.executor, deliveries), "cancel", CancelArgs(), answers.append, "c2")
    return answers[-1]


def test_a_job_that_waits_for_headroom_can_be_cancelled(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk()
    assert at.tick() == "alarm"
    monkeypatch.setattr(SharedCollection, "counts", (1000, 1000))
    monkeypatch.setattr(Headroom, "reason_to_wait", lambda _: "no memory")
    at.tick()
    assert at.executor.state.job is not None
    assert at.executor.state.job.waits == "no memory"
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
    at.executor.service.calibration = None
    at.executor.tick({"camera": replace(at.state, drift=None)})
    assert at.paces == [True], "nothing is calibrated yet"


def test_a_candidate_on_probation_can_be_cancelled(desk: Callable[..., Desk]) -> None:
    at = desk(frames=100)
    at.recalibrate()
    at.accept()
    assert cancelled(at).status == "SUCCEEDED"
    assert at.executor.state.trial is None
    assert [(job.trigger, job.state.value) for job in at.journal.records()] == [
        ("command", "ROLLED_BACK"),
        ("rollback", "COMMITTED"),
    ]


def test_a_model_on_its_way_can_be_cancelled(desk: Callable[..., Desk], tmp_path: Path) -> None:
    at, results = desk(), list[CommandResult]()
    releases = Releases(None, StateStore(None))
    bring = at.executor.try_model
    admit = ModelAdmission(tmp_path / "m.onnx", True, 0, releases)
    delivery = FileReceiver(tmp_path / "in", 0, lambda _: None, admit, bring)
    delivery.start(ModelArgs(sha256="0" * 64, size=1), CommandProgress("m1", results.append))
    assert cancelled(at, delivery).status == "SUCCEEDED"
    assert results[-1].status == "FAILED"
    error = cancelled(at, delivery).error
    assert error is not None
    assert error.code == "command.nothing"
