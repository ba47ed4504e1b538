"""The sample's truth, pixel by pixel and object by object, and the heads that learnt it."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest

from agent.vision.evaluation import evaluate
from agent.vision.spec import load_model_spec
from engines.registry import open_backend
from examples.street import view
from examples.street.labelled import TASKS, write_labelled
from examples.street.scene import Frame, Street
from examples.street.truth import NOT_COUNTED, SURFACES, Object, Truth, hung_askew, oriented_box, truth_at

STREET = Path(view.__file__).parent
VEHICLE, PEDESTRIAN = SURFACES.index("vehicle"), SURFACES.index("pedestrian")
SEED, TIMES = 11, tuple(7.0 * step for step in range(6))
# What each head reaches at least on four pictures.
FLOORS = {"segment": 0.8, "instance": 0.28, "pose": 0.45, "obb": 0.4, "depth": 0.95}

Seen = list[tuple[Frame, Truth]]


@pytest.fixture(scope="module")
def seen() -> Seen:
    street = Street(SEED, 60.0)
    return [(street.frame(ts, 9.0), truth_at(street, ts)) for ts in TIMES]


@pytest.fixture(scope="module")
def objects(seen: Seen) -> list[Object]:
    return [each for _, truth in seen for each in truth.objects]


def test_objects_are_those_that_a_frame_labels(seen: Seen) -> None:
    assert all([each.label for each in truth.objects] == frame.labels for frame, truth in seen)


def test_a_mask_is_the_share_of_its_silhouette_that_the_label_says(objects: list[Object]) -> None:
    whole = [each for each in objects if _is_whole(each)]
    assert len(whole) > 10
    for each in whole:
        assert each.mask.sum() / each.silhouette.sum() == pytest.approx(each.label.visible, abs=0.03)


def test_a_mask_is_in_its_box_and_masks_are_apart(seen: Seen) -> None:
    for _, truth in seen:
        assert np.sum([each.mask for each in truth.objects], axis=0).max() == 1
        for each in truth.objects:
            x1, y1, x2, y2 = map(int, each.label.box)
            assert each.mask[y1:y2, x1:x2].sum() == each.mask.sum()


def test_classes_are_of_the_objects_that_masks_show(seen: Seen) -> None:
    for _, truth in seen:
        for each in truth.objects:
            assert set(truth.classes[each.mask].tolist()) == {(VEHICLE, PEDESTRIAN)[each.label.class_id]}
    shown = set(np.unique([truth.classes for _, truth in seen]).tolist())
    assert shown == {*range(len(SURFACES)), NOT_COUNTED}


def test_key_points_lie_in_their_vehicle_one_ahead_of_the_other(objects: list[Object]) -> None:
    vehicles = [each for each in objects if len(each.key_points) and _is_whole(each)]
    assert len(vehicles) > 5
    for each in vehicles:
        x1, y1, x2, y2 = each.label.box
        points, seen = each.key_points[:, :2], each.key_points[:, 2]
        assert ((points >= (x1 - 1, y1 - 1)) & (points <= (x2 + 1, y2 + 1))).all()
        rear, front, tail_lamp, headlamp, roof_rear, roof_front = points
        ahead = np.sign(front[0] - rear[0])
        assert ahead * (headlamp[0] - front[0]) > 0 < ahead * (rear[0] - tail_lamp[0])
        assert ahead * (roof_front[0] - roof_rear[0]) > 0
        assert max(roof_front[1], roof_rear[1]) < min(front[1], rear[1])
        if each.label.visible == 1.0:
            assert (seen == 2).all()


def test_every_pixel_but_the_sky_has_a_distance(seen: Seen) -> None:
    for _, truth in seen:
        assert (truth.depth > 5.0).all()
        np.testing.assert_array_equal(np.isinf(truth.depth), truth.classes == SURFACES.index("sky"))


def test_an_object_is_as_far_as_the_ground_that_it_stands_on(seen: Seen) -> None:
    empty = truth_at(Street(SEED, 0.0), 1e4).depth
    for _, truth in seen:
        for each in filter(_is_whole, truth.objects):
            rows, columns = np.nonzero(each.silhouette)
            lowest = int(rows.argmax())
            place = rows[lowest], columns[lowest]
            if each.mask[place]:
                assert truth.depth[place] == pytest.approx(empty[place], rel=0.02)


def test_the_depth_of_the_road_is_where_the_road_is(seen: Seen) -> None:
    """Back in the street, a pixel of the road is at height zero."""
    _, truth = seen[0]
    ground_x, ground_z, *_ = view.ground_and_facade(1)
    road = truth.classes == SURFACES.index("road")
    places = np.stack((ground_x[road], np.zeros(road.sum()), ground_z[road]), axis=1)
    np.testing.assert_allclose(truth.depth[road], view.depth(places), rtol=1e-5)


def test_a_box_that_is_turned_with_its_mask_keeps_its_sides() -> None:
    mask = np.zeros((200, 300), np.uint8)
    tilt = math.radians(20.0)
    corners = cv2.boxPoints(((150.0, 100.0), (120.0, 40.0), 20.0))
    cv2.fillPoly(mask, [np.rint(16 * corners).astype(np.int32)], (1,), cv2.LINE_8, 4)
    assert oriented_box(mask.astype(bool), tilt) == pytest.approx((150.5, 100.5, 122.0, 42.0), abs=1.0)


def test_a_camera_that_hangs_askew_turns_boxes_by_its_angle(seen: Seen) -> None:
    frame, truth = seen[0]
    straight, turned = (hung_askew(frame.image, truth.objects, tilt)[1] for tilt in (0.0, 0.2))
    assert len(straight) == len(truth.objects) >= len(turned) > 0
    angles = {round(box[4], 6) for _, box in straight}
    assert {round(box[4] - 0.2, 6) for _, box in turned} <= angles
    picture, _ = hung_askew(frame.image, truth.objects, 0.2)
    assert picture.shape == frame.image.shape
    assert (picture.reshape(-1, 3).max(axis=1) > 0).all(), "nothing beyond the frame is seen"


@pytest.mark.parametrize("task", TASKS)
def test_a_head_finds_what_the_truth_says(tmp_path: Path, task: str) -> None:
    spec = load_model_spec(STREET / f"street-{task}.yaml")
    folder = write_labelled(tmp_path / task, task, 4)
    with closing(open_backend("onnxruntime").load(spec.path.read_bytes())) as engine:
        score = next(iter(evaluate(engine, spec, folder).scores.values()))
    assert score > FLOORS[task]


def _is_whole(each: Object) -> bool:
    """Whether no side of an object's silhouette is at the frame's edge."""
    x1, y1, x2, y2 = each.label.box
    return x1 > 0 < y1 and x2 < view.WIDTH_PX and y2 < view.HEIGHT_PX
