"""True accuracy from a running daemon: by labels over a real broker, and by the labels file of a recording."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml
from brokers import RealBroker, Watcher, eventually
from listening import Listening
from runtime_under_test import RUNTIME
from worlds import FPS, SPEC, World, make_world, write_clip

from agent.config import load_config
from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.daemon.supervisor import Supervisor
from agent.models.model import open_model
from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message
from agent.uplink.link import MqttLink
from agent.vision.detections import Detections, LabelledBoxes
from engines.registry import open_backend
from fleet.cli.main import main
from fleet.operator import new_command, send

TOPICS = Topics("default", "board")
REFERENCE_ACCURACY = 0.9
CLASSES: list[str] = [*SPEC["labels"]]


@pytest.fixture(scope="module")
def answers(calibrated_once: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of the calibrated world's engine to the first frames of its clip."""
    folder = tmp_path_factory.mktemp("answers")
    write_clip(folder / "clip.avi", lambda _: 0.5, 400)
    command = [
        "infer",
        calibrated_once.state_dir / "current",
        "--frames",
        folder / "clip.avi",
        "-o",
        folder / "answers",
    ]
    assert main([*map(str, command)]) == 0
    return [json.loads(line)["label"] for line in (folder / "answers").read_text().splitlines()]


def labelled(answers: list[str], frames: int) -> dict[int, str]:
    """The engine's own answers as labels; every fourth says something else."""
    other = {name: CLASSES[number - 1] for number, name in enumerate(CLASSES)}
    return {frame: other[answers[frame]] if frame % 4 == 0 else answers[frame] for frame in range(frames)}


def mqtt(broker: RealBroker) -> dict[str, object]:
    return {"host": broker.host, "port": broker.port}


def frames_served(broker: RealBroker) -> int:
    result = list(send(broker.endpoint, TOPICS, new_command("status", {}, time.time()), silence_s=60.0))[-1].result
    assert result is not None
    return cast(int, result["frames"])


def camera(watcher: Watcher, *known: str) -> dict[str, Any]:
    """The next telemetry of the camera that has all of these keys."""
    while True:
        sample: dict[str, Any] = watcher.expect(TOPICS.telemetry)["cameras"]["camera"]
        if set(known) <= sample.keys():
            return sample


def label(client: MqttClient, retain: bool = False, **fields: Any) -> None:
    client.publish(Message(TOPICS.labels, json.dumps({"camera": "camera", **fields}).encode(), retain=retain))


@pytest.mark.trial
@pytest.mark.broker
def test_labels_over_mqtt_give_the_accuracy_of_the_engine_in_service(
    tmp_path: Path, any_broker: RealBroker, calibrated_once: World, answers: list[str]
) -> None:
    world = calibrated_once.copy(tmp_path / "world", mqtt=mqtt(any_broker))
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
        eventually(lambda: frames_served(any_broker) >= 20)
        assert labeller.wait_connected(60.0)
        for frame, name in labelled(answers, 20).items():
            place = {"ts": frame / FPS} if frame % 2 else {"frame": frame}
            label(labeller, **place, labels=name if frame % 3 else CLASSES.index(name))
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
    summary = Supervisor(config, model, open_backend(RUNTIME), link, birth, 0, {"camera": labels}).run()
    assert summary.live_accuracy is not None
    interval = summary.live_accuracy.interval
    assert interval.n == 40
    assert interval.estimate == pytest.approx(0.5)
