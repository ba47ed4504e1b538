"""The operator's commands to the engines: to another regime, and with another loss; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device import carry_out
from executor_bench import Desk, desk
from job_bench import JobDeskBench, ScriptedChild, job_desk, two_engines

from agent.commands.dispatcher import CommandProgress
from agent.contract.commands import RecalibrateArgs, SwitchArgs
from agent.core.due import stopped_by
from agent.daemon.handlers import EngineHandlers
from agent.jobs import request as requests_module
from agent.jobs.child_process import JobOutcome
from agent.jobs.request import JobRequest
from agent.serving import trial

__all__ = ["desk", "job_desk", "two_engines"]  # fixtures


def order(at: Desk, op: str, args: Any) -> None:
    carry_out(EngineHandlers(at.executor), op, args, at.results.append)


def knows(at: Desk, monkeypatch: pytest.MonkeyPatch, *regimes: str) -> None:
    monkeypatch.setattr(type(at.executor.watch.regimes), "artefacts", regimes)


def refusal(at: Desk, regime: str) -> str:
    order(at, "switch", SwitchArgs(regime=regime))
    assert at.service.serving.id == at.raised.id
    error = at.results[-1].error
    assert error is not None
    return error.message


def test_an_operator_switches_to_a_regime_that_is_known(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk(raised_serves=True)
    knows(at, monkeypatch, at.raised.id, at.int8.id)
    order(at, "switch", SwitchArgs(regime=at.int8.id))
    assert at.results[0].status == "ACCEPTED"
    (job,) = at.executor.journal.records()
    assert (job.trigger, job.request["op"], job.artefact) == ("switch", "switch", at.int8.id)
    assert job.command_ids == ("c1",)
    switched_s = at.executor.state.memory.restraint.switched_s
    assert switched_s == at.clock.monotonic_s(), "no other by itself at once"


def test_a_switch_to_an_unknown_or_the_present_regime_is_refused(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk(raised_serves=True)
    assert "no regime 'night'; expected a known regime; none is known yet" in refusal(at, "night")
    knows(at, monkeypatch, at.raised.id)
    assert "the regime in service" in refusal(at, at.raised.id)
    assert f"expected {at.raised.id}" in refusal(at, at.int8.id)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[JobRequest]:
    """The requests to child processes."""
    written: list[JobRequest] = []
    write = requests_module.write_job

    def note(folder: Path, request: JobRequest, *more: Any) -> None:
        written.append(request)
        write(folder, request, *more)

    monkeypatch.setattr("agent.jobs.workshop.write_job", note)
    return written


def begin(at: JobDeskBench, args: RecalibrateArgs) -> None:
    """Recalibrate by command, until a child has the job."""
    at.executor.recalibrate(CommandProgress("c1", at.results.append), args)
    for _ in range(3):
        at.executor.tick({"camera": at.state})


def test_a_recalibration_with_a_loss_of_its_own_is_judged_by_it(
    job_desk: JobDeskBench, requests: list[JobRequest]
) -> None:
    for args in (RecalibrateArgs(frames=8, max_loss=0.75), RecalibrateArgs(frames=8)):
        begin(job_desk, args)
        job_desk.executor.stop("the test goes on")
    assert [request.max_loss for request in requests] == [0.75, 0.1]


def test_the_next_job_goes_by_the_present_settings(job_desk: JobDeskBench, requests: list[JobRequest]) -> None:
    at = job_desk
    at.configure(max_loss=0.5, automatic=False)
    assert stopped_by(at.executor.now, at.executor.config, at.executor.state) == "recalibration.automatic"
    begin(at, RecalibrateArgs(frames=8))
    assert requests[-1].max_loss == 0.5


def test_a_limit_that_is_set_while_a_job_runs_is_for_the_next_one(
    job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdict and probation of one candidate go by one limit."""
    limits: list[float] = []
    probation = trial.Probation

    def judge(*args: Any, **more: Any) -> Any:
        limits.append(args[4])
        return probation(*args, **more)

    monkeypatch.setattr("agent.control.exchange.Probation", judge)
    begin(job_desk, RecalibrateArgs(frames=8))
    job_desk.configure(max_loss=0.5)
    ScriptedChild.latest.ends_with(JobOutcome(artefact=job_desk.other.path))
    assert limits == [0.1]
