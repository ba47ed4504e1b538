"""A journal that takes no job: what was to be done is not begun, and can be tried again; no frame is served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from operations_bench import Desk, desk, refuse_journal

from agent.common.errors import AgentError
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
    assert at.operations.job is not None
    at.cancel()
    at.tick()
    assert at.operations.job is None, "one a day"


def test_a_rollback_that_the_journal_does_not_take_changes_nothing(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk(raised_serves=True)
    closed = closings(at, monkeypatch)
    monkeypatch.setattr(at.operations.regimes, "forget", pytest.fail)
    monkeypatch.setattr(at.operations._attempts, "forbid", pytest.fail)
    refuse_journal(monkeypatch)
    with pytest.raises(AgentError, match=r"state\.write"):
        at.roll_back()
    assert closed == [at.int8.id]
    assert at.operations._limits.may_start
    assert not at.operations.swap.is_active


def test_a_switch_that_the_journal_does_not_take_is_none(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = desk()
    closed = closings(at, monkeypatch)
    refuse_journal(monkeypatch)
    with pytest.raises(AgentError, match=r"state\.write"):
        at.operations._switch(at.raised.id)
    assert closed == [at.raised.id]
    assert at.operations._limits.may_switch


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
