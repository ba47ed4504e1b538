"""The outbox and time: how old a row is after the clock was set, and how often the disk is written to."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from device import TOPICS
from outbox_bench import AT_ONCE, put, stored, taken
from turned_clock import TurnedClock

from agent.mqtt.config import OutboxConfig
from agent.uplink.outbox import TELEMETRY, Outbox
from agent.uplink.outbox_store import SAMPLE

HOUR_S = 3600.0
YEAR_S = 365 * 86_400.0


@pytest.fixture
def outbox(tmp_path: Path, clock: TurnedClock) -> Iterator[Outbox]:
    with closing(unthreaded(tmp_path, clock)) as outbox:
        yield outbox


def unthreaded(folder: Path, clock: TurnedClock, **config: Any) -> Outbox:
    """An outbox that writes only when the test calls `turn`."""
    settings = {**AT_ONCE, "commit_s": 60.0, "confirm": "collector", "days": 1.0, **config}
    return Outbox(folder / "outbox.sqlite", TOPICS, OutboxConfig(**settings), clock)


def walls(folder: Path) -> list[float]:
    with closing(sqlite3.connect(folder / "outbox.sqlite")) as db:
        return [wall for (wall,) in db.execute("SELECT wall FROM rows ORDER BY epoch, seq")]


@pytest.mark.parametrize("set_to_s", [YEAR_S, None])
@pytest.mark.parametrize("written", [True, False])
def test_rows_from_before_the_clock_was_set_get_their_age_by_the_new_one(
    tmp_path: Path, written: bool, set_to_s: float | None
) -> None:
    """written: before that, or together with later rows. set_to_s: years later; None: from 1970."""
    clock = TurnedClock(wall_s=1_750_000_000.0 if set_to_s else 40.0)
    with closing(unthreaded(tmp_path, clock)) as outbox:
        put(outbox, 2, TELEMETRY, SAMPLE)
        if written:
            outbox.hurry()
            outbox.turn()
            assert len(walls(tmp_path)) == 2
        clock.turn(10.0)
        clock.set_wall(clock.wall_s() + set_to_s if set_to_s else 1_800_000_000.0)
        put(outbox, 1)
        outbox.turn()
        now = clock.wall_s()
        assert walls(tmp_path) == [now - 10.0, now - 10.0, now]
        clock.turn(2 * HOUR_S)
        put(outbox, 1)
        outbox.turn()
        assert outbox.dropped.total() == 0


def test_an_ack_waits_for_the_next_commit(tmp_path: Path, clock: TurnedClock, outbox: Outbox) -> None:
    put(outbox, 1)
    outbox.turn()
    taken(outbox, 1)
    outbox.acknowledge(outbox.epoch, 1)
    clock.turn(59.0)
    assert not outbox.is_due
    clock.turn(1.0)
    assert outbox.is_due
    outbox.turn()
    assert stored(tmp_path) == []


def test_a_start_with_a_clock_that_is_years_ahead_drops_nothing(tmp_path: Path, clock: TurnedClock) -> None:
    with closing(unthreaded(tmp_path, clock)) as outbox:
        put(outbox, 3)
        outbox.turn()
    true_wall_s = clock.wall_s()
    clock.set_wall(true_wall_s + 10 * YEAR_S)
    with closing(unthreaded(tmp_path, clock)) as outbox:
        put(outbox, 1)
        outbox.turn()
        clock.set_wall(true_wall_s)  # a time server answers
        put(outbox, 1)
        outbox.turn()
        assert len(stored(tmp_path)) == 5
        assert outbox.dropped.total() == 0
