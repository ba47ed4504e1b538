"""The whole daemon under orders: settings, snapshots, its log and its restart, signed and not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import cv2
import pytest
from brokers import RealBroker, Watcher, eventually
from daemon_life import LIMIT_S, TOPICS, answer, code, order
from preview_bench import brightness, get
from warm_start import tared
from worlds import World

from agent.cli.main import EXIT_RESTART
from agent.contract.signing import Signer, new_key
from agent.contract.topics import Topics
from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message
from fleet.operator import new_command, send


@pytest.fixture(name="board")
def board_fixture(calibrated_world: World, mosquitto: RealBroker) -> World:
    """A long night, in which nothing happens but what is ordered."""
    calibrated_world.change(mqtt={"host": mosquitto.host, "port": mosquitto.port})
    return calibrated_world


@pytest.mark.slow
@pytest.mark.broker
def test_settings_and_a_policy_hold_at_once_and_after_a_restart_on_command(
    board: World, mosquitto: RealBroker, tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    board.change(
        mqtt={"telemetry_period_s": 3600.0}, preview={"address": "127.0.0.1:0"}, results={"file": str(results)}
    )
    with Watcher(mosquitto.endpoint) as watcher:
        with board.running() as process:
            assert watcher.expect(TOPICS.reported)["version"] == 0
            private = {"address": None, "viewers": 0, "error": "preview.privacy"}
            eventually(lambda: any(b"preview.privacy" in message.payload for message in watcher.all()))
            assert answer(mosquitto, "status")["preview"] == private
            values = {"recalibration.automatic": "false", "log_level": "error", "mqtt.telemetry_period_s": "0.5"}
            assert answer(mosquitto, "set", version=7, **values)["version"] == 7
            watcher.expect(TOPICS.reported, version=7)
            watcher.expect(TOPICS.telemetry)
            status = answer(mosquitto, "status")
            assert (status["automatic"], status["stopped_by"]) == (False, "recalibration.automatic")
            engine = status["engine"]
            answer(mosquitto, "policy", artefact=engine, score_threshold="1.0")
            assert code(order(mosquitto, "set", 7, log_level="info")) == "command.version"
            assert code(order(mosquitto, "set", 8, threads="4")) == "command.set"
            assert code(order(mosquitto, "snapshot")) == "command.privacy"
            assert code(order(mosquitto, "switch", regime="night")) == "command.switch"
            assert code(order(mosquitto, "model", sha256="0" * 64, size=1)) == "command.model", "a recording"
            answer(mosquitto, "log_level", level="info")
            assert order(mosquitto, "restart").status == "SUCCEEDED"
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == EXIT_RESTART, errors
            assert re.findall("command=(set|policy|restart)", errors) == ["set", "restart"], errors
        before = len(results.read_text().splitlines())
        board.change(privacy={"preview": True, "snapshot": True})
        with board.running():
            reported = watcher.expect(TOPICS.reported, version=7)
            assert reported["values"]["recalibration.automatic"] is False
            eventually(lambda: answer(mosquitto, "status")["preview"]["address"] is not None, LIMIT_S)
            status = answer(mosquitto, "status")
            assert (status["engine"], status["policy"]) == (engine, {"score_threshold": 1.0})
            answer(mosquitto, "snapshot", annotated="true")
            snapshot = next(each.payload for each in iter(watcher.next, None) if each.topic == TOPICS.snapshot)
            status_code, preview = get(status["preview"]["address"], "/frame.jpg")
            assert status_code == 200
            assert max(brightness(snapshot), brightness(preview)) < 70.0, "noise of 64 on the average, nothing drawn"
            eventually(lambda: len(results.read_text().splitlines()) > before + 1, LIMIT_S)
            first = json.loads(results.read_text().splitlines()[before])
            assert (first["class"], first["policy_left_out"]) == (None, 1)
            with Watcher(mosquitto.endpoint) as newcomer:
                assert newcomer.retained(TOPICS.birth)["policies"] == {engine: {"score_threshold": 1.0}}
                newcomer.expect(TOPICS.telemetry)
                assert TOPICS.snapshot not in {message.topic for message in newcomer.all()}
            with MqttClient(mosquitto.endpoint, "desires") as fleet:
                desired = {"version": 9, "values": {"log_level": "warning"}}
                fleet.publish(Message(TOPICS.desired, json.dumps(desired).encode(), retain=True))
                reported = watcher.expect(TOPICS.reported, version=9)
                assert (
                    reported["values"] | {"log_level": "warning", "recalibration.automatic": True} == reported["values"]
                )
                old = {"version": 8, "values": {}}
                fleet.publish(Message(TOPICS.desired, json.dumps(old).encode()))
                assert watcher.expect(TOPICS.reported, version=9)["error"]["code"] == "command.version"


_FLOOD = """
import sys, time
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion
client = Client(CallbackAPIVersion.VERSION2)
client.connect("127.0.0.1", int(sys.argv[1]))
client.loop_start()
begun, number = time.monotonic(), 0
print("begun", flush=True)
while time.monotonic() < begun + 60.0:
    if number < 2000.0 * (time.monotonic() - begun):
        client.publish(sys.argv[2], b'{"id": "f%d", "op": "status", "args": {}, "signature": "bm8="}' % number)
        number += 1
    else:
        time.sleep(0.001)
"""


@pytest.mark.soak
@pytest.mark.broker
def test_an_operator_is_answered_in_a_flood_of_forged_commands(
    board: World, mosquitto: RealBroker, tmp_path: Path
) -> None:
    """On a quiet machine: what a board has no time to read waits at the broker, true commands behind the rest."""
    private, public, _ = new_key(tmp_path / "operator")
    board.change(commands={"operator_keys": [str(public)], "clock": "trusted"})
    flood = [sys.executable, "-c", _FLOOD, str(mosquitto.port), TOPICS.command]
    with Watcher(mosquitto.endpoint) as watcher, board.running():
        watcher.expect(TOPICS.telemetry)
        with subprocess.Popen(flood, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            for _ in range(3):
                command = new_command("status", {}, time.time(), to=TOPICS)
                results = list(send(mosquitto.endpoint, TOPICS, command, 30.0, Signer(private)))
                assert results[-1].status == "SUCCEEDED", results[-1].error
            process.kill()


@pytest.mark.slow
@pytest.mark.broker
def test_send_saves_a_snapshot_where_the_owner_lets_it_go(board: World, mosquitto: RealBroker, tmp_path: Path) -> None:
    picture = tmp_path / "now.jpg"
    words = ["send", "board", "snapshot", "--host", mosquitto.host, "--port", mosquitto.port, "-o", picture]
    board.change(privacy={"snapshot": True})
    with Watcher(mosquitto.endpoint) as watcher, board.running():
        watcher.expect(TOPICS.telemetry)
        refused = tared(*words[:3], "camera=attic", *words[3:])
        assert (refused.returncode, "command.camera" in refused.stdout) == (1, True), refused.stdout
        assert not picture.exists()
        eventually(lambda: tared(*words[:3], "annotated=true", *words[3:]).returncode == 0, LIMIT_S)
        image = cv2.imread(str(picture))
        assert image is not None
        assert image.shape == (32, 32, 3)
        assert [path.name for path in picture.parent.iterdir() if "now" in path.name] == ["now.jpg"]


@pytest.mark.slow
@pytest.mark.broker
def test_a_daemon_with_keys_obeys_its_operators_alone(board: World, mosquitto: RealBroker, tmp_path: Path) -> None:
    private, public, identity = new_key(tmp_path / "ann")
    board.change(commands={"operator_keys": [str(public)], "clock": "trusted"})
    with Watcher(mosquitto.endpoint) as watcher, board.running():
        birth = watcher.expect(TOPICS.birth)
        assert birth["commands"] == {"operator_keys": [identity], "release_keys": [], "unsigned": False}
        eventually(lambda: code(order(mosquitto, "status")) == "command.unsigned", LIMIT_S)
        told = tared("send", "board", "status", "--port", mosquitto.port, "--json", "--sign", private)
        assert json.loads(told.stdout)["result"]["degraded"] in (True, False)
        command = new_command("status", {}, time.time(), to=Topics("default", "other"))
        (result,) = send(mosquitto.endpoint, TOPICS, command, silence_s=20.0, signer=Signer(private))
        assert code(result) == "command.target"
