"""Decisions about low fidelity, regimes and rollbacks, state by state; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from executor_bench import Desk, desk, snapshot_of
from kept import kept_in, spoil

from agent.common.errors import AgentError
from agent.control.reasons import explain
from agent.jobs.child_process import JobOutcome
from agent.jobs.fingerprints import raising_id
from agent.jobs.kept_memory import KeptMemory

__all__ = ["desk"]  # the fixture


def test_low_fidelity_starts_one_job_and_is_reported_once(desk: Callable[..., Desk]) -> None:
    at = desk()
    at.tick()
    at.tick()
    assert at.rung == 1
    assert [line.split()[0] for line in at.events].count("fidelity") == 1
    at.cancel()
    at.tick()
    assert at.rung == 1  # nothing was tried


@pytest.mark.parametrize("recalibration", [{"raise_precision": False}, {"automatic": False}])
def test_low_fidelity_is_only_reported_where_the_owner_wants_no_job(
    desk: Callable[..., Desk], recalibration: dict[str, object]
) -> None:
    at = desk(**recalibration)
    at.tick()
    assert at.executor.state.job is None
    assert [line.split()[0] for line in at.events] == ["fidelity"]


def test_raising_precision_counts_against_the_daily_cap(desk: Callable[..., Desk]) -> None:
    at = desk(per_day=1)
    for _ in range(3):
        at.tick()
        at.cancel()
    assert at.executor.state.job is None
    assert len([line for line in at.events if "recalibration.cap" in line]) == 1
    assert any("low fidelity after 1 jobs in a day" in line for line in at.events)


@pytest.mark.parametrize("automatic", [True, False])
def test_regimes_are_switched_by_themselves_only_where_the_owner_lets_them(
    desk: Callable[..., Desk], automatic: bool
) -> None:
    at = desk(automatic=automatic)
    assert at.state.drift is not None
    at.tick(drift=replace(at.state.drift, switch_to=at.raised.id))
    assert at.service.serving.id == (at.raised.id if automatic else at.int8.id)
    assert at.service.is_precision_raised is automatic


def test_a_first_calibration_is_made_all_the_same(desk: Callable[..., Desk]) -> None:
    at = desk(automatic=False)
    at.service.calibration = None
    at.tick(drift=None)
    assert at.executor.state.job is not None
    assert at.executor.state.job.kind.trigger == "first-start"


def test_a_raise_that_the_operator_took_back_is_not_repeated_until_the_settings_change(
    desk: Callable[..., Desk], tmp_path: Path
) -> None:
    at = desk(raised_serves=True, cooldown_s=0.0)
    at.roll_back()
    assert at.results[-1].status == "SUCCEEDED"
    assert at.service.serving.id == at.int8.id
    assert dict(at.service.plan.floats) == {}
    at.tick()
    assert at.rung is None
    origin = raising_id(at.executor.config, at.service)
    assert KeptMemory(kept_in(tmp_path / "state")).read(origin).next_rung(at.int8.id) == 0
    again = desk(cooldown_s=0.0)
    assert again.service.serving.id == at.int8.id
    again.tick()
    assert again.rung is None
    spoil(tmp_path / "state", "UPDATE attempts SET origin = 'another word'")
    otherwise = desk(cooldown_s=0.0)
    otherwise.tick()
    assert otherwise.rung == 1


def test_a_cooldown_follows_a_rollback_whatever_served(desk: Callable[..., Desk]) -> None:
    at = desk(cooldown_s=600.0)
    at.roll_back()  # to the raised one
    at.tick()
    assert at.rung is None


@pytest.mark.parametrize(("code", "rung"), [("recalibration.disk", 1), ("recalibration.refused", 2)])
def test_only_a_candidate_that_was_refused_asks_for_more(desk: Callable[..., Desk], code: str, rung: int) -> None:
    at = desk(cooldown_s=0.0)
    at.tick()
    at.finish(JobOutcome(error=AgentError(code, "", "", "")))
    at.tick()
    assert at.rung == rung


def test_status_says_so_where_no_plan_helps_any_more(desk: Callable[..., Desk]) -> None:
    at = desk(cooldown_s=0.0)
    at.tick()
    at.finish(JobOutcome(error=AgentError("precision.exhausted", "", "", "")))
    at.tick()
    reasons = explain(snapshot_of(at.executor, {"camera": at.state}))
    assert reasons.code == "precision.exhausted"
    recalibration = at.executor.config.recalibration.model_copy(update={"max_loss": 0.2})
    at.executor.configure(at.executor.config.model_copy(update={"recalibration": recalibration}))
    (monitor,) = at.executor.pipeline.observer.monitors.values()
    assert monitor.config.recalibration.max_loss == 0.2, "what explains an alarm goes by the same limit"
    at.tick()
    assert at.rung == 1, "more is accepted"
    assert f"the precision of {at.int8.id} were tried, or taken back; retrain the layers" in reasons.held_back


def test_going_back_to_a_raised_engine_is_no_attempt(desk: Callable[..., Desk]) -> None:
    at = desk(cooldown_s=0.0)
    at.roll_back()  # to the raised one, which was current before
    assert at.service.is_precision_raised
    at.tick()
    assert at.rung == 1
