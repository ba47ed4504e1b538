"""The order in which rows and dropped ranges are sent, and how many of them memory holds."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from brokers import eventually
from outbox_bench import opened, popped, put, taken

from agent.uplink.outbox import WINDOW, Outbox

pytestmark = pytest.mark.usefixtures("no_thread_left")

TOO_LONG = 70_000  # bytes: such a document is dropped, and a range takes its number


def first_numbers(documents: list[dict[str, Any]]) -> list[int]:
    return [document.get("seq") or document["from"] for document in documents]


def stored_ranges(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "outbox.sqlite")) as db:
        return int(db.execute("SELECT count(*) FROM runs").fetchone()[0])


def put_with_gaps(outbox: Outbox, pairs: int) -> None:
    """A row and a gap, so many times."""
    for _ in range(pairs):
        put(outbox, 1)
        put(outbox, 1, size=TOO_LONG)


def test_a_dropped_range_is_sent_in_the_place_of_its_rows(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 500)
        put(outbox, 1, size=TOO_LONG)
        put(outbox, 99)
        eventually(lambda: not outbox._pending)
        outbox.connection_started()
        documents = taken(outbox, 600)
        assert first_numbers(documents) == list(range(1, 601))
        assert "from" in documents[500]


def test_memory_holds_a_window_of_any_number_of_ranges(tmp_path: Path) -> None:
    pairs = 2 * WINDOW
    with opened(tmp_path, confirm="collector") as outbox:
        put_with_gaps(outbox, pairs)
        for _ in range(3):
            outbox.connection_started()
            eventually(lambda: outbox._window.room == 0)
            put(outbox, 1)  # each commit looks for more
            eventually(lambda: not outbox._pending)
            assert outbox._window.room == 0
        outbox.connection_started()
        arrived = []
        for _ in range(2 * pairs + 3):
            arrived += taken(outbox, 1)
            assert 0 <= outbox._window.room <= WINDOW
        assert first_numbers(arrived) == list(range(1, 2 * pairs + 4))


def test_ranges_among_rows_that_were_sent_follow_on_the_same_connection(tmp_path: Path) -> None:
    count = 3 * WINDOW
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, count)
        messages = popped(outbox, count)
        for message in messages:
            outbox.delivered(message) if json.loads(message.payload)["seq"] % 2 else outbox.refused(message, True)
        gaps = taken(outbox, count // 2)
        assert sorted(first_numbers(gaps)) == list(range(2, count + 1, 2))
        assert outbox.pop() is None


def test_an_ack_deletes_a_range_that_comes_last(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put_with_gaps(outbox, 1)
        put(outbox, 1, size=TOO_LONG)
        eventually(lambda: not outbox._pending)
        outbox.connection_started()
        assert first_numbers(taken(outbox, 2)) == [1, 2]
        outbox.acknowledge(outbox.epoch, 3)
        eventually(lambda: stored_ranges(tmp_path) == 0)
