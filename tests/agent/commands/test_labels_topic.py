"""Labels that come over MQTT: scored, or refused with the reason, and never a flood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.camera.capture import Frame
from agent.commands.labels import LabelsInbox
from agent.monitoring.accuracy import LiveAccuracy
from agent.vision.detections import Detections
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.obb import OrientedBoxes
from agent.vision.tasks.opening import open_task
from calibrate.errors import TaredError

IMAGE = np.zeros((8, 8, 3), np.uint8)
CLASSES = ("cat", "dog", "emu")


class Desk:
    """A desk of a camera 'north' whose frames 0 to 9, a tenth of a second apart, have all been answered alike."""

    def __init__(self, task: str = "classify", labels: tuple[str, ...] = CLASSES) -> None:
        decoder = "yolox" if task == "detect" else None
        spec = ModelSpec(path=Path("x.onnx"), task=task, decoder=decoder, labels=labels)
        boxes = np.array([[10, 10, 30, 30]], np.float32)
        detected = Detections(boxes=boxes, classes=np.array([1]), scores=np.array([0.9], np.float32))
        self.reported: list[tuple[str, int, str]] = []
        self.accuracy = LiveAccuracy(open_task(spec).labels)
        for frame in range(10):
            answer = Classification(1, 0.9) if task == "classify" else detected
            self.accuracy.add_answer(ServedFrame(Frame(frame, frame / 10, 0, IMAGE), "int8", answer, 0, 0.0))
        self.desk = LabelsInbox({"north": self.accuracy}, spec, self._report)

    def _report(self, error: TaredError, count: int) -> None:
        assert error.found
        assert error.expected
        assert error.remedy
        self.reported.append((error.code, count, str(error)))

    def send(self, payload: bytes | None = None, now_s: float = 0.0, retained: bool = False, **fields: Any) -> None:
        message = {"camera": "north", **fields}
        self.desk.receive(json.dumps(message).encode() if payload is None else payload, now_s, retained)

    @property
    def counted(self) -> tuple[float, int]:
        interval = self.accuracy.estimate.interval
        return interval.estimate, interval.n


def test_classes_come_by_id_or_by_name_for_a_frame_or_a_capture_time() -> None:
    desk = Desk()
    desk.send(frame=0, labels=1)
    desk.send(frame=1, labels="dog")
    desk.send(ts=0.21, labels="cat")
    desk.send(ts=0.3, labels=1)
    assert desk.counted == (0.75, 4)
    assert desk.reported == []


def test_boxes_come_in_frame_pixels_with_classes_by_id_or_by_name() -> None:
    desk = Desk("detect")
    desk.send(frame=0, labels=[{"class": "dog", "box": [10, 10, 30, 30]}])
    desk.send(frame=1, labels=[{"class": 1, "box": [10.5, 10, 30, 30]}])
    desk.send(frame=2, labels=[{"class": "cat", "box": [10, 10, 30, 30]}])
    desk.send(frame=3, labels=[])
    assert desk.counted == (0.5, 4)
    assert desk.reported == []


def test_shapes_come_with_their_own_keys_and_boxes_are_none() -> None:
    keys = {"path": "x.onnx", "task": "obb", "decoder": "yolov8", "labels": CLASSES}
    spec, reported = ModelSpec.model_validate(keys), list[str]()
    accuracy = LiveAccuracy(open_task(spec).labels)
    corners = np.array([[[10, 0], [20, 10], [10, 20], [0, 10]]], np.float32)
    answer = OrientedBoxes.around(corners, np.array([1]), np.array([0.9], np.float32))
    for frame in range(2):
        accuracy.add_answer(ServedFrame(Frame(frame, frame / 10, 0, IMAGE), "int8", answer, 0, 0.0))
    desk = LabelsInbox({"north": accuracy}, spec, lambda error, _count: reported.append(error.code))
    for frame, each in enumerate(({"corners": corners[0].tolist()}, {"box": [0, 0, 20, 20]})):
        document = {"camera": "north", "frame": frame, "labels": [{"class": "dog", **each}]}
        desk.receive(json.dumps(document).encode(), float(frame))
    assert reported == ["labels.task"]
    assert accuracy.estimate.interval.n == 1
    assert accuracy.estimate.interval.estimate == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("task", "fields", "code"),
    [
        ("classify", {"camera": "south", "frame": 0, "labels": 1}, "labels.camera"),
        ("classify", {"frame": 10, "labels": 1}, "labels.unknown"),
        ("classify", {"ts": 1e9, "labels": 1}, "labels.unknown"),
        ("classify", {"ts": -5.0, "labels": 1}, "labels.late"),
        ("classify", {"frame": 0, "labels": 3}, "labels.class"),
        ("classify", {"frame": 0, "labels": "fox"}, "labels.class"),
        ("classify", {"frame": 0, "labels": []}, "labels.task"),
        ("classify", {"frame": 0, "labels": True}, "message.invalid"),
        ("classify", {"frame": 0, "labels": "x" * 300}, "message.invalid"),
        ("classify", {"frame": 0, "ts": 0.0, "labels": 1}, "message.invalid"),
        ("classify", {"payload": b"\xff\x00"}, "message.malformed"),
        ("classify", {"frame": 0, "labels": 1, "retained": True}, "labels.retained"),
        ("detect", {"frame": 0, "labels": 1}, "labels.task"),
        ("detect", {"frame": 0, "labels": [{"class": 1}]}, "message.invalid"),
        ("detect", {"frame": 0, "labels": [{"class": 1, "corners": [[0, 0], [9, 0], [9, 9], [0, 9]]}]}, "labels.task"),
        ("detect", {"frame": 0, "labels": [{"class": "fox", "box": [0, 0, 1, 1]}]}, "labels.class"),
        ("detect", {"frame": 0, "labels": [{"class": 0, "box": [5, 0, 1, 1]}]}, "message.invalid"),
        ("detect", {"frame": 0, "labels": [{"class": 0, "box": [0, 0, 1, 1e300]}]}, "message.invalid"),
        ("detect", {"frame": 0, "labels": [{"class": 0, "box": [0, 0, 1, 1]}] * 1001}, "message.invalid"),
    ],
)
def test_unusable_labels_are_reported_and_do_not_count(task: str, fields: dict[str, Any], code: str) -> None:
    desk = Desk(task)
    desk.send(**fields)
    (reported,) = desk.reported
    assert reported[:2] == (code, 1)
    assert len(reported[2]) < 700
    assert desk.counted[1] == 0


def test_without_names_in_the_spec_any_id_is_a_class_and_no_name_is() -> None:
    desk = Desk(labels=())
    desk.send(frame=0, labels=70_000)
    assert desk.counted == (0.0, 1)
    desk.send(frame=1, labels="dog")
    assert [reported[0] for reported in desk.reported] == ["labels.class"]


def test_a_flood_is_measured_at_once_then_once_a_minute_with_its_number() -> None:
    desk = Desk()
    for number in range(1000):
        desk.send(b"nonsense", now_s=number / 100)
    desk.send(frame=99, labels=1, now_s=10.0)
    assert [reported[:2] for reported in desk.reported] == [("message.malformed", 1), ("labels.unknown", 1)]
    desk.desk.tick(59.9)
    assert len(desk.reported) == 2
    desk.desk.tick(60.0)  # nothing came since, and still it is reported
    desk.desk.tick(1e6)
    assert [reported[:2] for reported in desk.reported[2:]] == [("message.malformed", 999)]
    desk.send(b"nonsense", now_s=1e6)
    assert desk.reported[-1][:2] == ("message.malformed", 1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["class", "box"]), inner, max_size=2),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["camera", "frame", "ts", "labels"]), json_values),
    st.sampled_from(["classify", "detect", "raw"]),
)
def test_no_document_brings_the_desk_down(document: dict[str, Any], task: str) -> None:
    desk = Desk(task)
    desk.send(json.dumps({"camera": "north", **document}).encode())
    assert desk.counted[1] + len(desk.reported) + desk.accuracy.estimate.empty >= 1
