"""The outbox: numbered without gaps, sent in order, bounded, and told of."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from brokers import eventually
from device import TOPICS
from outbox_bench import collect, numbers, opened, put, stored, taken

from agent.mqtt.message import Message
from agent.uplink import outbox_store
from agent.uplink.outbox import TELEMETRY, WINDOW
from agent.uplink.outbox_store import ALARM, EVENT, SAMPLE

pytestmark = pytest.mark.usefixtures("no_thread_left")


def test_telemetry_and_events_are_numbered_together_on_topics_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1, TELEMETRY, SAMPLE)
        put(outbox, 1, "job", EVENT)
        put(outbox, 1, "alarm", ALARM)
        messages: list[Message] = []
        eventually(lambda: (collect(outbox, messages) and len(messages) == 3) or len(messages) == 3)
        assert [message.topic for message in messages] == [TOPICS.telemetry, TOPICS.event, TOPICS.event]
        assert numbers([json.loads(message.payload) for message in messages]) == [1, 2, 3]
        assert {json.loads(message.payload)["epoch"] for message in messages} == {outbox.epoch}


def test_what_was_not_sent_comes_after_a_restart_first_and_in_its_order(tmp_path: Path) -> None:
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


def test_more_than_the_window_holds_comes_in_order(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 3 * WINDOW)
        assert numbers(taken(outbox, 3 * WINDOW)) == list(range(1, 3 * WINDOW + 1))
        eventually(lambda: len(outbox) == 0)


def test_a_backlog_is_sent_no_faster_than_allowed(tmp_path: Path) -> None:
    with opened(tmp_path, backlog_per_s=50.0) as outbox:
        put(outbox, 100)
        taken(outbox, 50)
        began = time.monotonic()
        taken(outbox, 25)
        assert time.monotonic() - began > 0.3


def test_samples_are_dropped_before_alarms_and_each_range_is_a_message(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector", bytes=100_000) as outbox:
        for _ in range(10):
            put(outbox, 20, TELEMETRY, SAMPLE, size=1000)
            put(outbox, 1, "alarm", ALARM, size=1000)
            eventually(lambda: not outbox._pending)
        eventually(lambda: outbox.dropped.total() > 100)
        assert set(outbox.dropped) == {TELEMETRY}
        outbox.connection_started()
        told: dict[int, str] = {}
        while len(told) < 210:
            (document,) = taken(outbox, 1)
            if "seq" in document:
                told[document["seq"]] = "row"
            else:
                assert document["kind"] == TELEMETRY
                assert document["n"] == document["to"] - document["from"] + 1
                told.update(dict.fromkeys(range(document["from"], document["to"] + 1), "gap"))
        assert sorted(told) == list(range(1, 211))
        assert all(told[seq] == "row" for seq in range(21, 211, 21))  # the alarms
        assert list(told.values()).count("gap") == outbox.dropped[TELEMETRY]
    assert (tmp_path / "outbox.sqlite").stat().st_size < 200_000


def test_what_is_too_old_goes_and_a_clock_that_is_set_makes_nothing_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, aged = [1000.0], [0.0]
    monkeypatch.setattr(outbox_store.time, "time", lambda: now[0])
    monkeypatch.setattr(outbox_store, "_AGED_EVERY_S", aged[0])
    monkeypatch.setattr(outbox_store, "_SETTLES_S", 0.0)
    with opened(tmp_path, confirm="collector", days=1.0) as outbox:
        put(outbox, 2)
        eventually(lambda: len(stored(tmp_path)) == 2)
        now[0] = 1_800_000_000.0  # the board has heard what time it is
        put(outbox, 1)
        eventually(lambda: len(stored(tmp_path)) == 3)
        assert outbox.dropped.total() == 0
    with opened(tmp_path, confirm="collector", days=1.0) as outbox:
        now[0] += 2 * 86400.0
        monkeypatch.setattr(outbox_store, "_CLOCK_JUMP_S", 1e12)  # so much time has really passed
        put(outbox, 1)
        eventually(lambda: len(stored(tmp_path)) == 1)
        assert outbox.dropped == {"alarm": 3}


def test_a_document_that_is_too_long_for_any_reader_is_dropped_and_told(tmp_path: Path) -> None:
    with opened(tmp_path) as outbox:
        put(outbox, 1, size=70_000)
        put(outbox, 1)
        gap, row = taken(outbox, 2)
        assert (gap["from"], gap["to"], row["seq"]) == (1, 1, 2)


def test_what_no_broker_takes_is_dropped_and_told(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        put(outbox, 3)
        messages: list[Message] = []
        while len(messages) < 3:
            eventually(lambda: collect(outbox, messages))
        outbox.delivered(messages[0])
        outbox.refused(messages[1], for_good=True)
        outbox.delivered(messages[2])
        (gap,) = taken(outbox, 1)
        assert (gap["from"], gap["to"], gap["kind"], gap["n"]) == (2, 2, "alarm", 1)
        eventually(lambda: stored(tmp_path) == [(1, 1), (3, 1)])
        assert outbox.dropped == {"alarm": 1}


def test_a_lack_of_memory_loses_no_row_that_was_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, lacks = outbox_store.OutboxStore.commit, True

    def commit(store: outbox_store.OutboxStore, *arguments: Any) -> None:
        if lacks:
            raise MemoryError("no page")
        whole(store, *arguments)

    monkeypatch.setattr(outbox_store.OutboxStore, "commit", commit)
    with opened(tmp_path) as outbox:
        put(outbox, 3)
        assert outbox.errors.get(timeout=10.0).code == "outbox.failed"
        put(outbox, 2)
        lacks = False
        assert numbers(taken(outbox, 5)) == [1, 2, 3, 4, 5]
        assert outbox.error is None


def test_a_document_without_memory_to_make_it_is_dropped_and_told(tmp_path: Path) -> None:
    def lacking(_epoch: int, _seq: int) -> bytes:
        raise MemoryError("no page")

    with opened(tmp_path) as outbox:
        put(outbox, 1)
        outbox.put("alarm", ALARM, lacking)
        put(outbox, 1)
        first, gap, row = taken(outbox, 3)
        assert (first["seq"], gap["from"], gap["to"], row["seq"]) == (1, 2, 2, 3)
