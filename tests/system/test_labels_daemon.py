"""True accuracy from a running daemon: by labels over a real broker, and by those of a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml
from brokers import RealBroker, Watcher, eventually
from daemon_life import TOPICS, answer
from kept import kept_in
from listening import Listening
from runtime_under_test import RUNTIME
from worlds import FPS, SPEC, World, make_world, write_clip

from agent.config import load_config
from agent.contract.messages import Birth
from agent.daemon.supervisor import Supervisor
from agent.models.model import open_model
from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message
from agent.uplink.link import MqttLink
from agent.vision.boxes import LabelledBoxes
from agent.vision.detections import Detections
from engines.registry import open_backend
from fleet.cli.main import main

REFERENCE_ACCURACY = 0.9
CLASSES: list[str] = [*SPEC["labels"]]


def camera(watcher: Watcher, *known: str) -> dict[str, Any]:
    """The next telemetry of the camera that has all of these keys."""
    while True:
        sample: dict[str, Any] = watcher.expect(TOPICS.telemetry)["cameras"]["camera"]
        if set(known) <= sample.keys():
            return sample


def answers(world: World, frames: int) -> list[str]:
    """The answers of the world's engine to the first frames of its clip."""
    write_clip(world.folder / "first.avi", lambda _: 0.5, frames)
    found = world.folder / "answers"
    command = ["infer", world.state_dir / "current", "--frames", world.folder / "first.avi", "-o", found]
    assert main([*map(str, command)]) == 0
    return [json.loads(line)["label"] for line in found.read_text().splitlines()]


@pytest.mark.trial
@pytest.mark.broker
def test_labels_over_mqtt_give_the_accuracy_of_the_engine_in_service(
    tmp_path: Path, any_broker: RealBroker, calibrated_once: World
) -> None:
    """Labels of an engine's own answers, but every fourth is of another class."""
    mqtt = {"host": any_broker.host, "port": any_broker.port}
    world = calibrated_once.copy(tmp_path / "world", mqtt=mqtt)
    spec = {**SPEC, "reference_accuracy": REFERENCE_ACCURACY}  # which no engine depends on
    (world.folder / "model.yaml").write_text(yaml.safe_dump(spec))
    with (
        Watcher(any_broker.endpoint) as watcher,
        MqttClient(any_broker.endpoint, "labeller") as labeller,
        world.running(),
    ):
        sample = camera(watcher, "fidelity_hour")
        assert "accuracy" not in sample
        bound = REFERENCE_ACCURACY - (1.0 - sample["fidelity"]["low"])
        assert sample["accuracy_lower_bound_if_reference_accuracy_holds"] == pytest.approx(max(0.0, bound))
        assert sample["fidelity_hour"]["n"] >= sample["fidelity"]["n"]
        eventually(lambda: answer(any_broker, "status")["frames"] >= 20)
        assert labeller.wait_connected(60.0)
        for frame, name in enumerate(answers(world, 20)):
            place = {"ts": frame / FPS} if frame % 2 else {"frame": frame}
            number = CLASSES.index(name) - (frame % 4 == 0)
            document = {"camera": "camera", **place, "labels": CLASSES[number] if frame % 3 else number % len(CLASSES)}
            labeller.publish(Message(TOPICS.labels, json.dumps(document).encode()))
        while (accuracy := camera(watcher, "accuracy")["accuracy"])["n"] < 20:
            pass
        assert (accuracy["n"], accuracy["empty"]) == (20, 0)
        assert accuracy["estimate"] == pytest.approx(0.75)
        assert accuracy["low"] <= 0.75 <= accuracy["high"]


def one_box(_outputs: object, _size: object, _score_threshold: float) -> Detections:
    """A decoder that finds the same in every frame, in network pixels of 8 x 8."""
    boxes = np.array([[2.0, 2.0, 6.0, 6.0]], np.float32)
    return Detections(boxes=boxes, classes=np.zeros(1, np.int64), scores=np.array([0.9], np.float32))


def test_a_detector_is_scored_in_frame_pixels_by_the_labels_of_its_recording(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 4.0, camera={"speed": 0})
    spec = {**SPEC, "task": "detect", "decoder": f"{__name__}:one_box"}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(spec))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(world.config))
    config = load_config(tmp_path / "config.yaml")
    model = open_model(config.model)
    there = LabelledBoxes(boxes=np.array([[8.0, 8.0, 24.0, 24.0]], np.float32), classes=np.zeros(1, np.int64))
    link = cast(MqttLink, Listening())  # as far as a supervisor knows
    birth = Birth(agent_version="0", model=model.sha256)
    labels = dict.fromkeys(range(0, 40, 2), there)  # the others show nothing, and something is found
    summary = Supervisor(
        config, kept_in(config.state_dir), model, open_backend(RUNTIME), link, birth, 0, {"camera": labels}
    ).run()
    assert summary.live_accuracy is not None
    interval = summary.live_accuracy.interval
    assert interval.n == 40
    assert interval.estimate == pytest.approx(0.5)
