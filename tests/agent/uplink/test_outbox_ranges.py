"""Dropped ranges are bounded, too: the oldest epochs that consist of ranges alone are deleted, and counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent.mqtt.config import OutboxConfig
from agent.uplink.outbox_store import ALARM, EVENT, DroppedRange, OutboxRow, OutboxStore, PendingWrites

BYTES = 100_000
FIRST = 1000  # an epoch


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OutboxStore]:
    config = OutboxConfig(bytes=BYTES, confirm="collector")
    with closing(OutboxStore(tmp_path / "outbox.sqlite", config, lambda error: pytest.fail(str(error)))) as store:
        yield store


def row(epoch: int, seq: int, kind: str = "job", rank: int = EVENT, size: int = 300) -> OutboxRow:
    return OutboxRow(epoch, seq, kind, rank, time.time(), b"x" * size)


def short_epochs(store: OutboxStore, first: int, count: int) -> None:
    """Write one row for each of so many starts without a broker."""
    rows = [row(epoch, 1) for epoch in range(first, first + count)]
    store.commit(PendingWrites(rows=rows), (first + count - 1, 1))


def all_due(store: OutboxStore) -> list[OutboxRow | DroppedRange]:
    store.commit(PendingWrites(), (store.epoch, 0), again=True)
    return store.due(10**6)


def test_after_any_number_of_short_epochs_there_is_room_for_an_alarm(
    store: OutboxStore, caplog: pytest.LogCaptureFixture
) -> None:
    for first in range(FIRST, FIRST + 10_000, 1000):
        short_epochs(store, first, 1000)
    assert store._table.size_bytes() <= BYTES
    store.commit(PendingWrites(rows=[row(store.epoch, 1, "alarm", ALARM)]), (store.epoch, 1))
    due = all_due(store)
    assert isinstance(due[-1], OutboxRow)
    assert due[-1].kind == "alarm"
    runs, rows = (
        [each for each in due if isinstance(each, DroppedRange)],
        [each for each in due if isinstance(each, OutboxRow)],
    )
    assert len(rows) > 50, "ranges leave the rows their share"
    assert [each.epoch for each in due] == [*range(due[0].epoch, FIRST + 10_000), store.epoch]
    assert runs, "the newest are kept"
    assert store.dropped["job"] == 10_000 - (len(rows) - 1)
    assert store.dropped["range"] == due[0].epoch - FIRST
    assert "outbox=forgotten" in caplog.text


def test_a_range_of_an_epoch_that_goes_on_is_kept(store: OutboxStore) -> None:
    """Without it a collector would wait for it for ever."""
    lost = [((FIRST, 1), "telemetry"), ((store.epoch, 1), "telemetry")]
    store.commit(PendingWrites(rows=[row(FIRST, 2, "alarm", ALARM)], lost=lost), (store.epoch, 1))
    short_epochs(store, store.epoch + 1, 3000)  # later ones: as on a board whose clock was wrong
    due = all_due(store)
    assert due[0] == DroppedRange(FIRST, 1, 1, {"telemetry": 1})
    assert due[1].key == (FIRST, 2)
    assert due[2] == DroppedRange(store.epoch, 1, 1, {"telemetry": 1})
    assert due[3].epoch > store.epoch + 1, "and what comes next is forgotten"
    assert store.dropped["range"] > 0


def test_ranges_of_one_epoch_become_one(store: OutboxStore) -> None:
    for first in range(1, 3001, 100):
        numbers = range(first, first + 100)
        rows = [row(store.epoch, seq, *(("alarm", ALARM) if seq % 2 else ("job", EVENT))) for seq in numbers]
        store.commit(PendingWrites(rows=rows), (store.epoch, numbers[-1]))
    assert store._table.size_bytes() <= BYTES
    oldest = all_due(store)[0]
    assert isinstance(oldest, DroppedRange)
    assert oldest.first == 1
    assert oldest.last > 2000
    assert sum(oldest.counts.values()) == oldest.last
    assert "range" not in store.dropped


def test_memory_that_replaces_the_disk_has_the_same_bound(tmp_path: Path) -> None:
    config = OutboxConfig(bytes=BYTES, confirm="collector")
    with closing(OutboxStore(tmp_path / "never there" / "outbox.sqlite", config, lambda _: None)) as store:
        for first in range(FIRST, FIRST + 5000, 1000):
            short_epochs(store, first, 1000)
        assert store._table.size_bytes() <= BYTES
        assert not store._on_disk
