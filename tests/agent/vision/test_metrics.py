from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from agent.common.errors import DatasetError
from agent.vision.datasets.labelled_images import LabelledObjects, object_images
from agent.vision.detections import Detections
from agent.vision.evaluation import evaluate
from agent.vision.spec import ModelSpec
from agent.vision.tasks.average_precision import AveragePrecision
from engines.interface import Array, TensorSpec


def found_at(boxes: Sequence[tuple[float, ...]], classes: list[int], scores: list[float]) -> Detections:
    return Detections(
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        classes=np.array(classes, np.int64),
        scores=np.array(scores, np.float32),
    )


def truth_at(boxes: list[tuple[float, ...]], classes: list[int]) -> LabelledObjects:
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    areas = (corners[:, 2:] - corners[:, :2]).prod(axis=1).astype(np.float64)
    crowds = np.zeros(len(corners), np.bool_)
    return LabelledObjects(boxes=corners, classes=np.array(classes, np.int64), areas=areas, crowds=crowds)


def test_classes_that_never_occur_do_not_count_and_missed_ones_do(capfd: pytest.CaptureFixture[str]) -> None:
    precision = AveragePrecision()
    precision.add(
        found_at([(0, 0, 10, 10), (0, 0, 10, 10)], [0, 1], [0.5, 0.9]), truth_at([(0, 0, 10, 10)] * 2, [0, 4])
    )
    mean = precision.mean()
    assert mean is not None
    assert mean.scores["map"] == pytest.approx(0.5)
    assert [(each.class_id, each.value, each.count) for each in mean.by_class] == [
        (0, pytest.approx(1.0), 1),
        (4, 0.0, 1),
    ]
    assert mean.by_size == {"small": mean.scores["map"], "medium": None, "large": None}
    assert capfd.readouterr().out == ""  # it may be JSON


def random_set(folder: Path, generator: np.random.Generator) -> tuple[Path, Path]:
    """Write COCO's JSON and a detector's results, with crowds, empty images and more than 100 detections."""
    categories = [{"id": number, "name": name} for number, name in ((3, "a"), (7, "b"), (90, "c"))]
    images, annotations, results = [], list[dict[str, Any]](), []
    for number in range(6):
        name = f"{number}.png"
        cv2.imwrite(str(folder / name), np.zeros((200, 300, 3), np.uint8))
        images.append({"id": 10 * number + 5, "file_name": name, "width": 300, "height": 200})
        corners = generator.integers(0, 60, (8, 2))
        boxes = np.hstack((corners, generator.integers(4, 130, (8, 2)))).tolist()
        for box in boxes if number else []:
            category, crowd = int(generator.choice([3, 7, 90])), int(generator.random() < 0.15)
            row = {"image_id": 10 * number + 5, "category_id": category, "bbox": box, "iscrowd": crowd}
            annotations.append({"id": len(annotations) + 1, "area": 0.7 * box[2] * box[3], **row})
        for count in range(330 if number == 1 else 20):
            box = np.array(boxes[count % 8]) + generator.integers(-3, 4, 4) * (count % 3)
            row = {"image_id": 10 * number + 5, "category_id": int(generator.choice([3, 7, 90]))}
            results.append({**row, "bbox": np.maximum(box, 1).tolist(), "score": float(np.float32(generator.random()))})
    truth, found = folder / "instances_test.json", folder / "found.json"
    truth.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    found.write_text(json.dumps(results))
    return truth, found


@pytest.mark.parametrize("seed", range(4))
def test_map_is_that_of_coco_s_own_tools(tmp_path: Path, seed: int) -> None:
    truth, found = random_set(tmp_path, np.random.default_rng(seed))
    with redirect_stdout(None):
        coco = COCO(str(truth))
        expected = COCOeval(coco, coco.loadRes(str(found)), "bbox")
        expected.evaluate()
        expected.accumulate()
        expected.summarize()
    results, precision = json.loads(found.read_text()), AveragePrecision()
    numbers = {3: 0, 7: 1, 90: 2}
    for number, (_, objects) in enumerate(object_images(truth)):
        rows = [row for row in results if row["image_id"] == 10 * number + 5]
        boxes = [(x, y, x + width, y + height) for x, y, width, height in (row["bbox"] for row in rows)]
        classes, scores = [numbers[row["category_id"]] for row in rows], [row["score"] for row in rows]
        precision.add(found_at(boxes, classes, scores), objects)
    mean = precision.mean()
    assert mean is not None
    sizes = [-1.0 if value is None else value for value in mean.by_size.values()]
    assert [*mean.scores.values(), *sizes] == pytest.approx(expected.stats[[0, 1, 3, 4, 5]].tolist(), abs=1e-9)
    by_class = expected.eval["precision"][:, :, :, 0, -1].mean(axis=(0, 1))
    assert [each.value for each in mean.by_class] == pytest.approx(by_class.tolist(), abs=1e-9)
    assert sum(each.count for each in mean.by_class) == sum(not each["iscrowd"] for each in coco.anns.values())


class Oracle:
    """A classifier of solid images: the class is the brightness."""

    inputs = (TensorSpec("x", np.dtype(np.float32), (1, 3, 8, 8)),)
    outputs = (TensorSpec("y", np.dtype(np.float32), (1, 3)),)

    def infer(self, batch: Array) -> dict[str, Array]:
        return {"y": np.eye(3, dtype=np.float32)[[int(batch[0, 0, 0, 0].real)]]}

    def close(self) -> None:
        pass


def solid(folder: Path, names: dict[str, int]) -> Path:
    for name, value in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / name), np.full((8, 8, 3), value, np.uint8))
    return folder


def test_top_1_over_folders(tmp_path: Path) -> None:
    spec = ModelSpec(path=Path("a.onnx"), task="classify", labels=("a", "b", "c"))
    folder = solid(tmp_path, {"a/0.png": 0, "b/0.png": 1, "b/1.png": 2, "b/2.png": 0})
    result = evaluate(Oracle(), spec, folder)
    assert (result.task, result.images, result.scores) == ("classify", 4, {"top1": 0.5})


def test_folders_that_cannot_number_the_classes_are_refused(tmp_path: Path) -> None:
    spec = ModelSpec(path=Path("a.onnx"), task="classify")
    with pytest.raises(DatasetError, match="2 folders for 3 classes"):
        evaluate(Oracle(), spec, solid(tmp_path, {"a/0.png": 0, "b/0.png": 1}))


def test_raw_models_have_no_labels(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="task 'raw'"):
        evaluate(Oracle(), ModelSpec(path=Path("a.onnx"), task="raw"), tmp_path)


class Blind:
    """A YOLOX for 32 x 32 images that sees none of its two classes."""

    inputs = (TensorSpec("x", np.dtype(np.float32), (1, 3, 32, 32)),)
    outputs = (TensorSpec("y", np.dtype(np.float32), (1, 21, 7)),)

    def infer(self, batch: Array) -> dict[str, Array]:
        return {"y": np.zeros((len(batch), 21, 7), np.float32)}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("label", ["", "1 0.5 0.5 0.2 0.2"])
def test_without_an_object_there_is_no_precision(tmp_path: Path, label: str) -> None:
    folder = solid(tmp_path, {"images/a.png": 0})
    (folder / "labels").mkdir()
    (folder / "labels" / "a.txt").write_text(label)
    spec = ModelSpec(path=Path("a.onnx"), task="detect", decoder="yolox", labels=("car", "person"))
    if label:
        assert evaluate(Blind(), spec, folder).scores == {"map": 0.0, "map50": 0.0}
        return
    with pytest.raises(DatasetError, match="no labelled object in 1 images"):
        evaluate(Blind(), spec, folder)
