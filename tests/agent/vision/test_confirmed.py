"""An answer is confirmed by the mirrored frame, unless the frame in disorder has the same one."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest

from agent.vision.detections import Detections
from agent.vision.drawing import Picture
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from agent.vision.tasks.pose import Poses
from agent.vision.tasks.segment import NOTHING, LabelMap
from agent.vision.tasks.task import ModelTask, See

SIZE = (128, 192)
KEYS: dict[str, dict[str, Any]] = {
    "segment": {},
    "pose": {"decoder": "heatmaps", "keypoints": 4},
    "obb": {"decoder": "dbnet"},
    "instance": {"decoder": "yolov8"},
    "depth": {},
    "raw": {},
}


def task(name: str, **keys: Any) -> ModelTask:
    return open_task(ModelSpec.model_validate({"path": "m.onnx", "task": name, **keys}))


def scene() -> Picture:
    """Return a dark picture with a bright thing on the left."""
    image = np.full((*SIZE, 3), 20, np.uint8)
    cv2.circle(image, (50, 60), 30, (250, 250, 250), -1)
    return image


def maps(classes: Any) -> See:
    return lambda image: ({}, LabelMap(np.asarray(classes(image), np.int16), SIZE))


def bright(image: Picture) -> Any:
    return np.where(image[..., 0] > 128, 0, NOTHING)


def test_a_map_of_what_the_picture_shows_is_confirmed() -> None:
    sureness = task("segment").confirmed(maps(bright), scene())
    assert sureness[0] == sureness[1] > 0.5
    half = np.arange(SIZE[1]) < 50

    def unsteady(image: Picture) -> Any:
        return np.where(half, bright(image), NOTHING)

    assert task("segment").confirmed(maps(unsteady), scene())[0] < 0.7 * sureness[0]


@pytest.mark.parametrize(
    "classes",
    [
        lambda image: np.zeros(image.shape[:2]),
        lambda image: np.full(image.shape[:2], NOTHING),
        lambda _: np.hypot(*np.mgrid[-64:64, -96:96]) < 40,
        lambda image: np.broadcast_to(np.arange(image.shape[1]) < 70, image.shape[:2]),
    ],
    ids=["everything", "nothing", "the middle", "the left"],
)
def test_a_map_that_is_the_same_of_every_frame_is_not(classes: Any) -> None:
    assert task("segment").confirmed(maps(classes), scene()) == (0.0, 0.0)


def pose_of(places: Any) -> Poses:
    points = np.array([[(x, y, 0.8) for x, y in places]], np.float32)
    box = np.hstack((points[0, :, :2].min(axis=0), points[0, :, :2].max(axis=0)))[np.newaxis]
    return Poses(
        boxes=box, classes=np.zeros(1, np.int64), scores=np.ones(1, np.float32), points=points, sigmas=(0.05,) * 4,
        is_one=True,
    )  # fmt: skip


def corners(image: Picture) -> Poses:
    """Return the left, right, upper and lower end of what is bright; in a mirrored picture left and right change."""
    ys, xs = np.nonzero(image[..., 0] > 128)
    return pose_of([(xs.min(), ys.mean()), (xs.max(), ys.mean()), (xs.mean(), ys.min()), (xs.mean(), ys.max())])


@pytest.mark.parametrize("decoder", ["heatmaps", "landmarks"])
def test_key_points_that_follow_the_picture_are_confirmed_whichever_is_left(decoder: str) -> None:
    judged = task("pose", decoder=decoder, keypoints=4)
    assert judged.confirmed(lambda image: ({}, corners(image)), scene())[0] == pytest.approx(0.8, abs=0.05)
    mean = pose_of([(60, 60), (132, 60), (96, 30), (96, 90)])
    assert judged.confirmed(lambda _: ({}, mean), scene()) == (0.0, 0.0)
    empty = corners(scene())[:0]
    assert judged.confirmed(lambda _: ({}, empty), scene()) == (0.0, 0.0)


def found(boxes: Any) -> Detections:
    rows = np.array(boxes, np.float32).reshape(-1, 4)
    return Detections(boxes=rows, classes=np.zeros(len(rows), np.int64), scores=np.full(len(rows), 0.81, np.float32))


def test_a_detection_counts_unless_the_frame_in_disorder_has_it_as_well() -> None:
    """A saturated network finds the same grid in every frame, and in the mirrored one."""
    judged = task("detect", decoder="yolox")

    def bounds(image: Picture) -> Detections:
        ys, xs = np.nonzero(image[..., 0] > 128)
        return found([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])

    sums, top = judged.confirmed(lambda image: ({}, bounds(image)), scene())
    assert [sums, top] == pytest.approx([0.81**2, 0.81], abs=1e-4)
    grid = [(x, y, x + 32, y + 32) for x in range(0, 192, 32) for y in range(0, 128, 32)]
    assert judged.confirmed(lambda _: ({}, found(grid)), scene()) == (0.0, 0.0)
    beside = judged.confirmed(lambda image: ({}, found([*grid, *bounds(image).boxes.tolist()])), scene())
    assert 0.0 < beside[0] < sums
    assert judged.confirmed(lambda _: ({}, found([])), scene()) == (0.0, 0.0)


def test_a_task_without_a_sound_measure_says_that_it_has_none() -> None:
    can = {name: task(name, **keys).can_be_sure for name, keys in KEYS.items()}
    assert can == {"segment": True, "pose": True, "obb": True, "instance": True, "depth": False, "raw": False}
