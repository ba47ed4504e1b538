"""The outbox and its disk: nothing is sent before it is written; full, slow or damaged, it is told of."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bench import fill, small_file_system
from brokers import eventually
from outbox_bench import numbers, opened, put, stored, taken

from agent.common.errors import AgentError
from agent.uplink import outbox as outbox_module
from agent.uplink import outbox_store
from agent.uplink.outbox import TELEMETRY
from agent.uplink.outbox_store import ALARM, SAMPLE

pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What the disk waits for until the test sets it."""
    event, commit = threading.Event(), outbox_store.OutboxStore.commit

    def slowly(store: Any, *work: Any) -> None:
        assert event.wait(20.0)
        commit(store, *work)

    monkeypatch.setattr(outbox_store.OutboxStore, "commit", slowly)
    return event


def test_nothing_is_sent_that_is_not_on_the_disk(tmp_path: Path, written: threading.Event) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        for _ in range(50):
            assert outbox.pop() is None
            time.sleep(0.001)
        written.set()
        assert numbers(taken(outbox, 1)) == [1]


def test_samples_share_a_commit_and_an_alarm_does_not_wait(tmp_path: Path) -> None:
    with opened(tmp_path, commit_s=60.0) as outbox:
        put(outbox, 5, TELEMETRY, SAMPLE)
        time.sleep(0.05)
        assert stored(tmp_path) == []
        put(outbox, 1, "alarm", ALARM)
        eventually(lambda: len(stored(tmp_path)) == 6)
        assert numbers(taken(outbox, 6)) == [1, 2, 3, 4, 5, 6]


def test_what_lay_on_a_disk_that_refused_for_a_while_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_store, "_RETRY_S", 0.05)
    monkeypatch.setattr(outbox_module, "_STILL_MISSING_S", 0.0)
    with small_file_system(tmp_path / "disk", "2m") as disk, opened(disk, confirm="collector") as outbox:
        put(outbox, 100)
        eventually(lambda: len(stored(disk)) == 100)
        fill(disk / "ballast")
        put(outbox, 30, size=10_000)
        assert outbox.errors.get(timeout=5.0).code == "outbox.write"
        put(outbox, 5)
        outbox.connection_started()
        memory = taken(outbox, 35)
        assert max(numbers(memory)) == 135
        for _ in range(5):  # a collector that has nothing of what lies on the disk
            outbox.acknowledge(outbox.epoch, 0)
        (disk / "ballast").unlink()
        arrived = set(numbers(memory))
        while arrived < set(range(1, 136)):
            (document,) = taken(outbox, 1)
            assert "seq" in document, document
            arrived.add(document["seq"])
        outbox.acknowledge(outbox.epoch, 135)
        eventually(lambda: stored(disk) == [])
        assert outbox.dropped == {}


def test_a_damaged_file_is_moved_aside_told_and_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "outbox.sqlite").write_bytes(b"no outbox at all" * 99)
    with opened(tmp_path) as outbox:
        assert outbox.errors.get(timeout=5.0).code == "outbox.damaged"
        put(outbox, 1)
        assert numbers(taken(outbox, 1)) == [1]
    assert (tmp_path / "outbox.sqlite.damaged.1").exists()


def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "outbox.sqlite")) as db:
        db.execute("PRAGMA user_version = 9")
    before = (tmp_path / "outbox.sqlite").read_bytes()
    with pytest.raises(AgentError, match=r"outbox\.schema"), opened(tmp_path):
        pass
    assert (tmp_path / "outbox.sqlite").read_bytes() == before


def test_while_the_disk_is_full_memory_stands_in_and_then_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_store, "_RETRY_S", 0.05)
    with small_file_system(tmp_path / "disk") as disk:
        with opened(disk, confirm="collector") as outbox:
            put(outbox, 1)
            eventually(lambda: len(stored(disk)) == 1)
            fill(disk / "ballast")
            put(outbox, 30, size=3000)
            assert outbox.errors.get(timeout=5.0).code == "outbox.write"
            assert numbers(taken(outbox, 31)) == list(range(1, 32))
            (disk / "ballast").unlink()
            time.sleep(0.1)
            put(outbox, 1)
            eventually(lambda: {seq for seq, _ in stored(disk)} >= set(range(2, 33)))
            assert outbox.errors.empty()
        with opened(disk, confirm="collector") as later:
            later.connection_started()
            assert numbers(taken(later, 32)) == list(range(1, 33))


def test_where_the_writing_takes_minutes_memory_is_bounded_and_what_is_lost_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: threading.Event
) -> None:
    monkeypatch.setattr(outbox_module, "_MOST_PENDING", 10)
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        eventually(lambda: not outbox._pending)  # it is being written
        put(outbox, 25)
        written.set()
        documents = taken(outbox, 12)
        assert numbers([document for document in documents if "seq" in document]) == list(range(1, 12))
        (gap,) = [document for document in documents if "from" in document]
        assert (gap["from"], gap["to"], gap["kind"], gap["n"]) == (12, 26, "alarm", 15)


def test_a_bug_in_the_thread_is_reported_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(outbox_store.OutboxStore, "commit", broken)
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        error = outbox.errors.get(timeout=10.0)
        assert error.code == "outbox.failed"
        assert "ZeroDivisionError" in error.found
    assert outbox.error is None
