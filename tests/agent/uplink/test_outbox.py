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
from agent.uplink.outbox import TELEMETRY
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


def test_a_backlog_is_sent_no_faster_than_allowed(tmp_path: Path) -> None:
    clock = TurnedClock()
    with opened(tmp_path, clock, backlog_per_s=50.0) as outbox:
        put(outbox, 100)
        for seconds, allowed in ((0.0, 50), (0.5, 25), (0.2, 10)):
            clock.turn(seconds)
            taken(outbox, allowed)
            assert outbox.pop() is None


def test_rows_older_than_days_are_dropped(tmp_path: Path) -> None:
    clock = TurnedClock()
    with opened(tmp_path, clock, confirm="collector", days=1.0) as outbox:
        put(outbox, 3)
        eventually(lambda: len(stored(tmp_path)) == 3)
        clock.turn(2 * 86400.0)
        put(outbox, 1)
        eventually(lambda: stored(tmp_path) == [(4, 0)])
        eventually(lambda: outbox.dropped == {"alarm": 3})


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
