"""A journal that takes no job: what was to be done is not begun, and can be tried again; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from executor_bench import Desk, desk, refuse_journal

from agent.jobs.job import JobJournal
from agent.models.engine_service import LoadedEngine
from engines.store.artefact import Artefact

__all__ = ["desk"]  # the fixture


def test_a_job_that_the_journal_does_not_take_is_none_of_the_days(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk(cooldown_s=0.0, per_day=1)
    begin = JobJournal.start
    refuse_journal(monkeypatch)
    for _ in range(3):
        at.tick()
    assert len([line for line in at.events if "state.write" in line]) == 1, "no try within a minute"
    for _ in range(3):
        at.clock.turn(60.0)
        at.tick()
    monkeypatch.setattr(JobJournal, "start", begin)
    at.clock.turn(60.0)
    at.tick()
    assert at.executor.state.job is not None
    at.cancel()
    at.tick()
    assert at.executor.state.job is None, "one a day"


def test_a_rollback_that_the_journal_does_not_take_changes_nothing(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk(raised_serves=True)
    closed = closings(at, monkeypatch)
    monkeypatch.setattr(at.executor.watch.regimes, "forget", pytest.fail)
    before = at.executor.state.memory
    refuse_journal(monkeypatch)
    at.roll_back()
    error = at.results[-1].error
    assert error is not None
    assert error.code == "state.write"
    assert closed == [at.int8.id]
    assert at.executor.state.memory == before
    assert (at.executor.state.job, at.executor.state.pending) == (None, None)


def test_a_switch_that_the_journal_does_not_take_is_none(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk()
    closed = closings(at, monkeypatch)
    refuse_journal(monkeypatch)
    before = at.executor.state.memory
    assert at.state.drift is not None
    at.tick(drift=replace(at.state.drift, switch_to=at.raised.id))
    assert closed == [at.raised.id]
    assert at.service.serving.id == at.int8.id
    assert at.executor.state.memory == before


def closings(at: Desk, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of loaded engines that have been closed."""
    closed: list[str] = []
    load = at.service.load

    def loading(artefact: Artefact) -> LoadedEngine:
        loaded = load(artefact)
        close = loaded.engine.close

        def closing() -> None:
            closed.append(artefact.id)
            close()

        monkeypatch.setattr(loaded.engine, "close", closing)
        return loaded

    monkeypatch.setattr(at.service, "load", loading)
    return closed
