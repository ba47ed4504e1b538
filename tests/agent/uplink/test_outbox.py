"""The outbox: numbered without gaps, sent in order, bounded, and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from brokers import eventually
from device import TOPICS
from outbox_bench import numbers, opened, popped, put, stored, taken
from turned_clock import TurnedClock

from agent.uplink import outbox_store
from agent.uplink.outbox import TELEMETRY, WINDOW
from agent.uplink.outbox_store import ALARM, EVENT, SAMPLE

pytestmark = pytest.mark.usefixtures("no_thread_left")


def test_telemetry_and_events_are_numbered_together_on_topics_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1, TELEMETRY, SAMPLE)
        put(outbox, 1, "job", EVENT)
        put(outbox, 1, "alarm", ALARM)
        messages = popped(outbox, 3)
        assert [message.topic for message in messages] == [TOPICS.telemetry, TOPICS.event, TOPICS.event]
        assert numbers([json.loads(message.payload) for message in messages]) == [1, 2, 3]
        assert {json.loads(message.payload)["epoch"] for message in messages} == {outbox.epoch}


def test_unsent_rows_come_first_and_in_order_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        put(first, 3)
    with opened(tmp_path) as second:
        assert second.epoch > first.epoch
        put(second, 2)
        documents = taken(second, 5)
    assert [(document["epoch"], document["seq"]) for document in documents] == [
        *((first.epoch, seq) for seq in (1, 2, 3)),
        *((second.epoch, seq) for seq in (1, 2)),
    ]


def test_more_rows_than_the_window_holds_come_in_order(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 3 * WINDOW)
        assert numbers(taken(outbox, 3 * WINDOW)) == list(range(1, 3 * WINDOW + 1))
        eventually(lambda: len(outbox) == 0)


def test_a_backlog_is_sent_no_faster_than_allowed(tmp_path: Path) -> None:
    clock = TurnedClock()
    with opened(tmp_path, clock, backlog_per_s=50.0) as outbox:
        put(outbox, 100)
        for seconds, allowed in ((0.0, 50), (0.5, 25), (0.2, 10)):
            clock.turn(seconds)
            taken(outbox, allowed)
            assert outbox.pop() is None


def test_samples_are_dropped_before_alarms_and_each_range_is_a_message(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector", bytes=100_000) as outbox:
        for _ in range(10):
            put(outbox, 20, TELEMETRY, SAMPLE, size=1000)
            put(outbox, 1, "alarm", ALARM, size=1000)
            eventually(lambda: not outbox._pending)
        eventually(lambda: outbox.dropped.total() > 100)
        assert set(outbox.dropped) == {TELEMETRY}
        outbox.connection_started()
        arrived: dict[int, str] = {}
        while len(arrived) < 210:
            (document,) = taken(outbox, 1)
            if "seq" in document:
                arrived[document["seq"]] = "row"
            else:
                assert document["kind"] == TELEMETRY
                assert document["n"] == document["to"] - document["from"] + 1
                arrived.update(dict.fromkeys(range(document["from"], document["to"] + 1), "gap"))
        assert sorted(arrived) == list(range(1, 211))
        assert all(arrived[seq] == "row" for seq in range(21, 211, 21))  # the alarms
        assert list(arrived.values()).count("gap") == outbox.dropped[TELEMETRY]
    assert (tmp_path / "outbox.sqlite").stat().st_size < 200_000


def test_rows_older_than_days_are_dropped(tmp_path: Path) -> None:
    clock = TurnedClock()
    with opened(tmp_path, clock, confirm="collector", days=1.0) as outbox:
        put(outbox, 3)
        eventually(lambda: len(stored(tmp_path)) == 3)
        clock.turn(2 * 86400.0)
        put(outbox, 1)
        eventually(lambda: stored(tmp_path) == [(4, 0)])
        eventually(lambda: outbox.dropped == {"alarm": 3})


def test_a_document_that_is_too_long_for_any_reader_leaves_a_range(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1, size=70_000)
        put(outbox, 1)
        gap, row = taken(outbox, 2)
        assert (gap["from"], gap["to"], row["seq"]) == (1, 1, 2)


def test_a_row_that_no_broker_accepts_leaves_a_range(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 3)
        messages = popped(outbox, 3)
        outbox.delivered(messages[0])
        outbox.refused(messages[1], for_good=True)
        outbox.delivered(messages[2])
        (gap,) = taken(outbox, 1)
        assert (gap["from"], gap["to"], gap["kind"], gap["n"]) == (2, 2, "alarm", 1)
        eventually(lambda: stored(tmp_path) == [(1, 1), (3, 1)])
        eventually(lambda: outbox.dropped == {"alarm": 1})


def test_an_unexpected_error_of_a_commit_is_reported_and_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, lacks = outbox_store.OutboxStore.commit, True

    def commit(store: outbox_store.OutboxStore, *arguments: Any) -> None:
        if lacks:
            raise MemoryError("no page")
        whole(store, *arguments)

    monkeypatch.setattr(outbox_store.OutboxStore, "commit", commit)
    with opened(tmp_path) as outbox:
        put(outbox, 3)
        error = outbox.errors.get(timeout=60.0)
        assert (error.code, error.found) == ("outbox.failed", "MemoryError: no page")
        put(outbox, 2)
        lacks = False
        assert numbers(taken(outbox, 5)) == [1, 2, 3, 4, 5]
        assert outbox.error is None
    assert caplog.text.count("Traceback") == 1


def test_a_document_that_cannot_be_made_takes_no_number(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1)
        with pytest.raises(ZeroDivisionError):
            outbox.put("alarm", ALARM, lambda epoch, _: b"%d" % (epoch // 0))
        put(outbox, 1)
        assert numbers(taken(outbox, 2)) == [1, 2]
