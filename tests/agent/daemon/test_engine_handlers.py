"""The operator's commands to the engines: to another regime, and with another loss; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from device import carry_out
from job_bench import JobDeskBench, ScriptedChild, job_desk, two_engines
from operations_bench import Desk, desk

from agent.commands.dispatcher import CommandProgress
from agent.common.errors import CommandError
from agent.contract.commands import RecalibrateArgs, SwitchArgs
from agent.daemon.handlers import EngineHandlers
from agent.jobs.child_process import JobOutcome

__all__ = ["desk", "job_desk", "two_engines"]  # fixtures


def order(at: Desk, op: str, args: Any) -> None:
    carry_out(EngineHandlers(at.operations), op, args, at.results.append)


def knows(at: Desk, monkeypatch: pytest.MonkeyPatch, *regimes: str) -> None:
    monkeypatch.setattr(type(at.operations.regimes), "artefacts", regimes)


def refusal(at: Desk, regime: str) -> str:
    with pytest.raises(CommandError) as caught:
        order(at, "switch", SwitchArgs(regime=regime))
    assert at.service.serving.id == at.raised.id
    return str(caught.value)


def test_an_operator_switches_to_a_regime_that_is_known(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk(raised_serves=True)
    knows(at, monkeypatch, at.raised.id, at.int8.id)
    order(at, "switch", SwitchArgs(regime=at.int8.id))
    assert at.results[0].status == "ACCEPTED"
    (job,) = at.operations._registry.journal.records()
    assert (job.trigger, job.request["op"], job.artefact) == ("switch", "switch", at.int8.id)
    assert job.command_ids == ("c1",)
    assert not at.operations._limits.may_switch, "no other by itself at once"


def test_a_switch_to_an_unknown_or_the_present_regime_is_refused(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk(raised_serves=True)
    assert "no regime 'night'; expected a known regime; none is known yet" in refusal(at, "night")
    knows(at, monkeypatch, at.raised.id)
    assert "the regime in service" in refusal(at, at.raised.id)
    assert f"expected {at.raised.id}" in refusal(at, at.int8.id)


def test_a_recalibration_with_a_loss_of_its_own_is_judged_by_it(desk: Callable[..., Desk]) -> None:
    at = desk(max_loss=0.25)
    order(at, "recalibrate", RecalibrateArgs(max_loss=0.75))
    jobs = at.operations.jobs
    assert jobs.job is not None
    assert jobs._job_request(jobs.job, 8).max_loss == 0.75
    at.cancel()
    order(at, "recalibrate", RecalibrateArgs())
    assert jobs.job is not None
    assert jobs._job_request(jobs.job, 8).max_loss == 0.25


def test_the_next_job_goes_by_the_present_settings(desk: Callable[..., Desk]) -> None:
    at = desk()
    config = at.operations.config
    at.operations.configure(
        config.model_copy(
            update={"recalibration": config.recalibration.model_copy(update={"max_loss": 0.5, "automatic": False})}
        )
    )
    assert at.operations.stopped_by == "recalibration.automatic"
    order(at, "recalibrate", RecalibrateArgs())
    jobs = at.operations.jobs
    assert jobs.job is not None
    assert jobs._job_request(jobs.job, 8).max_loss == 0.5
    for reader in (at.operations._triggers, jobs, at.operations.swap, at.operations._changes):
        assert reader.config.recalibration.max_loss == 0.5


def test_a_limit_that_is_set_while_a_job_runs_is_for_the_next_one(
    job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdict and probation of one candidate go by one limit."""
    operations, limits = job_desk.operations, list[float | None]()
    monkeypatch.setattr(operations.swap, "start", lambda *swap: limits.append(swap[-1]))
    assert operations.recalibrate(CommandProgress("c1", job_desk.results.append), RecalibrateArgs(frames=8))
    for _ in range(3):
        operations.tick({"camera": job_desk.state})
    job_desk.configure(max_loss=0.5)
    ScriptedChild.latest.ends_with(JobOutcome(artefact=job_desk.other.path))
    assert limits == [0.1]
