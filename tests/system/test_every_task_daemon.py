"""A daemon serves a model of each task: results, preview, policy, drawn frames, their labels and the accuracy."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml
from brokers import RealBroker, Watcher, eventually
from daemon_life import TOPICS, answer, code, order
from label_bench import tared
from model_families import KEYPOINTS, Family, family, segmentation, yolo26_obb, yolo26_pose, yolo26_seg
from preview_bench import get
from worlds import World, make_world

from agent.contract.wire import MAX_PAYLOAD_BYTES
from fleet.cli.main import main

pytestmark = [pytest.mark.broker, pytest.mark.slow]

DRAWN = 3
# By task: the model, its keys, and where its answers are in a result.
MODELS: dict[str, tuple[Family, dict[str, Any], str]] = {
    "instance": (yolo26_seg, {"decoder": "end2end"}, "detections"),
    "pose": (yolo26_pose, {"decoder": "end2end", "keypoints": KEYPOINTS}, "detections"),
    "obb": (yolo26_obb, {"decoder": "end2end"}, "detections"),
    "segment": (segmentation, {}, "segments"),
    "depth": (lambda net: net.model(net.node("Sigmoid", net.conv("image", 3, 1, strides=[4, 4]))), {}, "depth"),
}


def served_world(folder: Path, task: str, broker: RealBroker) -> World:
    make, keys, _ = MODELS[task]
    world = make_world(
        folder,
        lambda _: 0.5,
        400.0,
        mqtt={"host": broker.host, "port": broker.port},
        results={"file": "results.jsonl", "mqtt_per_s": 10},
        labelling={"per_week": 1_000_000, "most_waiting": DRAWN},
        observe={"budget": None, "period_s": 0.05},
        preview={"address": "127.0.0.1:0"},
        privacy={"preview": True},
        recalibration={"automatic": False},
    )
    onnx.save(family(make), folder / "model.onnx")
    spec = {"path": "model.onnx", "task": task, "labels": [], "input": {"resize": "stretch", "scale": 1 / 255}, **keys}
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    return world


@pytest.mark.parametrize("task", MODELS)
def test_a_model_of_each_task_is_served_shown_drawn_and_labelled(
    tmp_path: Path, any_broker: RealBroker, task: str
) -> None:
    world, key = served_world(tmp_path, task, any_broker), MODELS[task][2]
    config, labels = world.folder / "config.yaml", tmp_path / "out" / "instances.json"
    with Watcher(any_broker.endpoint) as watcher, world.running():
        result = watcher.expect(TOPICS.detections)
        assert key in result
        assert len(json.dumps(result)) <= MAX_PAYLOAD_BYTES
        status = answer(any_broker, "status")
        eventually(lambda: get(status["preview"]["address"], "/frame.jpg")[0] == 200)
        refused = code(order(any_broker, "policy", artefact=status["engine"], score_threshold=0.9))
        assert refused == ("command.policy" if task in ("segment", "depth") else "")
        if task == "depth":
            assert tared(config, "--list", code=2)["error"]["code"] == "labelling.task"
            return
        eventually(lambda: drawn(config) == DRAWN, 60.0)
        exported = tared(config, "--export", labels.parent)
        assert (exported["images"], exported["suggested"]) == (DRAWN, DRAWN)
        document = json.loads(labels.read_text())
        if not document["annotations"]:  # weights are random: what is found is, too
            return
        tared(config, "--import", labels)
        event = watcher.expect(TOPICS.event, kind="labelled")
        assert (event["labels"], event["suggested"]) == (DRAWN, DRAWN)
        if task == "segment":  # a random object may have no area, and is no label then
            assert event["overall"]["reference"]["estimate"] == pytest.approx(1.0, abs=1e-3)


def drawn(config: Path) -> int:
    """How many frames the daemon has drawn so far."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main(["label", "-c", str(config), "--json", "--list"])
    return int(json.loads(output.getvalue()).get("drawn", 0))
