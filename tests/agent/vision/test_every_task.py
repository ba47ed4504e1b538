"""Answers of every task have results of bounded length, policies and losses by class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept import kept_in
from label_bench import KEYS, SHAPED
from results_bench import CONFIG, served
from results_bench import line as result_line

from agent.common.errors import CommandError
from agent.contract.commands import PolicyArgs
from agent.contract.wire import MAX_PAYLOAD_BYTES, read_object
from agent.control.policies import Policies
from agent.monitoring.class_losses import ClassLosses
from agent.results.mqtt_output import result_payload
from agent.vision.answer import Answer
from agent.vision.datasets.outlines import run_lengths_of
from agent.vision.detections import Detections
from agent.vision.policy import Policy
from agent.vision.spec import ModelSpec
from agent.vision.tasks.depth import DepthMap

SIZE = (120, 160)
LABELS = ["cat", "dog", "traffic light", "bus", "owl"]


def spec(task: str) -> ModelSpec:
    return ModelSpec.model_validate({"path": "m.onnx", "task": task, "labels": LABELS, **KEYS.get(task, {})})


def answer(task: str, first_class: int = 0) -> Answer:
    """Two objects, of which the second is of class 3."""
    boxes = np.array([[40, 30, 100, 90], [2, 2, 20, 20]], np.float32)
    found = Detections(boxes=boxes, classes=np.array([first_class, 3]), scores=np.array([0.75, 0.5], np.float32))
    return SHAPED[task](found)


def many(found: Any, count: int) -> Any:
    """The same objects over and over, each surer than the one before."""
    repeated = found[np.arange(count) % len(found)]
    vars(repeated)["scores"] = np.linspace(0.3, 0.9, count, dtype=np.float32)
    return repeated


def mask_sums(part: dict[str, Any]) -> bool:
    rows, columns = part["mask"]["size"]
    return bool(sum(run_lengths_of(part["mask"]["counts"])) == rows * columns)


PARTS: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "instance": ("detections", mask_sums),
    "segment": ("segments", mask_sums),
    "pose": ("detections", lambda part: np.array(part["keypoints"]).shape == (3, 3)),
    "obb": ("detections", lambda part: np.array(part["corners"]).shape == (4, 2)),
}


@pytest.mark.parametrize("task", PARTS)
def test_a_result_line_has_the_shape_of_each_part(task: str) -> None:
    key, is_shaped = PARTS[task]
    document = json.loads(result_line(1, answer(task), spec(task)).encoded)
    assert [each["label"] for each in document[key]] == ["cat", "bus"]
    assert all(map(is_shaped, document[key]))
    assert read_object(result_payload(document)) == document


@pytest.mark.parametrize("task", [task for task in PARTS if task != "segment"])
def test_the_surest_of_a_thousand_objects_fit_a_message(task: str) -> None:
    key, is_shaped = PARTS[task]
    document = result_line(1, many(answer(task), 1000), spec(task)).document
    assert len(document[key]) == 1000
    cut = read_object(result_payload(document))
    assert len(result_payload(document)) <= MAX_PAYLOAD_BYTES
    assert len(cut[key]) + cut["left_out"] == 1000
    assert all(map(is_shaped, cut[key]))
    assert min(each["score"] for each in cut[key]) > 0.9 - 0.6 * len(cut[key]) / 999.0 - 1e-3


def test_a_depth_map_fits_a_message_whatever_its_size() -> None:
    values = np.random.default_rng(0).random((2048, 2048), np.float32) * 1e6
    document = result_line(1, DepthMap(values, values.shape), spec("depth")).document
    assert read_object(result_payload(document)) == document
    assert np.array(document["depth"]).shape == (12, 16)


@pytest.mark.parametrize("task", PARTS)
def test_a_line_says_that_there_are_zero_objects(task: str) -> None:
    empty = answer(task).shown(Policy(classes=frozenset()), "street", None)
    assert empty.is_empty
    assert result_line(1, empty, spec(task)).document[PARTS[task][0]] == []
    assert empty.summary(spec(task)) == "nothing"
    assert empty.fidelity(empty) == 1.0
    image = np.full((*SIZE, 3), 99, np.uint8)
    assert (empty.drawn_into(image, None, spec(task)) == 99).all()


OBJECTS = {"score_threshold", "classes", "masks"}
APPLYING = {"instance": OBJECTS, "pose": OBJECTS, "obb": OBJECTS, "segment": {"classes"}, "depth": set[str]()}
ARGUMENTS: dict[str, Any] = {
    "score_threshold": 0.6,
    "classes": ["bus"],
    "masks": [[[0.0, 0.0], [0.5, 0.0], [0.5, 1.0], [0.0, 1.0]]],
}


@pytest.mark.parametrize("task", APPLYING)
def test_a_policy_takes_the_keys_that_apply_and_refuses_the_others(tmp_path: Path, task: str) -> None:
    config = CONFIG.model_copy(update={"model": spec(task), "state_dir": tmp_path})
    policies = Policies(config, kept_in(tmp_path))
    for key, value in ARGUMENTS.items():
        arguments = PolicyArgs.model_validate({"artefact": "f00d", key: value})
        if key not in APPLYING[task]:
            with pytest.raises(CommandError) as refused:
                policies.set(arguments)
            assert refused.value.code == "command.policy"
            assert f"task {task}" in str(refused.value)
            continue
        policies.set(arguments)
        shown = policies.show(served(1, answer(task))).result if key != "masks" else None
        if shown is not None:
            assert shown.classes_seen == {"score_threshold": {0}, "classes": {3}}[key]


@pytest.mark.parametrize("task", PARTS)
def test_the_class_that_int8_loses_is_named(task: str) -> None:
    losses = ClassLosses(1.0, 1.0)
    for frame in range(1500):
        is_lost = frame > 500
        losses.add(frame, float(frame), answer(task).pairs(answer(task, 1 if is_lost else 0)))
    (lost,) = losses.lost
    assert (lost.class_id, lost.instead) == (0, 1)
    assert lost.loss > 0.9
