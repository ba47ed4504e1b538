"""The fleet's collector: what is durably stored is acknowledged, and what is missing is not passed over."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from bench import fill, small_file_system
from brokers import RealBroker, Watcher, eventually
from collector_bench import ONLINE, STREAM, alarm, collecting, report
from device import TOPICS
from stored import Reports
from warm_start import TalkingProcess

from agent.common.errors import AgentError
from agent.mqtt.client import MqttClient
from fleet.cli.main import main
from fleet.collector import collector as collector_module
from fleet.collector.batch import parse_numbered
from fleet.devices.reports import Gap, Stream
from fleet.store.transaction import FleetStore


@pytest.fixture
def reports(store: FleetStore) -> Reports:
    return Reports(store)


def test_a_stream_is_complete_up_to_its_first_hole(reports: Reports) -> None:
    assert reports.add([report(1), report(2), report(4)]) == {STREAM: 2}
    assert reports.add([report(5)]) == {STREAM: 2}
    assert reports.add([report(3)]) == {STREAM: 5}
    assert [each.seq for each in reports.reports_of("fleet", "board")] == [1, 2, 3, 4, 5]


def test_dropped_reports_are_no_hole(reports: Reports) -> None:
    assert reports.add([Gap(STREAM, 1, 9, "telemetry", 8), Gap(STREAM, 1, 9, "job", 1), report(10)]) == {STREAM: 10}
    assert reports.add([report(13), Gap(STREAM, 11, 11, "telemetry", 1)]) == {STREAM: 11}
    assert reports.add([Gap(STREAM, 11, 12, "telemetry", 2)]) == {STREAM: 13}


def test_gaps_that_grow_together_count_once(reports: Reports) -> None:
    reports.add([Gap(STREAM, 5, 7, "telemetry", 3), Gap(STREAM, 1, 2, "job", 2)])
    reports.add([Gap(STREAM, 3, 9, "telemetry", 6), Gap(STREAM, 3, 9, "job", 1)])
    assert [(gap.first, gap.last, gap.kind, gap.n) for gap in reports.gaps_of("fleet", "board")] == [
        (1, 2, "job", 2),
        (3, 9, "job", 1),
        (3, 9, "telemetry", 6),
    ]


def test_a_repeated_report_is_stored_once_and_each_stream_counts_for_itself(reports: Reports) -> None:
    others = Stream("fleet", "board", 8), Stream("fleet", "twin", 7), Stream("other", "board", 7)
    news = [report(1), *(report(1, other) for other in others)]
    assert reports.add(news) == dict.fromkeys([STREAM, *others], 1)
    assert reports.add(news) == dict.fromkeys([STREAM, *others], 1)
    assert len(list(reports.reports_of("fleet", "board"))) == 2
    assert reports.position("fleet", "board") == (8, 1)
    assert reports.position("fleet", "unheard") == (0, 0)


def test_numbers_of_thousands_are_walked_in_pieces(reports: Reports) -> None:
    assert reports.add([report(seq) for seq in range(2, 3501)]) == {STREAM: 0}
    assert reports.add([report(1)]) == {STREAM: 3500}


@pytest.mark.parametrize(
    ("topic", "payload", "code"),
    [
        ("telemetry", b"\xff", "message.malformed"),
        ("telemetry", b"{}", "message.invalid"),
        ("event", b"[]", "message.not_object"),
        ("event", b'{"epoch": 1, "from": 5, "to": 4, "kind": "alarm", "n": 1}', "message.invalid"),
        ("event", b'{"epoch": 1, "seq": 99999999999999999999, "ts": 0.0, "kind": "alarm"}', "message.invalid"),
        ("event", b'{"epoch": -1, "seq": 1, "ts": 0.0, "kind": "alarm"}', "message.invalid"),
    ],
)
def test_a_message_that_is_no_report_is_refused(topic: str, payload: bytes, code: str) -> None:
    with pytest.raises(AgentError, match=code.replace(".", r"\.")):
        parse_numbered("fleet", "board", topic, payload)


@pytest.mark.broker
def test_stored_reports_are_acknowledged_and_a_board_that_comes_online_gets_the_position(
    any_broker: RealBroker, tmp_path: Path
) -> None:
    with Watcher(any_broker.endpoint) as watcher, MqttClient(any_broker.endpoint, "board") as board:
        with collecting(any_broker, tmp_path / "fleet.sqlite"):
            board.publish(ONLINE)
            watcher.expect(TOPICS.ack, epoch=0, upto=0)
            for seq in (1, 2, 4):
                board.publish(alarm(seq))
            watcher.expect(TOPICS.ack, epoch=7, upto=2)
            board.publish(alarm(3))
            watcher.expect(TOPICS.ack, epoch=7, upto=4)
        with collecting(any_broker, tmp_path / "fleet.sqlite"):
            watcher.expect(TOPICS.ack, epoch=7, upto=4)  # for the status that the broker has kept


@pytest.mark.broker
def test_while_its_disk_is_full_nothing_is_acknowledged(
    any_broker: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collector_module, "_RETRY_S", 0.05)
    with (
        small_file_system(tmp_path / "disk", "1m") as disk,
        Watcher(any_broker.endpoint) as watcher,
        MqttClient(any_broker.endpoint, "board") as board,
        collecting(any_broker, disk / "fleet.sqlite"),
    ):
        board.publish(ONLINE)
        watcher.expect(TOPICS.ack, epoch=0)
        fill(disk / "ballast")
        for seq in range(1, 31):
            board.publish(alarm(seq, words="x" * 5000))
        eventually(lambda: "collector=full" in caplog.text)
        assert not any(message.topic == TOPICS.ack and b'"epoch":7' in message.payload for message in watcher.seen)
        (disk / "ballast").unlink()
        watcher.expect(TOPICS.ack, epoch=7, upto=30)


@pytest.mark.broker
def test_the_command_collects_until_its_end_and_prints_its_counts(any_broker: RealBroker, tmp_path: Path) -> None:
    collect = ["fleet", "collect", "--port", str(any_broker.port), "--db", str(tmp_path / "db"), "--json"]
    with (
        Watcher(any_broker.endpoint) as watcher,
        MqttClient(any_broker.endpoint, "board") as board,
        TalkingProcess(collect) as process,
    ):
        board.publish(ONLINE)
        watcher.expect(TOPICS.ack, epoch=0)
        board.publish(alarm(1))
        watcher.expect(TOPICS.ack, epoch=7, upto=1)
        process.terminate()
        output, _ = process.communicate(timeout=20.0)
    assert process.returncode == 0
    assert json.loads(output) == {"counts": {"report": 1, "gap": 0, "status": 1, "birth": 0, "result": 0, "refused": 0}}


def test_a_database_of_a_newer_tared_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as db:
        db.execute("PRAGMA user_version = 9")
    assert main(["fleet", "collect", "--db", str(tmp_path / "db")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: fleet.schema: ")
