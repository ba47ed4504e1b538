"""The outbox and a disk that is away for a while: rows, acks and epochs of memory and of the disk are combined."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from brokers import eventually
from outbox_bench import numbers, opened, put, taken
from turned_clock import TurnedClock

from agent.uplink import outbox_store
from agent.uplink.outbox_store import NO_CLOCK_S, OutboxTable, in_memory

pytestmark = pytest.mark.usefixtures("no_thread_left")

UNSET, SET = 40.0, 1_800_000_000.0  # Unix s of a clock without a battery, before and after it was set


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock(wall_s=SET)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(outbox_store, "_RETRY_S", 0.0)
    disk = tmp_path / "disk"
    disk.mkdir()
    return disk


@contextmanager
def away(disk: Path) -> Iterator[None]:
    """As if it were not mounted."""
    disk.rename(disk.with_name("away"))
    yield
    disk.with_name("away").rename(disk)


@contextmanager
def refusing(disk: Path) -> Iterator[None]:
    """Another process has locked the file."""
    with closing(sqlite3.connect(disk / "outbox.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def stored(disk: Path) -> list[tuple[int, int, int]]:
    """Epoch, number, and whether a broker has it, of each row; none while there is no file."""
    if not (disk / "outbox.sqlite").exists():
        return []
    with closing(sqlite3.connect(f"file:{disk / 'outbox.sqlite'}?mode=ro", uri=True)) as db:
        if not db.execute("SELECT * FROM sqlite_master").fetchall():
            return []
        return db.execute("SELECT epoch, seq, sent FROM rows ORDER BY epoch, seq").fetchall()


def epochs(disk: Path) -> set[int]:
    """Epochs of the rows on the disk."""
    return {epoch for epoch, _, _ in stored(disk)}


def test_a_collector_of_before_counts_again_once_the_disk_is_back(disk: Path, clock: TurnedClock) -> None:
    with opened(disk, clock) as first:
        put(first, 1)
        taken(first, 1)
        first.acknowledge(first.epoch, 1)
        eventually(lambda: first._store.needs_collector)
        put(first, 1)
        taken(first, 1)
    clock.turn(60.0)
    with ExitStack() as stack:
        with away(disk):
            outbox = stack.enter_context(opened(disk, clock))
            assert outbox.errors.get(timeout=60.0).code == "state.write"
        put(outbox, 1)
        eventually(lambda: outbox.epoch in epochs(disk))
        assert numbers(taken(outbox, 2)) == [2, 1]
    assert stored(disk) == [(first.epoch, 2, 1), (outbox.epoch, 1, 1)], "no collector has confirmed them"


def test_rows_wait_for_a_collector_whose_first_ack_came_while_the_disk_was_away(disk: Path) -> None:
    with ExitStack() as stack:
        with away(disk):
            outbox = stack.enter_context(opened(disk))
            put(outbox, 1)
            taken(outbox, 1)
            outbox.acknowledge(outbox.epoch, 1)
            eventually(lambda: outbox._store.needs_collector)
        put(outbox, 1)
        eventually(lambda: (outbox.epoch, 2, 0) in stored(disk))
    with opened(disk) as later:
        assert numbers(taken(later, 1)) == [2]
    assert stored(disk) == [(outbox.epoch, 2, 1)], "no collector has confirmed it"


def test_starts_without_a_disk_and_without_a_clock_do_not_share_an_epoch(tmp_path: Path, clock: TurnedClock) -> None:
    clock.set_wall(UNSET)
    seen = set()
    for _ in range(20):
        with opened(tmp_path / "never there", clock) as outbox:
            seen.add(outbox.epoch)
    assert len(seen) == 20
    assert max(seen) < NO_CLOCK_S, "what is real Unix time comes after all of them"
    clock.set_wall(SET)
    with opened(tmp_path / "never there", clock) as outbox:
        assert outbox.epoch == SET


def test_a_later_epoch_begins_once_the_disk_shows_later_ones(disk: Path, clock: TurnedClock) -> None:
    with opened(disk, clock, confirm="collector") as first:
        put(first, 2)
    clock.set_wall(UNSET)
    with ExitStack() as stack:
        with away(disk):
            outbox = stack.enter_context(opened(disk, clock, confirm="collector"))
            blind = outbox.epoch
            assert blind < first.epoch
            put(outbox, 3)
            assert numbers(taken(outbox, 3)) == [1, 2, 3]
        put(outbox, 1)
        eventually(lambda: outbox.epoch != blind)
        put(outbox, 2)
        arrived = [(document["epoch"], document["seq"]) for document in taken(outbox, 8)]
    assert outbox.epoch == first.epoch + 1
    assert arrived[:6] == [(blind, 1), (blind, 2), (blind, 3), (blind, 4), (first.epoch, 1), (first.epoch, 2)]
    assert arrived[6:] == [(outbox.epoch, 1), (outbox.epoch, 2)]
    with opened(disk, clock) as third:
        assert third.epoch == outbox.epoch + 1


def test_a_fact_only_grows() -> None:
    with closing(in_memory()) as db:
        rows = OutboxTable(db)
        for value in (0, 7, 3):
            rows.keep_fact("epoch", value)
        assert rows.fact("epoch") == 7


def test_an_epoch_that_is_later_than_all_on_the_disk_goes_on(disk: Path, clock: TurnedClock) -> None:
    clock.set_wall(UNSET)
    with opened(disk, clock) as first:
        put(first, 1)
    clock.set_wall(SET)
    with ExitStack() as stack:
        with away(disk):
            outbox = stack.enter_context(opened(disk, clock))
            put(outbox, 1)
            taken(outbox, 1)
        put(outbox, 1)
        eventually(lambda: epochs(disk) == {first.epoch, int(SET)})
        assert outbox.epoch == SET
    with opened(disk, clock) as third:
        assert third.epoch == SET + 1


def test_an_ack_that_the_disk_refused_counts_when_it_comes_again(disk: Path) -> None:
    with opened(disk, confirm="collector") as first:
        put(first, 5)
    with opened(disk, confirm="collector") as outbox:
        assert numbers(taken(outbox, 5)) == [1, 2, 3, 4, 5]
        with refusing(disk):
            outbox.acknowledge(first.epoch, 5)  # first: it is in the transaction that is refused
            put(outbox, 1)
            assert outbox.errors.get(timeout=60.0).code == "state.write"
        eventually(lambda: not outbox._pending)
        put(outbox, 1)
        eventually(lambda: outbox.epoch in epochs(disk))
        assert epochs(disk) == {first.epoch, outbox.epoch}, "the ack was lost"
        outbox.acknowledge(first.epoch, 5)  # as a collector does that is sent them again
        eventually(lambda: epochs(disk) == {outbox.epoch})
