"""Damage of growing size that is planted into true answers costs in proportion, whatever it is done to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest

from agent.vision.answer import Answer
from agent.vision.detections import Detections
from agent.vision.tasks.depth import DepthMap
from agent.vision.tasks.instance import Instances
from agent.vision.tasks.obb import OrientedBoxes, turned
from agent.vision.tasks.pose import COCO_SIGMAS, Poses
from agent.vision.tasks.segment import LabelMap

SIZE = (96, 128)
SHARES = (0.0, 0.02, 0.03, 0.05, 0.1)  # of a side, by which points are off
SIDE, COUNT = 24.0, 12
STEPS = (0, 3, 6, 9, 12)  # twelfths of the damage
THRESHOLD = 0.3

Harm = Callable[[Any, int], Any]


def placed() -> dict[str, Any]:
    """Boxes of 24 x 24 in three rows of four, of two classes, with scores from 0.35 to 0.9."""
    rows, columns = np.divmod(np.arange(COUNT), 4)
    corners = np.stack((columns * 32.0 + 4.0, rows * 32.0 + 4.0), axis=1)
    boxes = np.hstack((corners, corners + SIDE)).astype(np.float32)
    scores = np.linspace(0.9, 0.35, COUNT, dtype=np.float32)
    return {"boxes": boxes, "classes": np.arange(COUNT, dtype=np.int64) % 2, "scores": scores}


def instances() -> Instances:
    masks = np.zeros((COUNT, *SIZE), np.uint8)
    for mask, box in zip(masks, placed()["boxes"].astype(int).tolist(), strict=True):
        mask[box[1] : box[3], box[0] : box[2]] = 1
    return Instances(**placed(), masks=np.packbits(masks, axis=2), columns=SIZE[1], covered=SIZE)


def poses() -> Poses:
    boxes = placed()["boxes"]
    places = np.random.default_rng(0).uniform(0.1, 0.9, (COUNT, len(COCO_SIGMAS), 2))
    points = boxes[:, np.newaxis, :2] + places * SIDE
    seen = np.ones((*points.shape[:2], 1))
    return Poses(**placed(), points=np.dstack((points, seen)).astype(np.float32), sigmas=COCO_SIGMAS)


def oriented() -> OrientedBoxes:
    found = placed()
    centres = (found["boxes"][:, :2] + found["boxes"][:, 2:]) / 2
    sides = np.full((COUNT, 2), (SIDE, SIDE / 2), np.float32)
    return OrientedBoxes.around(
        turned(centres, sides, np.full(COUNT, 0.4, np.float32)), found["classes"], found["scores"]
    )


def street() -> LabelMap:
    classes = np.zeros(SIZE, np.int16)
    classes[48:] = 1
    classes[24:72, 40:64] = 2
    return LabelMap(classes, SIZE)


def one_pose() -> Poses:
    """One of the poses, whose box is around its key points."""
    found = poses()[:1]
    places = found.points[..., :2]
    return replace(found, boxes=np.hstack((places.min(axis=1), places.max(axis=1))), is_one=True)


def depths(kind: str = "metric") -> DepthMap:
    """Distances around zero, with zeros where a Relu cut them off, and a pixel that has none."""
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    values[:40] = 0.0
    values[50, 50] = np.nan
    return DepthMap(values, SIZE, is_relative=kind == "relative")


SELVES: dict[str, Answer] = {
    "detect": Detections(**placed()),
    "instance": instances(),
    "pose": poses(),
    "pose of one": one_pose(),
    "pose of one that sees no point": replace(
        one_pose(), points=one_pose().points * np.array((1.0, 1.0, 0.1), np.float32)
    ),
    "pose whose boxes have no area": replace(poses(), boxes=poses().boxes[:, [0, 1, 0, 1]]),
    "obb": oriented(),
    "segment": street(),
    "segment of nothing": replace(street(), classes=np.full(SIZE, -1, np.int16)),
    "depth": depths(),
    "depth that is relative": depths("relative"),
    "depth of zeros": DepthMap(np.zeros(SIZE, np.float32), SIZE),
    "depth below zero": DepthMap(np.full(SIZE, -3.0, np.float32), SIZE),
}


@pytest.mark.parametrize("answer", SELVES)
def test_every_answer_is_its_own_equal(answer: str) -> None:
    assert SELVES[answer].fidelity(SELVES[answer]) == pytest.approx(1.0, abs=1e-6)


ANSWERS: dict[str, Callable[[], Any]] = {
    "detect": lambda: Detections(**placed()),
    "instance": instances,
    "pose": poses,
    "obb": oriented,
}


def scores_fall(found: Any, step: int) -> Any:
    scores = found.scores.copy()
    scores[COUNT - step :] *= 0.1
    return found[scores > THRESHOLD]


def a_class_becomes_another(found: Any, step: int) -> Any:
    classes = found.classes.copy()
    classes[:step] = 1 - classes[:step]
    return replace(found, classes=classes)


def boxes_move(found: Any, step: int) -> Any:
    """Move the first objects by half of a side, with all that they have."""
    moved, shift = found.boxes.copy(), np.float32(SIDE / 2)
    moved[:step, ::2] += shift
    changes: dict[str, Any] = {"boxes": moved}
    for name in ("points", "corners"):
        if hasattr(found, name):
            changes[name] = getattr(found, name).copy()
            changes[name][:step, :, 0] += shift
    if isinstance(found, Instances):
        cells = np.unpackbits(found.masks, axis=2)
        cells[:step] = np.roll(cells[:step], int(SIDE / 2), axis=2)
        changes["masks"] = np.packbits(cells, axis=2)
    return replace(found, **changes)


@pytest.mark.parametrize("task", ANSWERS)
@pytest.mark.parametrize("harm", [scores_fall, a_class_becomes_another, boxes_move])
def test_objects_that_are_harmed_cost_their_share(task: str, harm: Harm) -> None:
    reference = ANSWERS[task]()
    losses = [1.0 - harm(reference, step).fidelity(reference) for step in STEPS]
    assert losses[0] == pytest.approx(0.0, abs=1e-6)
    assert (np.diff(losses) > 0.08).all()
    assert losses[2] == pytest.approx(0.5, abs=0.2)
    assert losses[-1] > 0.95


def scores_alone_fall(found: Any, step: int) -> Any:
    return replace(found, scores=found.scores * np.float32(1.0 - step / 12.0))


def scores_alone_change_places(found: Any, step: int) -> Any:
    scores = found.scores.copy()
    scores[:step] = scores[:step][::-1]
    return replace(found, scores=scores)


def boxes_alone_move(found: Any, step: int) -> Any:
    boxes = found.boxes.copy()
    boxes[:, ::2] += np.float32(step * SIDE / 12.0)
    return replace(found, boxes=boxes)


@pytest.mark.parametrize("task", ["instance", "pose", "obb"])
@pytest.mark.parametrize(
    ("harm", "whole"),
    [
        (scores_alone_fall, placed()["scores"].mean()),
        (scores_alone_change_places, np.abs(placed()["scores"] - placed()["scores"][::-1]).mean()),
        (boxes_alone_move, 1.0),
    ],
)
def test_scores_alone_and_boxes_alone_cost_as_far_as_they_differ(task: str, harm: Harm, whole: float) -> None:
    reference = ANSWERS[task]()
    losses = [1.0 - harm(reference, step).fidelity(reference) for step in STEPS]
    assert losses[0] == pytest.approx(0.0, abs=1e-6)
    assert (np.diff(losses) > 0.005).all()
    assert losses[-1] == pytest.approx(whole, abs=0.06)


@pytest.mark.parametrize("make", [poses, one_pose])
def test_points_that_all_move_a_little_cost_long_before_they_are_far(make: Callable[[], Poses]) -> None:
    reference, losses = make(), []
    side = float((reference.boxes[0, 2:] - reference.boxes[0, :2]).max())
    for share in SHARES:
        points = reference.points.copy()
        points[..., 0] += np.float32(share * side)
        losses.append(1.0 - replace(reference, points=points).fidelity(reference))
    assert losses[0] == pytest.approx(0.0, abs=1e-6)
    assert losses[2] > 0.05
    assert losses[-1] > 0.3
    assert (np.diff(losses) > 0.02).all()


@pytest.mark.parametrize(
    ("served", "reference"),
    [(boxes_move(make(), 5)[2:], scores_alone_fall(make(), 6)) for make in (instances, poses, oriented)]
    + [(replace(depths(), values=depths().values + np.float32(0.02)), depths())],
)
def test_two_answers_have_one_fidelity_whichever_is_first(served: Any, reference: Any) -> None:
    there, back = served.fidelity(reference), reference.fidelity(served)
    assert 0.1 < there < 0.9
    assert there == pytest.approx(back, abs=1e-9)


def masks_shrink(found: Instances, step: int) -> Instances:
    kernel = np.ones((3, 3), np.uint8)
    cells = [np.unpackbits(each, axis=1) for each in found.masks]
    eroded = [cv2.erode(each, kernel, iterations=step // 4) for each in cells]
    return replace(found, masks=np.packbits(np.stack(eroded), axis=2))


def class_shrinks(found: LabelMap, step: int) -> LabelMap:
    shape = (found.classes == 2).astype(np.uint8)
    edge = shape - cv2.erode(shape, np.ones((3, 3), np.uint8), iterations=step // 3)
    classes = found.classes.copy()
    classes[edge > 0] = 0
    return replace(found, classes=classes)


def class_is_lost(found: LabelMap, step: int) -> LabelMap:
    classes = found.classes.copy()
    part = classes[: 24 + step * 4]
    part[part == 2] = 0
    return replace(found, classes=classes)


def point_jumps(found: Poses, step: int) -> Poses:
    """A point of every object goes astray, by up to a third of its side."""
    points = found.points.copy()
    points[:, 5, 0] += np.float32(step * SIDE / 36)
    return replace(found, points=points)


# Of masks 18 x 18 pixels of 24 x 24 are left. Of class 2, 48 x 24 pixels, 40 x 16 are left, or none; the sky has
# the others. Of 17 points one is wrong.
SKY = 48 * 128 - 24 * 24


@pytest.mark.parametrize(
    ("reference", "harm", "steps", "whole"),
    [
        (instances(), masks_shrink, (0, 4, 8, 12), 1.0 - 18**2 / 24**2),
        (street(), class_shrinks, STEPS, (2.0 - 640 / 1152 - SKY / (SKY + 512)) / 3.0),
        (street(), class_is_lost, STEPS, (2.0 - SKY / (SKY + 1152)) / 3.0),
        (poses(), point_jumps, STEPS, 1 / 17),
    ],
)
def test_shapes_that_are_harmed_cost_more_the_more_is_wrong(
    reference: Any, harm: Harm, steps: tuple[int, ...], whole: float
) -> None:
    losses = [1.0 - harm(reference, step).fidelity(reference) for step in steps]
    assert losses[0] == pytest.approx(0.0, abs=1e-6)
    assert (np.diff(losses) > 0.001).all()
    assert losses[-1] == pytest.approx(whole, rel=0.05)
    assert losses[1] < whole / 2
