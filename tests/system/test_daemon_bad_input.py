"""Bad input to the operator and the daemon: refused or survived, and the video goes on."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import onnx
import pytest
from bench import Bench, classifier, fill, small_file_system
from brokers import RealBroker, Watcher, free_port
from daemon_life import TOPICS, answer
from warm_start import tared
from worlds import OUTLASTS_S, World, make_world

from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message
from engines.store.artefact import Store


def test_a_broker_that_is_not_there_is_an_error_for_the_operator() -> None:
    port = free_port()
    done = tared("send", "board", "status", "--port", port, "--timeout", "0.5")
    said = Bench.error(done.returncode, done.stdout, done.stderr)
    assert said.startswith(f"broker.unreachable: no connection to 127.0.0.1:{port}")


def test_a_command_that_no_device_would_take_is_not_sent() -> None:
    done = tared("send", "board", "recalibrate", "wings=2")
    assert Bench.error(done.returncode, done.stdout, done.stderr).startswith("command.args: ")


@pytest.mark.broker
def test_a_device_that_does_not_answer_is_named(any_broker: RealBroker) -> None:
    done = tared("send", "absent", "status", "--port", any_broker.port, "--timeout", "1")
    said = Bench.error(done.returncode, done.stdout, done.stderr)
    assert said.startswith("command.no_answer: no answer from default/absent")


def night(folder: Path, broker: RealBroker | None, **changes: Any) -> World:
    mqtt = {"host": broker.host, "port": broker.port} if broker else {"host": "127.0.0.1", "port": free_port()}
    return make_world(folder, lambda _: 0.5, OUTLASTS_S, mqtt=mqtt, **changes)


def frames_served(broker: RealBroker) -> int:
    return int(answer(broker, "status")["frames"])


def command(**changes: object) -> bytes:
    fields = {"id": "c", "op": "status", "args": {}, "issued": time.time(), "expires": time.time() + 60, "version": 1}
    return json.dumps({**fields, **changes}).encode()


@pytest.mark.broker
def test_commands_that_cannot_be_carried_out_are_rejected_and_the_video_goes_on(
    tmp_path: Path, any_broker: RealBroker
) -> None:
    bad = {
        "cut": (b'{"id": "cut", "op": "sta', "message.malformed"),
        "list": (b'[{"id": "list"}]', "message.not_object"),
        "op": (command(id="op", op="self-destruct"), "command.unknown_op"),
        "no-op": (command(id="no-op", op=None), "command.unknown_op"),
        "args": (command(id="args", op="recalibrate", args={"frames": "many"}), "command.args"),
        "key": (command(id="key", op="recalibrate", args={"wings": 2}), "command.args"),
        "time": (command(id="time", expires="tomorrow"), "command.invalid"),
        "huge": (command(id="huge", padding="x" * 70_000), "message.too_large"),
    }
    world = night(tmp_path, any_broker)
    with Watcher(any_broker.endpoint) as watcher, world.running() as process:
        before = frames_served(any_broker)
        with MqttClient(any_broker.endpoint, "vandal") as vandal:
            assert vandal.wait_connected(10.0)
            vandal.publish(Message(TOPICS.command, b"\xff\x00 nonsense without an id"))
            for payload, _ in bad.values():
                vandal.publish(Message(TOPICS.command, payload))
            for name, (_, expected) in bad.items():
                result = watcher.expect(TOPICS.result(name))
                assert (result["status"], result["error"]["code"]) == ("REJECTED", expected)
        assert frames_served(any_broker) > before
        assert process.poll() is None


def test_activations_that_are_no_numbers_cost_the_job_and_not_the_video(tmp_path: Path) -> None:
    world = make_world(
        tmp_path, lambda ts: 0.02 if ts > 2.0 else 0.5, OUTLASTS_S, mqtt={"host": "127.0.0.1", "port": free_port()}
    )
    onnx.save(classifier(lambda net: net.node("Log", "image")), tmp_path / "model.onnx")
    summary, errors = world.run(until="code=calibration.nonfinite")
    assert summary["dropped"] == {}
    assert summary["swaps"] == []
    assert "code=observer.nonfinite camera=camera message=\"NaN or infinite values in ['t0']\"" in errors


def current_id(world: World) -> str | None:
    artefact = Store(world.state_dir).read("current")
    return artefact.id if artefact else None


def test_a_daemon_that_starts_on_a_full_disk_serves_the_engine_that_was_current(calibrated_world: World) -> None:
    world, current = calibrated_world, current_id(calibrated_world)
    world.change(mqtt={"host": "127.0.0.1", "port": free_port()})
    world.config["state_dir"] = "disk"
    with small_file_system(world.folder / "disk") as disk:
        shutil.copytree(world.state_dir, disk, symlinks=True, dirs_exist_ok=True)
        fill(disk / "ballast")
        summary, errors = world.run("--frames", "20")
        assert (summary["frames"], summary["swaps"]) == (20, [])
        assert summary["artefact"].endswith(f"disk/artefacts/{current}")
        assert "code=outbox.write" in errors
