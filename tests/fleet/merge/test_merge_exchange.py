"""Boards asked for their histograms over a real broker: all of them, lost chunks, refusals, liars, silence."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import small_file_system
from brokers import RealBroker, eventually, free_port, on_the_air
from merge_bench import FLEET, board, calibration_of, counted, frames_of, merged_calibration
from turned_clock import TurnedClock

from agent.common.errors import AgentError
from agent.contract.histograms import Upload
from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.message import Message
from agent.uplink import link as link_module
from calibrate.histogram import AbsHistogram, abs_histogram
from engines.calibration import load_calibration
from fleet.cli.main import main
from fleet.merge import exchange as merge_exchange
from fleet.merge.exchange import MergeExchange
from fleet.store.opening import open_store

pytestmark = pytest.mark.broker
LONG_S = 1e4


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_exchange, "REPEAT_S", 0.2)
    monkeypatch.setattr("fleet.operator.REPEAT_S", 0.2)


def exchange_with(endpoint: Endpoint, folder: Path) -> MergeExchange:
    return MergeExchange(endpoint, FLEET, folder / "uploads", 8, 60.0)


def noisy(seed: int) -> dict[str, AbsHistogram]:
    """Histograms that take several chunks: large counts are noisy."""
    rng = np.random.default_rng(seed)
    counts = {f"t{n}": rng.integers(1, 1 << 40, 4096) for n in range(4)}
    return {tensor: AbsHistogram(each, 0, float(np.float32(0.99999)), 0, 0) for tensor, each in counts.items()}


def test_a_merge_equals_the_calibration_of_all_frames(
    any_broker: RealBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [frames_of(seed, values=6000 + seed) for seed in range(4)]
    output = tmp_path / "calibration.json"
    with ExitStack() as stack:
        for number, each in enumerate(data):
            stack.enter_context(board(any_broker.endpoint, f"b{number}", calibration_of(counted(each))))
        stack.enter_context(board(any_broker.endpoint, "private", calibration_of(counted(data[0])), histograms=False))
        stack.enter_context(board(any_broker.endpoint, "young", None))
        stack.enter_context(board(any_broker.endpoint, "merged", merged_calibration(calibration_of(counted(data[0])))))
        to = ["--port", str(any_broker.port), "--fleet", FLEET, "--within", "2", "--method", "max", "--json"]
        assert main(["fleet", "merge", "-o", str(output), *to]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["board_count"], printed["excluded"]) == (4, {})
    assert {device: why.partition(":")[0] for device, why in printed["silent"].items()} == {
        "private": "command.privacy",
        "young": "command.histograms",
        "merged": "command.histograms",
    }
    found = load_calibration(output)
    everything = {tensor: np.concatenate([each[tensor] for each in data]) for tensor in data[0]}
    assert dict(found.histograms) == {tensor: abs_histogram(values) for tensor, values in everything.items()}
    assert found.frames == sum(found.merged["boards"].values())
    assert found.id == calibration_of(counted(everything)).id, "the same scales to the bit"


def test_the_store_selects_the_boards_of_a_merge(
    any_broker: RealBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, output = str(tmp_path / "db"), tmp_path / "calibration.json"
    with open_store(where) as store, store.transaction("write") as transaction:
        insert = "INSERT INTO devices (fleet, name, first_seen, last_seen) VALUES (?, ?, 0.0, 0.0)"
        transaction.execute_many(insert, [(FLEET, name) for name in ("b0", "b1", "c0")])
    to = ["--port", str(any_broker.port), "--fleet", FLEET, "--db", where, "--json"]
    with ExitStack() as stack:
        for name in ("b0", "b1", "c0"):
            stack.enter_context(board(any_broker.endpoint, name, calibration_of(counted(frames_of(1)))))
        assert main(["fleet", "merge", "-o", str(output), *to, "--select", "name=b*"]) == 0
    assert sorted(load_calibration(output).merged["boards"]) == ["b0", "b1"]
    assert json.loads(capsys.readouterr().out)["silent"] == {}
    assert main(["fleet", "merge", "-o", str(output), *to, "--select", "name=x*"]) == 2
    assert "fleet.nobody" in capsys.readouterr().err


def test_lost_chunks_are_asked_for_and_nothing_else(
    any_broker: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = exchange_with(any_broker.endpoint, tmp_path)
    take, came = exchange.inbox.receive_chunk, Counter[int]()

    def losing(device: str, name: str, number: str, payload: bytes) -> bool:
        came[int(number)] += 1
        return (int(number) % 3 != 1 or came[int(number)] > 1) and take(device, name, number, payload)

    monkeypatch.setattr(exchange.inbox, "receive_chunk", losing)
    with board(any_broker.endpoint, "b", calibration_of(noisy(0))):
        exchange.gather(["b"], 0.0)
    assert came == {number: 1 + (number % 3 == 1) for number in came}
    assert came[1] == 2


def test_a_board_that_goes_while_it_sends_is_asked_again_when_it_is_back(
    mosquitto: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = exchange_with(mosquitto.endpoint, tmp_path)
    take, given = link_module.UploadSource.pop, list[Message]()

    def taking(source: link_module.UploadSource) -> Message | None:
        message = take(source) if len(given) != 2 else None
        if message is not None:
            given.append(message)
            if len(given) == 2:
                mosquitto.stop()
                mosquitto.start()
                given.append(message)
        return message

    monkeypatch.setattr(link_module.UploadSource, "pop", taking)
    with board(mosquitto.endpoint, "b", calibration_of(noisy(0))):
        exchange.gather(["b"], 0.0)
    assert set(exchange.inbox.complete) == {"b"}


def test_two_that_ask_at_once_both_get_it(any_broker: RealBroker, tmp_path: Path) -> None:
    """A board sends one upload at a time, and says so; chunks on their way to one are the other's too."""
    both = [exchange_with(any_broker.endpoint, tmp_path / name) for name in ("one", "other")]
    with board(any_broker.endpoint, "b", calibration_of(noisy(0))), ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda exchange: exchange.gather(["b"], 0.0), both))
    one, other = (exchange.inbox.complete["b"].read_bytes() for exchange in both)
    assert one == other


def test_liars_and_the_silent_are_given_up_and_named(
    any_broker: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_exchange, "_ROUNDS", 2)
    chunk = Upload.chunk

    def forged(upload: Upload, number: int) -> bytes:
        payload = chunk(upload, number)
        return payload[:-1] + bytes([payload[-1] ^ 1])

    monkeypatch.setattr(Upload, "chunk", forged)
    clock = TurnedClock(wall_s=time.time())
    exchange = MergeExchange(any_broker.endpoint, FLEET, tmp_path / "uploads", 8, LONG_S, clock=clock)
    with board(any_broker.endpoint, "liar", calibration_of(noisy(0))), ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(exchange.gather, ["liar", "nobody", "no/name"], 0.0)
        clock.turn_until(lambda: "liar" in exchange.failed, step_s=0.005)
        clock.turn(LONG_S)
        clock.turn_until(gathered.done)
    assert "another SHA-256" in exchange.failed["liar"]
    assert "silent" in exchange.failed["nobody"]
    assert "mqtt.name" in exchange.failed["no/name"]
    assert exchange.inbox.counts["quarantined"] == 2
    assert [path.name[:5] for path in (tmp_path / "uploads" / "quarantine").iterdir()] == ["liar."]


def test_chunks_go_behind_all_else_that_a_board_has_to_say(any_broker: RealBroker) -> None:
    with on_the_air(any_broker.endpoint, Topics(FLEET, "b"), Birth(agent_version="0")) as link:
        assert link._client._sources[-1] is link._histograms


def test_without_a_broker_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_exchange, "_CONNECT_S", 0.2)
    with pytest.raises(AgentError, match=r"broker\.unreachable"):
        exchange_with(Endpoint("127.0.0.1", free_port()), tmp_path).gather(["b"], 0.0)


@pytest.mark.parametrize("named", [True, False])
def test_a_disk_that_is_full_ends_it_with_the_remedy_and_leaves_nothing_half_written(
    any_broker: RealBroker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
) -> None:
    """Of a group's uploads, where those lie that --uploads names, or TMPDIR."""
    output = tmp_path / "calibration.json"
    with small_file_system(tmp_path / "disk", "64k") as disk, ExitStack() as stack:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        for name in ("b0", "b1"):
            stack.enter_context(board(any_broker.endpoint, name, calibration_of(noisy(1))))
        to = ["--port", str(any_broker.port), "--fleet", FLEET, *(["--uploads", str(disk / "sent")] if named else [])]
        assert main(["fleet", "merge", "b0", "b1", "-o", str(output), *to]) == 2
        printed = capsys.readouterr().err
        assert list(disk.glob("tared-merge-*")) == []
    (error,) = [line for line in printed.splitlines() if line.startswith("error:")]
    assert re.match(r"error: merge\.write: /\S+/b[01]\.part: No space left on device; expected a writable", error)
    assert "choose a folder on a larger disk with --uploads" in error
    assert list(tmp_path.glob("calibration*")) == []


def test_without_any_place_for_uploads_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert main(["fleet", "merge", "b0", "-o", str(tmp_path / "calibration.json")]) == 2
    printed = capsys.readouterr().err
    assert "error: merge.write:" in printed
    assert "TMPDIR" in printed


def test_a_board_that_answers_in_a_newer_schema_is_named_with_that_reason(
    any_broker: RealBroker, tmp_path: Path
) -> None:
    topics = Topics(FLEET, "newer")
    exchange = exchange_with(any_broker.endpoint, tmp_path)
    with MqttClient(any_broker.endpoint, "newer", SessionOptions(subscriptions=[topics.command])) as newer:
        assert newer.wait_connected(10.0)

        def obey() -> None:
            command_id = json.loads(newer.inbox.get(timeout=10.0).payload)["id"]
            answer = {"id": command_id, "status": "ACCEPTED", "schema_version": 2}
            newer.publish(Message(topics.result(command_id), json.dumps(answer).encode()))

        with ThreadPoolExecutor(1) as pool:
            obeyed = pool.submit(obey)
            exchange.gather(["newer"], 1.0)
            obeyed.result()
    assert exchange.failed["newer"].startswith("message.schema: a document of schema 2")


def test_strangers_chunks_do_not_count(any_broker: RealBroker, tmp_path: Path) -> None:
    exchange = exchange_with(any_broker.endpoint, tmp_path)
    forged = Upload(b"nobody asked")
    sender = board(any_broker.endpoint, "b", calibration_of(noisy(0)))
    with MqttClient(any_broker.endpoint, "stranger") as stranger, sender as there:
        assert stranger.wait_connected(10.0)
        link: Any = there.link
        begin = link.send_histograms

        def beginning(*sending: Any) -> None:
            for number in range(20):
                stranger.publish(Message(Topics(FLEET, "b").histogram_chunk(forged.name, number), forged.chunk(0)))
            begin(*sending)

        link.send_histograms = beginning  # chunks come once somebody is subscribed
        exchange.gather(["b"], 0.0)
    assert set(exchange.inbox.complete) == {"b"}
    assert exchange.inbox.counts["quarantined"] == 0


def test_a_board_that_only_says_that_it_is_at_it_is_given_up_too(any_broker: RealBroker, tmp_path: Path) -> None:
    clock = TurnedClock(wall_s=time.time())
    exchange = MergeExchange(any_broker.endpoint, FLEET, tmp_path / "uploads", 1, 2.0 * LONG_S, None, LONG_S, clock)
    talking = board(any_broker.endpoint, "a-talker", calibration_of(noisy(0)))
    honest = board(any_broker.endpoint, "honest", calibration_of(noisy(0)))
    with talking as there, honest, ThreadPoolExecutor(1) as pool:
        there.link.send_histograms = lambda *_: None  # type: ignore[method-assign]  # each repetition is still answered
        gathered = pool.submit(exchange.gather, ["a-talker", "honest"], 0.0)
        eventually(lambda: "a-talker" in exchange._pending)
        clock.turn(LONG_S + 1.0)
        clock.turn_until(gathered.done, step_s=0.005)
    assert "though the board was not silent" in exchange.failed["a-talker"]
    assert set(exchange.inbox.complete) == {"honest"}
