"""The memory of decisions: over restarts, over clocks that are set, and over disks that refuse."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from decisions import refusal
from kept import kept_in, refusing, spoil
from turned_clock import TurnedClock

from agent.common.errors import AgentError
from agent.core.actions import Remember
from agent.core.state import NEVER_S, Attempt, Memory, Refusal, Restraint
from agent.jobs.kept_memory import KeptMemory
from agent.monitoring.drift import Regime

HOUR_S, DAY_S = 3600.0, 86_400.0
SCENE = Regime("day", {"x": 0.5}, {"x": 3.0}, {"x": (0.25, 0.125)})


class BoardClock(TurnedClock):
    def set_by(self, seconds: float) -> None:
        self.set_wall(self.wall_s() + seconds)

    def boot(self) -> None:
        self._monotonic_s = 3.0


@pytest.fixture
def clock() -> BoardClock:
    return BoardClock(50.0)


def remembered(folder: Path, clock: BoardClock, memory: Memory) -> Memory:
    """Keep a memory, and read it as one more process does."""
    KeptMemory(kept_in(folder), clock).remember(Remember(memory))
    return KeptMemory(kept_in(folder), clock).read(memory.raised_under)


def test_a_memory_is_read_as_it_was_kept(tmp_path: Path, clock: BoardClock) -> None:
    memory = Memory(
        Restraint((10.0, 20.0), (15.0,), 30.0, NEVER_S),
        {"day": 1, "night": None},
        "rules",
        Refusal(Attempt("settings", SCENE), refusal()),
    )
    kept = remembered(tmp_path, clock, memory)
    assert (kept.restraint, kept.raised) == (memory.restraint, memory.raised)
    assert kept.refusal is not None
    assert (kept.refusal.attempt, kept.refusal.error.code) == (Attempt("settings", SCENE), "recalibration.refused")
    assert KeptMemory(kept_in(tmp_path), clock).read("other rules").raised == {}


def test_a_time_from_the_future_counts_as_now_once(tmp_path: Path, clock: BoardClock) -> None:
    """Else it would hold again after each restart. A time ahead by more than a day is none: the clock was never set."""
    KeptMemory(kept_in(tmp_path), clock).remember(Remember(Memory(Restraint((50.0,), (), 50.0, NEVER_S))))
    clock.boot()
    clock.set_by(-23 * HOUR_S)
    for waited_s in (0.0, 300.0):
        clock.turn(waited_s)
        restraint = KeptMemory(kept_in(tmp_path), clock).read("").restraint
        assert clock.monotonic_s() - restraint.failed_s == pytest.approx(waited_s)
    clock.set_by(-2 * DAY_S)
    assert KeptMemory(kept_in(tmp_path), clock).read("").restraint == Restraint()


def test_after_a_clock_was_set_what_is_written_again_holds_at_the_next_start(tmp_path: Path, clock: BoardClock) -> None:
    """As on a board without a battery: it starts in 1970, and NTP sets its clock minutes later."""
    kept = KeptMemory(kept_in(tmp_path), clock)
    memory = Memory(Restraint((50.0,), (), 50.0, 50.0))
    kept.remember(Remember(memory))
    clock.set_by(-10 * 365 * DAY_S)
    kept.remember(Remember(memory))  # a decision notices the step
    clock.boot()
    clock.turn(60.0)
    restraint = KeptMemory(kept_in(tmp_path), clock).read("").restraint
    assert math.isfinite(restraint.failed_s)
    assert not restraint.is_below_cap(clock.monotonic_s(), 1)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO limits VALUES ('no kind', 1.0)",
        "INSERT INTO limits VALUES ('job', 9e999)",
        "INSERT INTO attempts VALUES ('day', 'rules', -1)",
        "INSERT INTO refusal VALUES ('x', '{}', '{}')",
    ],
)
def test_rows_that_no_tared_has_written_count_as_none(tmp_path: Path, clock: BoardClock, statement: str) -> None:
    kept_in(tmp_path)
    spoil(tmp_path, statement)
    errors: list[AgentError] = []
    assert KeptMemory(kept_in(tmp_path, errors.append), clock).read("rules") == Memory(raised_under="rules")
    assert [error.code for error in errors] == ["state.damaged"]


def test_a_full_disk_is_reported_once_and_nothing_is_raised(tmp_path: Path, clock: BoardClock) -> None:
    errors: list[AgentError] = []
    state = kept_in(tmp_path, errors.append)
    kept = KeptMemory(state, clock)
    with refusing(state):
        for number in range(2):
            kept.remember(Remember(Memory(Restraint((float(number),)))))
    assert [error.code for error in errors] == ["state.write"]
