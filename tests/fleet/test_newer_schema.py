"""Boards whose tared is newer than the fleet's: their documents are refused, and nothing about them is guessed."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest
from brokers import RealBroker
from collector_bench import alarm
from databases import store as store
from databases import where as where
from device import TOPICS
from rollout_room import Room, accepted, done, spec
from stored import Reports, store_results

from agent.common.errors import CommandError
from agent.contract.commands import CommandResult
from agent.contract.messages import NEWER_SCHEMA, Birth, Status, Telemetry
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.message import Message
from agent.mqtt.receive_queue import Arrival
from fleet import operator
from fleet.cli.main import main
from fleet.collector.batch import Reader
from fleet.collector.writer import BatchWriter
from fleet.devices.devices import Device, Devices
from fleet.devices.facts import facts
from fleet.devices.records import quarantined
from fleet.rollout.board_steps import parse_result
from fleet.rollout.register import RolloutRegister
from fleet.rollout.rows import BoardStage, CommandRole, RolloutState
from fleet.rollout.stepper import judge_wave
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore
from fleet.untrusted import Warnings

_TOPIC = "tared/v1/fleet/board/"
_TELEMETRY = {"epoch": 7, "seq": 1, "ts": 1.5, "cameras": {"a": {"fps": 9.0, "latency_ms": {"p50": 1.0, "p99": 2.0}}}}
_OURS = {
    "telemetry": Telemetry.model_validate(_TELEMETRY).to_json(),
    "event": alarm(2).payload,
    "status": Status(state="online", session="s", boot_id="b", ts=1.0).to_json(),
    "birth": Birth(agent_version="1", engine="e", model="m").to_json(),
    "cmd/c1/result": CommandResult(id="c1", status="SUCCEEDED").to_json(),
}
_FIGURES = ("engine", "model", "agent", "calibration", "fps", "latency_p99", "regime", "drift")


def of_schema(version: object, path: str) -> Arrival:
    document = {**json.loads(_OURS[path]), "schema_version": version}
    return Arrival((_TOPIC + path).encode(), json.dumps(document).encode())


def keep(store: FleetStore, *arrivals: Arrival) -> dict[int, int]:
    """Store these as a collector does; return the acknowledged numbers, by epoch."""
    _, complete = BatchWriter(store, Warnings(logging.getLogger(), "test")).write(Reader().read(arrivals))
    return {stream.epoch: upto for stream, upto in complete.items()}


def the_board(store: FleetStore) -> Device:
    (found,) = Devices(store).all("fleet")
    return found


@pytest.mark.parametrize("path", _OURS)
def test_a_document_of_a_newer_schema_is_refused_and_its_number_is_not_given_up(path: str) -> None:
    batch = Reader().read([of_schema(2, path)])
    assert [(each.topic, each.code) for each in batch.refused] == [(path, NEWER_SCHEMA)]
    assert "a document of schema 2; expected schema 1" in batch.refused[0].found
    assert "update this tared" in batch.refused[0].found
    assert (batch.entries, batch.results, batch.statuses) == ([], [], {})
    assert batch.births == ({("fleet", "board"): (None, '{"schema_version": 2}')} if path == "birth" else {})


@pytest.mark.parametrize("path", _OURS)
def test_a_document_of_this_schema_or_with_unknown_keys_is_read(path: str) -> None:
    for each in (of_schema(1, path), Arrival((_TOPIC + path).encode(), _OURS[path][:-1] + b',"later":[1]}')):
        assert Reader().read([each]).refused == []


@pytest.mark.parametrize("version", [0, -1, 2**31, 10**400, True, 1.0, "2", None, [2]])
@pytest.mark.parametrize("path", _OURS)
def test_a_schema_that_is_no_number_of_one_is_refused_as_damage(path: str, version: object) -> None:
    batch = Reader().read([of_schema(version, path)])
    assert [each.code for each in batch.refused] == ["message.invalid"]
    assert batch.births == {}


def test_telemetry_whose_key_is_escaped_is_refused_too() -> None:
    payload = _OURS["telemetry"][:-1] + b',"schema\\u005fversion":2}'
    batch = Reader().read([Arrival((_TOPIC + "telemetry").encode(), payload)])
    assert ([each.code for each in batch.refused], batch.entries) == ([NEWER_SCHEMA], [])


def test_a_refused_document_is_not_acknowledged_and_comes_again(store: FleetStore) -> None:
    assert keep(store, of_schema(2, "telemetry"), of_schema(2, "event")) == {}
    assert {each.code for each in quarantined(store)} == {NEWER_SCHEMA}
    first, second = (Arrival((_TOPIC + path).encode(), _OURS[path]) for path in ("telemetry", "event"))
    assert keep(store, first, second) == {7: 2}  # once this tared has been updated
    assert Reports(store).gaps_of("fleet", "board") == []


def test_a_board_with_a_newer_birth_counts_as_there_and_is_not_read(store: FleetStore) -> None:
    ours = [Arrival((_TOPIC + path).encode(), payload) for path, payload in _OURS.items()]
    keep(store, *ours)
    assert facts(the_board(store), time.time())["fps"] == 9.0
    keep(store, of_schema(2, "birth"), *[each for each in ours if not each.topic.endswith(b"birth")])
    board = the_board(store)
    sent = facts(board, time.time())
    assert board.is_newer
    assert (sent["schema"], sent["state"]) == (2.0, "online")
    assert [sent[name] for name in _FIGURES] == [None] * len(_FIGURES)
    assert (board.engine, board.agent_version) == (None, None)
    keep(store, *ours)  # it has gone back to the tared that it had
    sent = facts(the_board(store), time.time())
    assert (sent["schema"], sent["engine"], sent["fps"]) == (1.0, "e", 9.0)


def test_devices_and_report_name_those_boards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "fleet.sqlite", tmp_path / "report.html"
    other = Arrival(b"tared/v1/fleet/other/birth", _OURS["birth"])
    with open_store(path) as store:
        keep(store, of_schema(2, "status"), of_schema(2, "birth"), other)
    requested = ["fleet", "devices", "--db", str(path), "--fleet", "fleet"]
    assert main(requested) == 0
    sent = capsys.readouterr().out
    assert "schema 2" in sent
    assert "1 speak a newer schema than 1, the newest that this tared knows" in sent
    assert "board; update this tared" in sent
    for condition, names in (("schema>1", ["board"]), ("schema!=2", ["other"])):
        assert main([*requested, "--where", condition, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["devices"]
        assert [each["name"] for each in found] == names
    assert main(["fleet", "report", "--db", str(path), "--fleet", "fleet", "-o", str(page)]) == 0
    assert "1 speak a newer schema than 1" in page.read_text()
    assert "a document of schema 2" in page.read_text()


@pytest.mark.broker
def test_a_sender_gets_the_reason_why_an_answer_is_unreadable(
    mosquitto: RealBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "REPEAT_S", 0.1)
    command = operator.new_command("status", {}, time.time())
    answer = CommandResult(id=command.id, status="SUCCEEDED").to_json()[:-1] + b',"schema_version":2}'
    with MqttClient(mosquitto.endpoint, "board", SessionOptions(subscriptions=[TOPICS.command])) as board:
        assert board.wait_connected(10.0)

        def obey() -> None:
            board.inbox.get(timeout=10.0)
            board.publish(Message(TOPICS.result(command.id), answer))

        obeying = threading.Thread(target=obey)
        obeying.start()
        with pytest.raises(CommandError, match=r"command\.no_answer: .* of schema 2; .*update this tared"):
            list(operator.send(mosquitto.endpoint, TOPICS, command, 1.0))
        obeying.join()


def newer(room: Room, *numbers: int) -> None:
    """These boards have come to speak another schema."""
    with room.store.transaction() as transaction:
        sent = {("f", f"b{number}"): (None, '{"schema_version": 2}') for number in numbers}
        Devices(room.store).apply_births(transaction, sent, room.clock.wall_s())


def test_a_rollout_is_not_begun_with_boards_whose_answers_could_not_be_read(store: FleetStore) -> None:
    room = Room(store, spec(), boards=3)
    newer(room, 1)
    register = RolloutRegister(store, "operator")
    with pytest.raises(CommandError, match=r"rollout\.schema: 1 of 3 boards .* 'b1'.* 'schema!=2' in --select"):
        register.plan("f", spec())
    (wave,) = register.plan("f", spec(select="schema!=2"))
    assert [each.name for each in wave] == ["b0", "b2"]


def test_a_board_that_became_newer_gets_no_command_and_counts_as_unreached(store: FleetStore) -> None:
    room = Room(store, spec())
    newer(room, 0)
    room.step()
    assert room.states() == [BoardStage.UNREACHED, BoardStage.SENT]
    assert "schema 2" in room.rows()[0].reason
    assert room.open().keys() == {"b1"}


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED", "EXPIRED"])
def test_an_answer_of_a_board_that_became_newer_is_not_believed(store: FleetStore, status: str) -> None:
    room = Room(store, spec())
    room.step()
    orders = room.open()
    room.step(accepted(orders["b0"]))
    newer(room, 0)
    room.step(CommandResult.model_validate({"id": orders["b0"].id, "status": status}))
    assert room.states() == [BoardStage.UNREACHED, BoardStage.SENT]


def test_a_result_in_a_newer_schema_neither_succeeds_nor_fails(store: FleetStore, where: str) -> None:
    room = Room(store, spec(), boards=1)
    with room.controllers(where, None) as (controller,):
        controller._claim()
        for _ in range(2):
            controller._step()
        (order,) = controller._stepper._open[room.id].values()
        payload = done(order).to_json()[:-1] + b',"schema_version":2}'
        controller._receive_result("f", "b0", parse_result(order.id, payload))
        controller._step()
    assert room.states() == [BoardStage.UNREACHED]
    assert "rollout.schema" in room.rows()[0].reason
    assert "update this tared" in room.rows()[0].reason


def test_a_board_that_became_newer_after_its_success_is_not_judged_by_it(store: FleetStore) -> None:
    room = Room(store, spec(gates="failures<=0%,unreached<=0%"))
    room.step()
    room.step(*(done(each, artefact="e1") for each in room.open().values()))
    room.serves({1: "e1"})
    newer(room, 0)
    devices = {each.id: each for each in Devices(store).all("f")}
    findings = judge_wave(spec(gates="failures<=0%,unreached<=0%"), room.rows(), devices, room.clock.wall_s())
    assert findings is not None
    assert [(each.passed, each.found) for each in findings] == [(True, "0 of 2, 0.0%"), (False, "1 of 2, 50.0%")]


def test_a_board_that_became_newer_is_not_sent_back(store: FleetStore) -> None:
    room = Room(store, spec())
    room.step()
    orders = room.open()
    room.step(*(done(each, artefact="e1") for each in orders.values()))
    room.serves({1: "e1"})
    newer(room, 0)
    with store.transaction() as transaction:  # a collector had it before the board changed
        late = done(orders["b0"], artefact="e1")
        store_results(store, transaction, ("f", "b0"), late)
    room.turn()
    room.step()
    assert room.open(CommandRole.UNDO).keys() == {"b1"}
    room.step(done(room.open(CommandRole.UNDO)["b1"], artefact="e0"))
    room.until(RolloutState.ABORTED)
    assert room.states() == [BoardStage.KEPT, BoardStage.UNDONE]
    assert "schema 2" in room.rows()[0].reason
