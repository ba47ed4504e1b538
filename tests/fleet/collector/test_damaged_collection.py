"""A collector whose file is damaged while it runs: what it has acknowledged stays, and it goes on with a new one."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from brokers import RealBroker, eventually
from collector_bench import STREAM, alarm, collected, report
from device import TOPICS
from stored import Reports

from agent.common.errors import AgentError
from agent.mqtt.message import Message
from fleet.collector import collector as collector_module
from fleet.devices.reports import Gap, Stream
from fleet.store.opening import open_store
from fleet.store.transaction import ReportRow

OTHER = Stream("fleet", "other", 5)


def spoil(path: Path, table: str) -> None:
    """The pages of one table, which until then had been good."""
    with closing(sqlite3.connect(path)) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * size)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a file in which only what is stored of gaps is damaged: reports are still taken."""
    path = tmp_path / "fleet.sqlite"
    with open_store(path) as store:
        Reports(store).add([Gap(OTHER, 1, 1, "telemetry", 1)])
    spoil(path, "dropped")
    return path


def aside(path: Path) -> list[int]:
    """The numbers of the reports in the file that was moved aside."""
    with closing(sqlite3.connect(path.with_name("fleet.sqlite.damaged.1"))) as db:
        return [seq for (seq,) in db.execute("SELECT seq FROM reports ORDER BY seq")]


def test_a_damaged_store_is_set_aside_and_the_next_report_is_in_a_new_one(path: Path) -> None:
    with open_store(path) as store:
        reports = Reports(store)
        with store.transaction() as transaction:  # as for reports that need nothing of the damaged page
            transaction.add_reports([ReportRow(2, 7, seq, "alarm", 1.5, 1.5, "{}") for seq in range(1, 501)])
        with pytest.raises(AgentError, match=r"fleet\.damaged.*in the file that was set aside"):
            reports.add([Gap(STREAM, 501, 501, "telemetry", 1)])
        assert aside(path) == list(range(1, 501))
        assert reports.add([report(1), Gap(STREAM, 2, 3, "telemetry", 2)]) == {STREAM: 3}
    with open_store(path) as store:
        assert [each.seq for each in Reports(store).reports_of("fleet", "board")] == [1]
    assert aside(path) == list(range(1, 501))


def test_a_query_meets_the_damage_once_and_then_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    with open_store(path) as store:
        Reports(store).add([report(1)])
    spoil(path, "progress")
    with open_store(path) as store:
        reports = Reports(store)
        with pytest.raises(AgentError, match=r"fleet\.damaged"):
            reports.position("fleet", "board")
        assert reports.position("fleet", "board") == (0, 0)


@pytest.mark.broker
def test_the_collector_says_what_it_is_and_goes_on(
    any_broker: RealBroker, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collector_module, "_RETRY_S", 0.05)
    with collected(any_broker, path) as (board, watcher, made):
        for seq in (1, 2):
            board.publish(alarm(seq))
        gap = {"epoch": 7, "from": 3, "to": 4, "kind": "telemetry", "n": 2}
        board.publish(Message(TOPICS.event, json.dumps(gap).encode()))
        board.publish(alarm(5))
        watcher.expect(TOPICS.ack, epoch=7, upto=5)
        eventually(lambda: made.counts["report"] == 3)
    assert "collector=damaged" in caplog.text
    assert "collector=full" not in caplog.text
