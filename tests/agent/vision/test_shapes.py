"""Masks, key points and oriented boxes are decoded from every export, and harm to them costs in proportion."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import shape_outputs
from shape_outputs import SIZE, Object

from agent.common.errors import ConfigError, DatasetError
from agent.vision.boxes import iou_matrix
from agent.vision.datasets.outlines import run_lengths_of
from agent.vision.drawing import draw_points
from agent.vision.fidelity import Fidelity, fidelity
from agent.vision.policy import Policy
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.tasks.instance import Instances
from agent.vision.tasks.obb import Obb, OrientedBoxes, common_areas, corner_ious, turned
from agent.vision.tasks.opening import open_task
from agent.vision.tasks.pose import FramePoints, Poses
from engines.interface import TensorSpec

LABELS = ("car", "bus", "van")
CELLS = (16, 24)
GEOMETRY = Geometry(192, 100, 0.5, 0.5, 0, 7)  # a frame of 192 x 100 in rows 7 to 57


def spec(task: str, decoder: str = "yolov8", **changes: Any) -> ModelSpec:
    return ModelSpec.model_validate({"path": "m.onnx", "task": task, "decoder": decoder, "labels": LABELS, **changes})


def decoded(model: ModelSpec, outputs: dict[str, np.ndarray]) -> Any:
    tensors = [TensorSpec(name, each.dtype, each.shape) for name, each in outputs.items()]
    return open_task(model).open_decoder(SIZE, tensors)(outputs)


def disc(x: int, y: int, radius: int) -> np.ndarray:
    """Return a round mask, at stride 4."""
    rows, columns = np.mgrid[: CELLS[0], : CELLS[1]]
    return np.asarray((rows - y) ** 2 + (columns - x) ** 2 <= radius**2)


DISCS = [disc(5, 5, 4), disc(16, 8, 5)]
SEEN = [Object((22, 22, 40, 40), 0, 0.9, [1, 0]), Object((66, 34, 48, 48), 2, 0.8, [0, 1])]


def instances(decoder: str = "yolov8", masks: Any = DISCS, objects: Any = SEEN) -> Instances:
    table = shape_outputs.outputs(decoder, objects, len(masks))
    found = decoded(spec("instance", decoder), {**table, **shape_outputs.prototypes(masks)})
    assert isinstance(found, Instances)
    return found


def points(x: float, y: float, side: float, count: int = 5) -> np.ndarray:
    """Return key points on a circle, all of them seen."""
    turns = np.arange(count) * (2 * np.pi / count)
    return np.stack((x + side / 2 * np.cos(turns), y + side / 2 * np.sin(turns), np.full(count, 0.9)), axis=1)


PEOPLE = [points(22, 22, 30), points(66, 34, 40)]


def poses(decoder: str = "yolov8", people: Any = PEOPLE, values: int = 3) -> Poses:
    objects = [
        Object(each.box, each.class_id, each.score, person[:, :values].ravel().tolist())
        for each, person in zip(SEEN, people, strict=True)
    ]
    model = spec("pose", decoder, keypoints=5)
    found = decoded(model, shape_outputs.outputs(decoder, objects, 5 * values))
    assert isinstance(found, Poses)
    return found


def oriented(decoder: str = "yolov8", angles: Any = (0.3, -1.2), objects: Any = SEEN, **changes: Any) -> OrientedBoxes:
    turned_by = [
        Object((*each.box[:2], each.box[2], each.box[3] / 2), each.class_id, each.score, [angle])
        for each, angle in zip(objects, angles, strict=True)
    ]
    table = shape_outputs.outputs(decoder, turned_by, 1, has_centres=True)
    found = decoded(spec("obb", decoder, **changes), table)
    assert isinstance(found, OrientedBoxes)
    return found


@pytest.mark.parametrize("decoder", ["yolov5", "yolov8", "end2end"])
def test_masks_of_every_export_are_the_objects(decoder: str) -> None:
    found = instances(decoder)
    assert found.classes.tolist() == [0, 2]
    for index, mask in enumerate(DISCS):
        np.testing.assert_array_equal(found.mask(index), mask)


@pytest.mark.parametrize("decoder", ["yolov8", "end2end"])
@pytest.mark.parametrize("values", [2, 3])
def test_key_points_of_every_export_are_the_objects(decoder: str, values: int) -> None:
    found = poses(decoder, values=values)
    np.testing.assert_allclose(found.points[..., :2], np.stack(PEOPLE)[..., :2], atol=1e-4)
    assert found.seen.all()


@pytest.mark.parametrize("decoder", ["yolov8", "end2end"])
def test_oriented_boxes_of_every_export_are_the_objects(decoder: str) -> None:
    found = oriented(decoder)
    for each, angle, corners in zip(SEEN, (0.3, -1.2), found.corners, strict=True):
        expected = cv2.boxPoints((each.box[:2], (each.box[2], each.box[3] / 2), np.degrees(angle)))
        assert corner_ious(corners[np.newaxis], np.asarray(expected, np.float32)[np.newaxis])[0, 0] == pytest.approx(
            1.0, abs=1e-3
        )


def test_heatmaps_and_landmarks_are_the_points_of_one_object() -> None:
    person = points(48, 32, 40)
    maps = np.zeros((1, 5, *CELLS), np.float32)
    for number, (x, y, _) in enumerate(person):
        maps[0, number, int(y / 4), int(x / 4)] = 4.0
    for output in (maps, np.ascontiguousarray(maps.transpose(0, 2, 3, 1))):
        found = decoded(spec("pose", "heatmaps", keypoints=5), {"maps": output})
        assert np.abs(found.points[0, :, :2] - person[:, :2]).max() <= 2.0
        assert (found.is_one, found.fidelity(found)) == (True, 1.0)
    rows = np.hstack((person[:, :2], np.zeros((5, 1)), np.full((5, 1), 3.0), np.zeros((5, 1)))).astype(np.float32)
    rows[4, 3] = -3.0
    world = np.zeros((1, 15), np.float32)
    found = decoded(spec("pose", "landmarks", keypoints=5), {"points": rows.reshape(1, -1), "world": world})
    np.testing.assert_allclose(found.points[0, :, :2], person[:, :2], atol=1e-4)
    assert found.seen[0].tolist() == [True] * 4 + [False]


def test_points_of_one_object_cost_by_their_distance_each_its_share_at_most() -> None:
    rows = np.hstack((points(48, 32, 40)[:, :2], np.zeros((5, 1)))).astype(np.float32)
    model, alone, together = spec("pose", "landmarks", keypoints=5), list[float](), list[float]()
    reference = decoded(model, {"points": rows.reshape(1, -1)})
    for shift in (0.0, 1.0, 2.0, 4.0, 400.0):
        for losses, moving in ((alone, np.arange(5) == 2), (together, np.ones(5, np.bool_))):
            moved = rows.copy()
            moved[moving, 0] += shift
            losses.append(1.0 - decoded(model, {"points": moved.reshape(1, -1)}).fidelity(reference))
    assert alone[0] == 0.0
    assert alone[-1] == pytest.approx(0.2)
    assert np.diff(alone).min() > 0.02
    assert together == pytest.approx([5.0 * loss for loss in alone], rel=0.02)


def damaged(task: str) -> list[Any]:
    """Return the reference's answer and four with more and more harm that the boxes do not show."""
    if task == "instance":
        cut = [DISCS[1] & (np.arange(24) >= start) for start in (0, 12, 13, 15, 17)]
        return [instances(masks=[DISCS[0], each]) for each in cut]
    if task == "pose":
        moved = [[PEOPLE[0], PEOPLE[1] + np.array([[far, 0.0, 0.0]] + [[0.0] * 3] * 4)] for far in (0, 1, 2, 4, 40)]
        return [poses(people=each) for each in moved]
    return [oriented(angles=(0.3, -1.2 + turn)) for turn in (0.0, 0.05, 0.1, 0.3, 1.5)]


@pytest.mark.parametrize("task", ["instance", "pose", "obb"])
def test_harm_that_boxes_hide_costs_in_proportion(task: str) -> None:
    reference, *others = damaged(task)
    fidelities = [each.fidelity(reference) for each in (reference, *others)]
    assert fidelities == sorted(fidelities, reverse=True)
    assert len(set(fidelities)) == 5
    assert fidelities[0] == 1.0
    assert fidelities[-1] < 0.92
    missing = reference[:1]
    assert missing.fidelity(reference) == pytest.approx(2 / 3)
    assert reference.fidelity(missing) == pytest.approx(2 / 3)
    assert reference[:0].fidelity(reference) == 0.0
    assert reference[:0].fidelity(reference[:0]) == 1.0


def test_a_point_that_one_of_two_sees_is_a_miss() -> None:
    hidden = [PEOPLE[0], PEOPLE[1].copy()]
    hidden[1][2, 2] = 0.1
    reference, served = poses(), poses(people=hidden)
    assert served.fidelity(reference) == pytest.approx(0.9)
    assert reference.fidelity(served) == pytest.approx(0.9)
    assert poses(people=hidden).fidelity(served) == 1.0
    hidden[1][2, 2] = 0.45
    doubted = [person.copy() for person in hidden]
    doubted[1][2, 2] = 0.55
    assert 0.97 < poses(people=hidden).fidelity(poses(people=doubted)) < 0.99, "a fifth of a miss, of ten points"


def test_a_point_of_one_object_that_is_doubted_costs_as_far_as_scores_differ() -> None:
    logits = np.full((5, 5), 3.0, np.float32)
    logits[:, :2] = points(48, 32, 40)[:, :2]
    logits[2, 3] = 0.4
    model, losses, scores = spec("pose", "landmarks", keypoints=5, score_threshold=0.5), [], []
    reference = decoded(model, {"points": logits.reshape(1, -1)})
    for logit in (3.0, 0.1, -0.1, -1.0, -3.0):
        logits[2, 3] = logit
        served = decoded(model, {"points": logits.reshape(1, -1)})
        losses.append(1.0 - served.fidelity(reference))
        scores.append(abs(float(served.scores[0] - reference.scores[0])))
    assert losses[:2] == pytest.approx(scores[:2]), "it is seen: only the score of the whole is another"
    seen = 1.0 - (1.0 - np.array(losses)) / (1.0 - np.array(scores))
    assert np.diff(seen[1:]).min() > 0.04
    assert seen[-1] == pytest.approx(0.2)


def peaks(*heights: float, **changes: Any) -> Poses:
    """Return the pose of heatmaps with one broad peak each."""
    maps = np.zeros((1, len(heights), *CELLS), np.float32)
    for number, height in enumerate(heights):
        maps[0, number, 3:8, 3 * number : 3 * number + 5] = height
    found = decoded(spec("pose", "heatmaps", keypoints=len(heights), **changes), {"maps": maps})
    assert isinstance(found, Poses)
    return found


def test_a_point_of_one_object_is_seen_from_the_score_threshold_on() -> None:
    """Networks differ in how high their maps peak: CPM's are at some 0.3."""
    heights = (0.3, 0.2, 0.05, 0.15)
    assert peaks(*heights, score_threshold=0.1).seen.tolist() == [[True, True, False, True]]
    assert peaks(0.9, 0.35, 0.25, 0.6).seen.tolist() == [[True, True, False, True]], "0.3 without a word of the spec"
    lower = peaks(0.3, 0.2, 0.05, 0.05, score_threshold=0.1)
    missed = 2 / 3 * (1.0 - 0.1 / 4)  # 0.1 of 0.1 is a whole miss, and the score is the mean of four
    assert lower.fidelity(peaks(*heights, score_threshold=0.1)) == pytest.approx(missed)
    assert FramePoints().read_answer(FramePoints().answer_document(lower)).seen.tolist() == lower.seen.tolist()


def test_an_object_without_a_point_that_is_seen_shows_nothing() -> None:
    seen = peaks(0.9, 0.6, 0.35)
    assert peaks(0.3, 0.2, 0.25).is_empty
    unseen = dataclasses.replace(seen, points=seen.points * np.array([1.0, 1.0, 0.1], np.float32))
    assert fidelity(unseen, unseen) == Fidelity(1.0, is_empty=True)
    assert fidelity(seen, seen) == Fidelity(1.0, is_empty=False)
    assert fidelity(unseen, seen) == Fidelity(unseen.fidelity(seen), is_empty=False)
    unlabelled = FramePoints(("a", "b", "c")).read([{"class": 0, "box": [0, 0, 9, 9], "keypoints": [0.0] * 9}])
    assert seen.accuracy(unlabelled) is None


def test_an_angle_and_its_half_turn_are_one_box() -> None:
    reference = oriented(angles=(np.pi / 2 - 0.01, -np.pi / 4))
    served = oriented(angles=(-np.pi / 2 + 0.01, 3 * np.pi / 4))
    assert served.fidelity(reference) > 0.97


def test_overlap_of_oriented_boxes_is_that_of_their_areas() -> None:
    """Boxes with whole sides, whose overlap is plain, turned together and then by next to nothing against each other.

    There OpenCV's intersectConvexConvex loses up to all of the area.
    """
    generator = np.random.default_rng(0)
    ends = np.sort(generator.integers(0, 8, (2, 4000, 2, 2)), axis=2)
    ends = ends[:, (ends[:, :, 0] < ends[:, :, 1]).all(axis=(0, 2))]
    sides = np.minimum(*ends[:, :, 1]) - np.maximum(*ends[:, :, 0])
    expected = sides.clip(0).prod(axis=1)
    centres, lengths = ends.mean(axis=2), ends[:, :, 1] - ends[:, :, 0]
    angles = generator.uniform(-np.pi, np.pi, len(expected))
    for noise in (0.0, 1e-6, 1e-4):
        cos, sin = np.cos(angles), np.sin(angles)
        moved = np.stack((centres[..., 0] * cos - centres[..., 1] * sin, centres[..., 0] * sin + centres[..., 1] * cos))
        turns = angles + noise * generator.normal(size=(2, len(angles)))
        first, second = (turned(moved[:, at].T, lengths[at], turns[at]) for at in (0, 1))
        rolled = np.roll(second[:, ::-1], 1, axis=1)  # from another corner, the other way around
        assert np.abs(common_areas(first, rolled) - expected).max() < 1e-9 + 20 * noise


def test_oriented_boxes_are_suppressed_by_their_own_overlap() -> None:
    """The boxes around two narrow ones that cross are the same, but the two overlap by little."""
    twice = [Object((48, 32, 50, 16), 0, 0.9), Object((48, 32, 50, 16), 0, 0.8), Object((48, 32, 50, 16), 1, 0.7)]
    crossing = oriented(objects=twice, angles=(0.785, -0.785, 0.785))
    assert crossing.scores.tolist() == pytest.approx([0.9, 0.8, 0.7])
    same = oriented(objects=twice, angles=(0.785, 0.785, 0.785))
    assert same.scores.tolist() == pytest.approx([0.9, 0.7])
    agnostic = oriented(objects=twice, angles=(0.785, 0.785, 0.785), nms="agnostic")
    assert agnostic.scores.tolist() == pytest.approx([0.9])


@pytest.mark.parametrize("nms", ["per-class", "agnostic"])
def test_a_crowd_is_suppressed_as_one_by_one(nms: str) -> None:
    """More candidates than are compared at a time, in a narrow place."""
    rng, count = np.random.default_rng(1), 120
    sides = 20 + rng.random((count, 2), np.float32) * 60
    corners = turned(rng.random((count, 2), np.float32) * 60, sides, rng.random(count, np.float32) * 3)
    scores = np.sort(rng.random(count, np.float32))[::-1]
    crowd = OrientedBoxes.around(corners, rng.integers(0, 3, count), scores)
    overlaps = corner_ious(crowd.corners, crowd.corners) > 0.5
    if nms == "per-class":
        overlaps &= crowd.classes[:, np.newaxis] == crowd.classes
    kept: list[int] = []
    for index in range(count):
        if not overlaps[index, kept].any():
            kept.append(index)
    task = open_task(spec("obb", decoder="yolov8", nms=nms))
    assert isinstance(task, Obb)
    assert task._suppressed(crowd).scores.tolist() == scores[kept].tolist()
    assert 10 < len(kept) < 110


@pytest.mark.parametrize("answer", [instances(), poses(), oriented()], ids=["instance", "pose", "obb"])
def test_answers_come_to_the_frame_and_into_a_picture(answer: Any) -> None:
    found = answer.in_frame(GEOMETRY)
    document = found.as_dict(spec("detect"))["detections"][1]
    if isinstance(found, Instances):
        assert document["mask"]["size"] == [12, 24]
        assert sum(run_lengths_of(document["mask"]["counts"])) == 12 * 24
        assert found.mask(1).any()
    elif isinstance(found, Poses):
        np.testing.assert_allclose(found.points[1, :, :2], (PEOPLE[1][:, :2] - (0, 7)) * 2, atol=1e-3)
        assert document["keypoints"][0] == pytest.approx([172.0, 54.0, 0.9], abs=1e-2)
    else:
        np.testing.assert_allclose(found.corners, (answer.corners - (0, 7)) * 2, atol=1e-3)
        assert np.array(document["corners"]).shape == (4, 2)
    image = np.full((100, 192, 3), 99, np.uint8)
    assert (answer.drawn_into(image, GEOMETRY, spec("detect")) != 99).any()
    shown = answer.shown(Policy(classes=frozenset((2,))), "street", GEOMETRY)
    assert (shown.classes.tolist(), answer.left_out(shown)) == ([2], 1)
    assert shown.fidelity(shown) == 1.0


@pytest.mark.parametrize("width", [640, 1920, 3840])
def test_a_key_point_is_as_large_as_its_picture_asks_for(width: int) -> None:
    picture = np.zeros((width // 2, width, 3), np.uint8)
    where, seen = np.full((1, 2), width / 4, np.float32), np.ones(1, np.bool_)
    draw_points(picture, where, seen, (), 0)
    across = picture.any(axis=(0, 2)).sum()
    assert 0.009 <= across / width <= 0.012


@pytest.mark.parametrize("task", ["instance", "pose", "obb"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_outputs_of_a_broken_engine_give_a_sound_answer(task: str, value: float) -> None:
    keys: dict[str, Any] = {"keypoints": 5} if task == "pose" else {}
    table = shape_outputs.outputs("yolov8", [], {"instance": 2, "pose": 15, "obb": 1}[task])
    outputs = {**table, **(shape_outputs.prototypes(DISCS) if task == "instance" else {})}
    empty = decoded(spec(task, **keys), outputs)
    assert empty.is_empty
    for share in (0.3, 1.0):
        for output in outputs.values():
            output.ravel()[: int(output.size * share)] = value
        found = decoded(spec(task, **keys), outputs)
        assert 0.0 <= found.fidelity(empty) <= 1.0
        found.drawn_into(np.zeros((100, 192, 3), np.uint8), GEOMETRY, spec("detect"))


@pytest.mark.parametrize("task", ["detect", "instance", "pose", "obb"])
def test_an_answer_is_within_bounds_whatever_the_engine_says(task: str) -> None:
    """Scores of 7, sides below zero, a far corner, and a candidate with one value that is not finite."""
    extras: Any = {"detect": [], "instance": [1, 0], "pose": points(22, 22, 30), "obb": [0.3]}[task]
    extras = np.ravel(extras).tolist()
    far = [1e20] * len(extras) if task in ("pose", "obb") else extras
    objects = [
        Object((22, 22, -40, -40), 0, 7.0, extras),
        Object((66, 34, 1e20, 48), 2, 0.8, far),
        Object((66, 34, 48, 48), 1, 0.9, [*extras[:-1], np.nan] if extras else extras),
        Object((66, np.inf, 48, 48), 1, 0.9, extras),
    ]
    outputs = shape_outputs.outputs("yolov8", objects, len(extras))
    keys: dict[str, Any] = {"keypoints": 5} if task == "pose" else {}
    model = spec(task, nms="none", **keys)
    found = decoded(model, {**outputs, **(shape_outputs.prototypes(DISCS) if task == "instance" else {})})
    assert found.classes.tolist() == ([0, 1, 2] if task == "detect" else [0, 2])
    assert (found.scores.max(), found.scores.min()) == (1.0, np.float32(0.8))
    assert (found.boxes[:, :2] <= found.boxes[:, 2:]).all()
    places = [found.boxes, *(getattr(found, name)[..., :2] for name in ("points", "corners") if hasattr(found, name))]
    assert max(float(np.abs(each).max()) for each in places) <= 4 * max(SIZE)
    if isinstance(found, Poses):
        assert 0.0 <= found.points[..., 2].min() <= found.points[..., 2].max() <= 1.0


@pytest.mark.parametrize(("decoder", "value"), [("heatmaps", np.nan), ("heatmaps", np.inf), ("landmarks", np.nan)])
def test_a_key_point_of_one_object_that_is_not_finite_is_not_seen(decoder: str, value: float) -> None:
    rows = np.hstack((points(48, 32, 40)[:, :2], np.zeros((5, 1)), np.full((5, 2), 3.0))).astype(np.float32)
    rows[1, 0] = value
    maps = np.zeros((1, 5, *CELLS), np.float32)
    maps[0, :, 8:11, 8:11] = 1.0
    maps[0, 1, 2, 2] = value
    output = maps if decoder == "heatmaps" else rows.reshape(1, -1)
    found = decoded(spec("pose", decoder, keypoints=5), {"out": output})
    assert np.isfinite(found.points).all()
    assert np.isfinite(found.boxes).all()
    if decoder == "landmarks":
        assert found.seen[0].tolist() == [True, False, True, True, True]
    else:
        np.testing.assert_allclose(found.points[0, 1], found.points[0, 0], atol=1e-3)


def test_outputs_that_do_not_fit_are_refused() -> None:
    table = shape_outputs.outputs("yolov8", SEEN, 2)
    with pytest.raises(ConfigError, match=r"decoder\.shape: .*mask prototypes"):
        decoded(spec("instance"), table)
    with pytest.raises(ConfigError, match=r"decoder\.shape: .*17 or 22"):
        decoded(spec("pose", keypoints=5), table)
    with pytest.raises(ConfigError, match=r"decoder\.shape: .*5 heatmaps"):
        decoded(spec("pose", "heatmaps", keypoints=5), table)


def labelled(folder: Path, rows: list[str]) -> Path:
    (folder / "images").mkdir()
    (folder / "labels").mkdir()
    for number in range(2):
        cv2.imwrite(str(folder / f"images/{number}.png"), np.zeros((*SIZE, 3), np.uint8))
        (folder / f"labels/{number}.txt").write_text("\n".join(rows))
    return folder


def fractions(places: Any) -> str:
    return " ".join(f"{x / SIZE[1]:.6f} {y / SIZE[0]:.6f}" for x, y in places)


def rows_of(task: str) -> list[str]:
    if task == "instance":
        masks = [cv2.resize(each.astype(np.float32), SIZE[::-1]) > 0.5 for each in DISCS]
        outlines = [cv2.findContours(each.astype(np.uint8), 0, cv2.CHAIN_APPROX_NONE)[0][0][:, 0] for each in masks]
        return [f"{kind} {fractions(each + 0.5)}" for kind, each in zip((0, 2), outlines, strict=True)]
    if task == "obb":
        return [f"{kind} {fractions(each)}" for kind, each in zip((0, 2), oriented().corners, strict=True)]
    boxes = [fractions((each.box[:2], each.box[2:])) for each in SEEN]
    people = [" ".join(f"{fractions([point[:2]])} 2" for point in each) for each in PEOPLE]
    return [f"{kind} {box} {person}" for kind, box, person in zip((0, 2), boxes, people, strict=True)]


@pytest.mark.parametrize(("task", "answer"), [("instance", instances()), ("pose", poses()), ("obb", oriented())])
def test_right_answers_score_one_and_wrong_shapes_less(task: str, answer: Any, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"keypoints": 5} if task == "pose" else {}
    opened = open_task(spec(task, **keys))
    images = opened.labelled_images(labelled(tmp_path, rows_of(task)))
    truths = [truth for _, truth in images]
    right = opened.evaluation([(answer, truth) for truth in truths])
    worst = damaged(task)[-1]
    wrong = opened.evaluation([(answer, truths[0]), (worst, truths[1])])
    assert (right.task, right.images) == (task, 2)
    assert right.scores["map50"] == pytest.approx(1.0)
    assert wrong.scores["map"] < right.scores["map"] - 0.05
    assert right.scores["map"] > (0.7 if task == "instance" else 0.99)  # masks of 24 x 16 cells
    (tmp_path / "labels/0.txt").write_text("0 0.5 0.5 0.2")
    with pytest.raises(DatasetError, match=r"dataset\.label"):
        list(opened.labelled_images(tmp_path))


@pytest.mark.parametrize("task", ["instance", "pose", "obb"])
@pytest.mark.parametrize(
    "harm",
    [
        {"segmentation": [[1, 2, 3]], "keypoints": [1, 2]},
        {"segmentation": {"size": [64, 96], "counts": [1 << 40]}, "keypoints": [1e300] * 15},
        {"segmentation": {"size": [64, 96], "counts": "o" * 100_000}, "keypoints": {"a": 1}},
    ],
)
def test_coco_shapes_that_are_none_are_refused_and_boxes_still_count(task: str, harm: Any, tmp_path: Path) -> None:
    coco_of(tmp_path, [{"category_id": 1, "bbox": [2, 2, 40, 40], **harm}])
    keys: dict[str, Any] = {"keypoints": 5} if task == "pose" else {}
    opened = open_task(spec(task, **keys))
    answer = {"instance": instances, "pose": poses, "obb": oriented}[task]()
    with pytest.raises(DatasetError, match=r"dataset\.label"):
        opened.evaluation((answer, truth) for _, truth in opened.labelled_images(tmp_path))
    ((_, boxes),) = open_task(spec("detect")).labelled_images(tmp_path)
    assert len(boxes) == 1


@pytest.mark.parametrize(("beyond", "is_label"), [(0.4, True), (0.7, False)])
def test_an_oriented_box_may_reach_half_a_picture_beyond_it(beyond: float, is_label: bool, tmp_path: Path) -> None:
    outline = [10.0, -beyond * SIZE[0], 30.0, -beyond * SIZE[0], 30.0, 20.0, 10.0, 20.0]
    coco_of(tmp_path, [{"category_id": 1, "bbox": [10, 0, 20, 20], "segmentation": [outline]}])
    opened = open_task(spec("obb"))
    corners = np.array(outline, np.float32).reshape(1, 4, 2)
    answer = OrientedBoxes.around(corners, np.zeros(1, np.int64), np.ones(1, np.float32))
    answered = ((answer, truth) for _, truth in opened.labelled_images(tmp_path))
    if is_label:
        assert opened.evaluation(answered).scores["map"] == pytest.approx(1.0)
    else:
        with pytest.raises(DatasetError, match=r"dataset\.label"):
            opened.evaluation(answered)


def test_an_object_without_a_cell_is_none() -> None:
    assert len(instances(masks=[DISCS[0], np.zeros(CELLS, np.bool_)])) == 1


def coco_of(folder: Path, annotations: list[dict[str, Any]]) -> Path:
    cv2.imwrite(str(folder / "a.png"), np.zeros((*SIZE, 3), np.uint8))
    document = {
        "images": [{"id": 1, "file_name": "a.png", "width": SIZE[1], "height": SIZE[0]}],
        "categories": [{"id": 1, "name": "car"}, {"id": 3, "name": "van"}],
        "annotations": [{"id": at, "image_id": 1, "iscrowd": 0, **each} for at, each in enumerate(annotations, 1)],
    }
    (folder / "instances.json").write_text(json.dumps(document))
    return folder


def test_oriented_boxes_in_a_crowd_do_not_count(tmp_path: Path) -> None:
    """The crowd is a mask over the whole picture, and the one object is found."""
    found = oriented()
    corners = found.corners[0].ravel().tolist()
    crowd = {"size": list(SIZE), "counts": [0, SIZE[0] * SIZE[1]]}
    whole = [0, 0, SIZE[1], SIZE[0]]
    truth = [
        {"category_id": 1, "bbox": [2, 2, 40, 40], "segmentation": [corners]},
        {"category_id": 3, "bbox": whole, "segmentation": crowd, "iscrowd": 1, "area": SIZE[0] * SIZE[1]},
    ]
    task = open_task(spec("obb"))
    ((_, label),) = task.labelled_images(coco_of(tmp_path, truth))
    assert task.evaluation([(found, label)]).scores["map50"] == pytest.approx(1.0)


def test_persons_without_a_labelled_point_do_not_count(tmp_path: Path) -> None:
    task = open_task(spec("pose", keypoints=5))
    truth = [
        {"category_id": 1, "bbox": [2, 2, 40, 40], "keypoints": [0] * 15},
        {"category_id": 1, "bbox": [2, 2, 9, 9]},
    ]
    ((_, label),) = task.labelled_images(coco_of(tmp_path, truth))
    with pytest.raises(DatasetError, match=r"dataset\.empty"):
        task.evaluation([(poses(), label)])


def test_an_own_decoder_with_fewer_shapes_than_boxes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = instances()
    short = dataclasses.replace(found, masks=found.masks[:1])
    monkeypatch.setattr("agent.vision.tasks.detect.import_decoder", lambda _: lambda *_: short)
    with pytest.raises(ConfigError, match=r"decoder\.result"):
        decoded(spec("instance", "mine:decode"), {"output0": np.zeros((1, 4), np.float32)})


@pytest.mark.parametrize(
    ("model", "reference", "served"),
    [
        (spec("instance"), instances(), instances(masks=[disc(6, 5, 4), disc(16, 8, 5)])),
        (spec("pose", keypoints=5), poses(), poses(people=[points(24, 22, 30), PEOPLE[1]])),
    ],
)
def test_shapes_that_move_in_boxes_that_stay_diverge(model: ModelSpec, reference: Any, served: Any) -> None:
    missed = np.square(1.0 - np.diag(served.overlaps(reference)))
    diverged = open_task(model).divergence((served, served), (reference, reference))
    assert diverged == pytest.approx(missed.mean())
    assert missed.max() > 0.01


@pytest.mark.parametrize("turn", [0.0, 0.3, -1.1])
def test_boxes_without_an_area_overlap_their_equals_alone(turn: float) -> None:
    rng = np.random.default_rng(3)
    centres, angles = rng.random((300, 2)).astype(np.float32) * 100 + 50, rng.random(300).astype(np.float32) * 3
    flat, solid = np.full((300, 2), (40, 0), np.float32), np.full((300, 2), (40, 20), np.float32)
    lines = turned(centres, flat, angles + np.float32(turn))
    boxes, crossing = turned(centres, solid, angles), turned(centres, flat, angles + np.float32(1.0))
    for served, reference in ((lines, boxes), (boxes, lines), (lines, crossing)):
        assert np.diag(corner_ious(served, reference)).max() == 0.0
    np.testing.assert_array_equal(np.diag(corner_ious(lines, lines)), 1.0)


def crowd(task: str, count: int) -> Any:
    """Return so many objects of a task, all of which overlap many others, each with a score of its own."""
    rng = np.random.default_rng(count)
    corners = rng.random((count, 2)).astype(np.float32) * 30
    boxes = np.hstack((corners, corners + 40))
    common: dict[str, Any] = {
        "boxes": boxes,
        "classes": np.zeros(count, np.int64),
        "scores": np.linspace(0.9, 0.4, count).astype(np.float32),
    }
    if task == "instance":
        masks = rng.integers(0, 256, (count, 16, 3), np.uint8)
        return Instances(**common, masks=masks, columns=24, covered=SIZE)
    if task == "pose":
        places = np.dstack((rng.random((count, 5, 2)) * 40 + corners[:, np.newaxis], np.ones((count, 5, 1))))
        return Poses(**common, points=places.astype(np.float32), sigmas=(0.05,) * 5)
    found = turned(corners + 20, np.full((count, 2), 40, np.float32), rng.random(count).astype(np.float32))
    return OrientedBoxes.around(found, common["classes"], common["scores"])


@pytest.mark.parametrize("task", ["instance", "pose", "obb"])
def test_a_crowd_is_compared_by_its_nearest_boxes_and_few_objects_all_with_all(task: str) -> None:
    many, few = crowd(task, 400), crowd(task, 100)
    overlaps = many.overlaps(many)
    assert np.count_nonzero(overlaps) <= 128**2 < np.count_nonzero(iou_matrix(many.boxes, many.boxes))
    np.testing.assert_allclose(np.diag(overlaps), 1.0, rtol=1e-5)
    assert many.fidelity(many) == pytest.approx(1.0)
    assert {served for _, served in many.pairs(many)} == {0}
    assert few.overlaps(few)[3, 60] == pytest.approx(few[3:4].overlaps(few[60:61])[0, 0])
    some = np.isin(np.arange(400), (3, 60))
    compared, alone = many.overlaps(many[some]), many[some].overlaps(many[some])
    np.testing.assert_allclose(compared[some], alone)
