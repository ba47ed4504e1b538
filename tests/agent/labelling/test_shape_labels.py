"""Masks, key points and oriented boxes go to another tool with the model's answer, come back, and are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from label_bench import CLASSES, HEIGHT, KEYS, SHAPED, WIDTH, LabelBench, tared
from pycocotools.coco import COCO
from pycocotools.mask import area

from agent.vision.detections import Detections
from agent.vision.labels import LabelError
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import label_kind

TASKS = list(SHAPED)


def exported(bench: LabelBench, *more: str) -> tuple[Path, dict[str, Any]]:
    folder = bench.folder / f"out{len(list(bench.folder.iterdir()))}"
    tared(bench, "--export", folder, *more)
    return folder / "instances.json", json.loads((folder / "instances.json").read_text())


def imported(bench: LabelBench, document: dict[str, Any], code: int = 0) -> dict[str, Any]:
    path = bench.folder / "tool.json"
    path.write_text(json.dumps(document))
    return tared(bench, "--import", path, code=code)


def scores(bench: LabelBench) -> list[tuple[float | None, float | None]]:
    """The accuracy of the reference, and of what was served, on each labelled frame."""
    frames = [frame for frame in bench.store.frames() if frame.is_labelled]
    return [(each.reference.accuracy(each.label), each.served.accuracy(each.label)) for each in frames]


@pytest.mark.parametrize("task", TASKS)
def test_the_models_answer_goes_out_and_comes_back_as_itself(tmp_path: Path, task: str) -> None:
    bench = LabelBench(tmp_path, task, 2)
    path, document = exported(bench)
    read = COCO(path)
    for annotation in document["annotations"]:
        if "segmentation" in annotation:
            assert area(read.annToRLE(annotation)) == pytest.approx(annotation["area"], rel=0.05)
    assert len(document["annotations"]) == 4
    counts = {"labelled": 2, "replaced": 0, "unchanged": 0, "nothing": 0, "unknown": 0}
    assert imported(bench, document) == counts
    # The served answer has the first of two objects as another class, and the second a pixel wider.
    expected = {"segment": 1 / 3, "pose": 0.437}.get(task, 0.5)
    assert [each for pair in scores(bench) for each in pair] == pytest.approx([1.0, expected] * 2, abs=0.03)
    assert all(frame.suggested for frame in bench.store.frames())
    again = exported(bench, "--all")[1]
    assert again["annotations"] == document["annotations"]
    assert imported(bench, again)["unchanged"] == 2


def without_one(annotations: list[dict[str, Any]], shape: str) -> float:
    """Remove the second object: of the reference's two one is false; PQ 2 / 3, and one class of two in a map."""
    del annotations[1], shape
    return 2 / 3


def shifted(annotations: list[dict[str, Any]], shape: str) -> float:
    """Move what is labelled of the second object far away: PQ 1 / 2."""
    if shape == "keypoints":
        annotations[1]["keypoints"] = [150, 110, 2, 155, 115, 2, 0, 0, 0]
    else:
        annotations[1]["segmentation"] = [[120, 80, 150, 80, 150, 100, 120, 100]]
        annotations[1]["bbox"] = [120, 80, 30, 20]
    return 0.5


@pytest.mark.parametrize("edit", [without_one, shifted])
@pytest.mark.parametrize("task", TASKS)
def test_an_edited_label_gives_its_figure(
    tmp_path: Path, task: str, edit: Callable[[list[dict[str, Any]], str], float]
) -> None:
    bench = LabelBench(tmp_path, task, 1)
    document = exported(bench)[1]
    expected = edit(document["annotations"], label_kind(task).example.split('"')[3])
    assert imported(bench, document)["labelled"] == 1
    ((accuracy, _),) = scores(bench)
    assert accuracy == pytest.approx(0.5 if task == "segment" else expected, abs=1e-6)


def test_a_mask_that_lacks_a_quarter_has_the_iou_of_three_quarters(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "instance", 1)
    document = exported(bench)[1]
    left, top, width, height = document["annotations"][0]["bbox"]
    right, middle, bottom = left + width * 0.75, top + height, top
    cut = [left, top, right, bottom, right, middle, left, middle]
    document["annotations"][0] |= {"segmentation": [cut], "bbox": [left, top, width * 0.75, height]}
    imported(bench, document)
    ((accuracy, _),) = scores(bench)
    whole, corner = width * height, 8.0 * 8.0  # which the mask lacks, and lies in the part that is cut off
    assert accuracy == pytest.approx((0.75 * whole / (whole - corner) + 1.0) / 2.0, abs=0.03)


def test_cvat_turns_a_box_by_an_attribute_and_other_tools_write_four_points(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "obb", 1)
    document = exported(bench)[1]
    degrees = math.degrees(0.5)
    for annotation in document["annotations"]:
        annotation["segmentation"] = []
    document["annotations"][0] |= {"bbox": [40, 45, 60, 30], "attributes": {"occluded": False, "rotation": degrees}}
    document["annotations"][1] |= {"bbox": [2, 6.5, 18, 9]}  # upright
    imported(bench, document)
    assert scores(bench)[0][0] == pytest.approx(1.0, abs=1e-3)


def test_key_points_without_a_label_do_not_count_and_hidden_ones_do(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "pose", 1)
    document = exported(bench)[1]
    for annotation, first in zip(document["annotations"], ([40, 30, 2], [2, 2, 2]), strict=True):
        annotation["keypoints"] = [*first, 0, 0, 0, 0, 0, 0]
    imported(bench, document)
    assert scores(bench)[0][0] == 1.0
    document["annotations"][0]["keypoints"] = [40, 30, 2, 0, 0, 0, 70, 60, 1]  # the third has a score of 0.1
    imported(bench, document)
    assert scores(bench)[0][0] == 1.0
    document["annotations"][0]["keypoints"] = [40, 30, 2, 0, 0, 0, 159, 119, 1]
    imported(bench, document)
    assert scores(bench)[0][0] == pytest.approx(0.75, abs=0.01)


def test_masks_that_cvat_writes_as_crowds_are_objects(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "instance", 1)
    document = exported(bench)[1]
    for annotation in document["annotations"]:
        annotation["iscrowd"] = 1
    imported(bench, document)
    assert scores(bench)[0][0] == 1.0


def test_nothing_found_where_nothing_is_has_no_score_and_is_no_error(tmp_path: Path) -> None:
    for task in TASKS:
        (tmp_path / task).mkdir()
        bench = LabelBench(tmp_path / task, task, 2)
        kind = bench.store.kind
        truth = kind.read([], (), (HEIGHT, WIDTH))
        assert kind.is_nothing(truth)
        assert kind.document(truth) == []
        (frame, _) = bench.store.frames()
        assert frame.reference.accuracy(truth) == 0.0
        assert not frame.reference.hits(truth).right.any()
        bench.store.label(frame.id, truth)
        assert tared(bench, "--list")["labelled"] == 1


RLE = {"size": [HEIGHT, WIDTH], "counts": [0, HEIGHT * WIDTH]}
DAMAGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "runs that do not fit": ("instance", {"segmentation": {"size": [HEIGHT, WIDTH], "counts": [5]}}, "00000001.jpg"),
    "runs of another size": ("segment", {"segmentation": {"size": [9, 9], "counts": [0, 81]}}, "120 x 160"),
    "an empty mask": ("instance", {"segmentation": {"size": [HEIGHT, WIDTH], "counts": [19200]}}, "without a pixel"),
    "a polygon of two points": ("segment", {"segmentation": [[1, 1, 2, 2]]}, "polygons of 3"),
    "no outline": ("instance", {"segmentation": []}, "polygons"),
    "a polygon far away": ("instance", {"segmentation": [[1, 1, 5000, 2, 3, 3]]}, "polygons of 3"),
    "a key point beyond the picture": ("pose", {"keypoints": [1, 1, 2, 200, 5, 2, 0, 0, 0]}, "160 x 120"),
    "two key points": ("pose", {"keypoints": [1, 1, 2, 20, 5, 2]}, "3x3"),
    "no key points": ("pose", {"keypoints": None}, "numbers"),
    "an unknown visibility": ("pose", {"keypoints": [1, 1, 7, 20, 5, 2, 0, 0, 0]}, "visibility"),
    "corners on one line": ("obb", {"segmentation": [[1, 1, 5, 1, 9, 1, 12, 1]]}, "an area"),
    "corners that are no numbers": ("obb", {"segmentation": [["a", 1, 5, 1, 9, 1, 12, 1]]}, "corners"),
    "a real crowd": ("obb", {"segmentation": [[1, 1, 9, 1, 9, 9, 1, 9]], "iscrowd": 1}, "crowd"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_shape_is_refused_with_its_place_and_no_label_is_lost(tmp_path: Path, fault: str) -> None:
    task, change, named = DAMAGE[fault]
    bench = LabelBench(tmp_path, task, 2)
    document = exported(bench)[1]
    bench.store.label(2, bench.store.kind.read([]))
    document["annotations"][0] |= change
    error = imported(bench, document, code=2)["error"]
    assert named in str(error)
    assert [frame.is_labelled for frame in bench.store.frames()] == [False, True]


@pytest.mark.parametrize("task", ["detect", *TASKS])
def test_labels_of_another_task_are_refused(task: str) -> None:
    keys = {**KEYS[task], "task": task, "path": "m.onnx"} if task in KEYS else {"task": task, "path": "m.onnx"}
    kind = label_kind(task).fitted(ModelSpec.model_validate(keys))
    own = kind.example.split('"')[3]
    shapes = {
        "box": [1, 1, 9, 9],
        "outline": [[1, 1, 9, 1, 9, 9]],
        "keypoints": [1, 1, 2, 3, 3, 2, 0, 0, 0],
        "corners": [[1, 1], [9, 1], [9, 9], [1, 9]],
    }
    for key, shape in shapes.items():
        document = [{"class": 0, key: shape}]
        if key == own:
            assert len(kind.read(document, ("cat",), (HEIGHT, WIDTH))) == 1
        else:
            with pytest.raises(LabelError) as refused:
                kind.read(document, ("cat",), (HEIGHT, WIDTH))
            assert refused.value.code == "labels.task"
    with pytest.raises(LabelError):
        kind.read(3, ("cat",))


def test_a_model_of_one_pose_takes_one_object() -> None:
    keys = {"path": "m.onnx", "task": "pose", "decoder": "heatmaps", "keypoints": 2}
    kind = label_kind("pose").fitted(ModelSpec.model_validate(keys))
    each = {"class": 0, "keypoints": [1, 1, 2, 9, 9, 2]}
    assert kind.read([each]).boxes.tolist() == [[1, 1, 9, 9]]
    with pytest.raises(LabelError, match="2 objects"):
        kind.read([each, each])


NUMBERS = st.sampled_from([0, 1, 2, 9.5, 60, -7, 159, 160, 10**400, math.nan, math.inf, True, None, "1"]) | st.floats()
LISTS = st.lists(NUMBERS, max_size=12) | st.lists(st.lists(NUMBERS, max_size=9), max_size=5)
RUNS = st.lists(st.integers(-3, HEIGHT * WIDTH), max_size=6)
SOUND = st.lists(st.integers(0, 3000), max_size=6).map(lambda runs: [*runs, HEIGHT * WIDTH - sum(runs)])
MASKS = st.fixed_dictionaries(
    {"size": st.just([HEIGHT, WIDTH]) | LISTS, "counts": RUNS | SOUND | st.text("0159o", max_size=9)}
)
OBJECTS = st.fixed_dictionaries(
    {"class": st.integers(0, 5) | NUMBERS},
    optional={"outline": LISTS | MASKS, "keypoints": LISTS, "corners": LISTS, "box": LISTS},
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(TASKS), st.lists(OBJECTS, max_size=3) | NUMBERS, st.booleans())
def test_a_label_can_be_compared_and_kept_or_is_refused(task: str, document: Any, is_size_known: bool) -> None:
    boxes = np.array([[40, 30, 100, 90], [2, 2, 20, 20]], np.float32)
    found = Detections(boxes=boxes, classes=np.array([0, 3]), scores=np.array([0.75, 0.5], np.float32))
    served = SHAPED[task](found)
    kind = label_kind(task).fitted(ModelSpec.model_validate({"path": "m.onnx", "task": task, **KEYS.get(task, {})}))
    try:
        truth = kind.read(document, CLASSES, (HEIGHT, WIDTH) if is_size_known else None)
    except LabelError:
        return
    accuracy = served.accuracy(truth)
    assert accuracy is not None
    assert 0.0 <= accuracy <= 1.0
    assert served.hits(truth).counts.true_positives <= 2
    kept = kind.read(json.loads(json.dumps(kind.document(truth), allow_nan=False)))
    assert kind.is_same(kept, truth)
    assert served.accuracy(kept) == pytest.approx(accuracy, abs=0.02)


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_is_kept_as_it_was(tmp_path: Path, task: str) -> None:
    bench = LabelBench(tmp_path, task, 1)
    (frame,) = bench.store.frames()
    given = bench._answer(0)
    kept = frame.reference
    for name, value in vars(given).items():
        assert np.allclose(vars(kept)[name], value, rtol=0.0, atol=0.01), name
    assert frame.reference.fidelity(given) == pytest.approx(1.0, abs=1e-3)
