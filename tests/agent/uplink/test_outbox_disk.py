"""The outbox and its disk: nothing is sent before it is written; full, slow or damaged, it is reported."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bench import fill, small_file_system
from brokers import eventually
from outbox_bench import numbers, opened, put, stored, taken
from turned_clock import TurnedClock

from agent.common.errors import AgentError
from agent.uplink import outbox as outbox_module
from agent.uplink import outbox_store
from agent.uplink.outbox import TELEMETRY
from agent.uplink.outbox_store import ALARM, SAMPLE

pytestmark = pytest.mark.usefixtures("no_thread_left")


class SlowDisk:
    """Each commit sets `begun`, then waits for `written`."""

    def __init__(self) -> None:
        self.begun, self.written = threading.Event(), threading.Event()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    disk, commit = SlowDisk(), outbox_store.OutboxStore.commit

    def slowly(store: Any, *work: Any) -> None:
        disk.begun.set()
        assert disk.written.wait(60.0)
        commit(store, *work)

    monkeypatch.setattr(outbox_store.OutboxStore, "commit", slowly)
    return disk


def test_a_row_is_sent_only_once_it_is_on_the_disk(tmp_path: Path, slow_disk: SlowDisk) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        assert slow_disk.begun.wait(60.0)
        assert outbox.pop() is None
        slow_disk.written.set()
        assert numbers(taken(outbox, 1)) == [1]


def test_samples_share_a_commit_and_an_alarm_does_not_wait(tmp_path: Path) -> None:
    with opened(tmp_path, TurnedClock(), commit_s=60.0) as outbox:
        eventually(lambda: not outbox.is_due)
        put(outbox, 5, TELEMETRY, SAMPLE)
        assert not outbox.is_due
        put(outbox, 1, "alarm", ALARM)
        eventually(lambda: len(stored(tmp_path)) == 6)
        assert numbers(taken(outbox, 6)) == [1, 2, 3, 4, 5, 6]


def test_rows_on_a_disk_that_refuses_for_a_while_are_not_lost(tmp_path: Path) -> None:
    clock = TurnedClock()
    with small_file_system(tmp_path / "disk", "2m") as disk, opened(disk, clock, confirm="collector") as outbox:
        put(outbox, 100)
        eventually(lambda: len(stored(disk)) == 100)
        fill(disk / "ballast")
        put(outbox, 30, size=10_000)
        assert outbox.errors.get(timeout=60.0).code == "state.write"
        put(outbox, 5)
        outbox.connection_started()
        memory = taken(outbox, 35)
        assert max(numbers(memory)) == 135
        for _ in range(5):  # a collector that has nothing of what lies on the disk
            outbox.acknowledge(outbox.epoch, 0)
            clock.turn(5.0)
        (disk / "ballast").unlink()
        clock.turn(60.0)
        arrived = set(numbers(memory))
        while arrived < set(range(1, 136)):
            (document,) = taken(outbox, 1)
            assert "seq" in document, document
            arrived.add(document["seq"])
        outbox.acknowledge(outbox.epoch, 135)
        eventually(lambda: stored(disk) == [])
        assert outbox.dropped == {}


def test_a_damaged_file_is_set_aside_and_reported(tmp_path: Path) -> None:
    (tmp_path / "outbox.sqlite").write_bytes(b"no outbox at all" * 99)
    with opened(tmp_path) as outbox:
        assert outbox.errors.get(timeout=60.0).code == "state.damaged"
        put(outbox, 1)
        assert numbers(taken(outbox, 1)) == [1]
    assert (tmp_path / "outbox.sqlite.damaged.1").exists()


def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "outbox.sqlite")) as db:
        db.execute("PRAGMA user_version = 9")
    before = (tmp_path / "outbox.sqlite").read_bytes()
    with pytest.raises(AgentError, match=r"state\.schema"), opened(tmp_path):
        pass
    assert (tmp_path / "outbox.sqlite").read_bytes() == before


def test_rows_beyond_a_bound_leave_a_range_if_the_disk_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: SlowDisk
) -> None:
    monkeypatch.setattr(outbox_module, "_MOST_PENDING", 10)
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        assert slow_disk.begun.wait(60.0)
        put(outbox, 25)
        slow_disk.written.set()
        documents = taken(outbox, 12)
        assert numbers([document for document in documents if "seq" in document]) == list(range(1, 12))
        (gap,) = [document for document in documents if "from" in document]
        assert (gap["from"], gap["to"], gap["kind"], gap["n"]) == (12, 26, "alarm", 15)
