"""A search with too little time gives a certified plan or float; one that is interrupted goes on to the same plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_bench import search_in
from plan_world import LOUD, MACS, QUIET
from turned_clock import TurnedClock

from agent.common.state_files import Journal
from agent.planning.certificate import Certifier
from agent.planning.what_if import WhatIf


class Ticking(TurnedClock):
    """A second passes at each look."""

    looks = 0

    def monotonic_s(self) -> float:
        self.looks += 1
        self.turn(1.0)
        return super().monotonic_s()


def test_wherever_the_budget_ends_the_plan_is_certified_or_float(search_world: Path) -> None:
    clock = Ticking()
    _, everything = search_in(search_world, replace(MACS, budget_s=1e9), clock)
    whole = clock.looks
    ends = set()
    for budget in range(1, whole + 10, whole // 6):
        clock = Ticking()
        (search_world / "plan.json.journal").unlink(missing_ok=True)
        plan, evidence = search_in(search_world, replace(MACS, budget_s=float(budget)), clock)
        assert clock.looks <= budget + 8
        ends.add((evidence["interrupted"], evidence["chosen"] is not None))
        if evidence["chosen"] is None:
            assert set(plan.floats) == {LOUD, QUIET}
        else:
            assert set(plan.floats) == {LOUD}
    assert {("budget", False), ("", True)} <= ends <= {("budget", False), ("budget", True), ("", True)}
    assert everything["chosen"] is not None


class Work:
    """Counts what a search asks of the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.measured = 0
        for owner, name, counter in ((WhatIf, "_evaluated", "asked"), (Certifier, "_measure", "measured")):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name), counter))

    def _counting(self, wrapped: Callable[..., Any], counter: str) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            found = wrapped(*arguments)
            setattr(self, counter, getattr(self, counter) + 1)
            return found

        return counted


def test_wherever_it_is_interrupted_it_goes_on_to_the_same_plan(
    search_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(monkeypatch)
    plan, _ = search_in(search_world)
    asked, measured = work.asked, work.measured
    assert asked > 5
    assert measured > 10
    put = Journal.put
    for last in range(0, asked + measured, 9):
        (search_world / "plan.json.journal").unlink()
        left = last

        def torn(self: Journal, key: str, value: Any) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            put(self, key, value)

        work.asked = work.measured = 0
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "put", torn)
            with pytest.raises(KeyboardInterrupt):
                search_in(search_world)
        again, _ = search_in(search_world)
        assert again.essence == plan.essence
        assert work.asked + work.measured == asked + measured + 1  # the one that was not written
