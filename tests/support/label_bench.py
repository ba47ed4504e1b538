"""A state directory with drawn frames, and `tared label` over it; without a daemon."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import yaml
from zoo import residual_net

from agent.labelling.store import Counted, Draw, LabelStore
from agent.models.model import open_model
from agent.vision.answer import Answer
from agent.vision.boxes import LabelledBoxes
from agent.vision.detections import Detections
from agent.vision.labels import Truth
from agent.vision.spec import ModelSpec
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.instance import Instances
from agent.vision.tasks.obb import OrientedBoxes, turned
from agent.vision.tasks.pose import Poses
from agent.vision.tasks.segment import NOTHING, LabelMap
from fleet.cli.main import main

HEIGHT, WIDTH = 120, 160
CLASSES = ("cat", "dog", "traffic light", "bus", "owl")


class LabelBench:
    """A folder with config.yaml, a tiny model of this task, and its store of drawn frames."""

    def __init__(self, folder: Path, task: str, count: int, labels: Sequence[str] = CLASSES) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        onnx.save(residual_net(), folder / "model.onnx")
        spec: dict[str, Any] = {"path": "model.onnx", "task": task, "labels": list(labels), **KEYS.get(task, {})}
        document = {"model": spec, "state_dir": "state", "camera": {"source": "clip.avi"}}
        self.config.write_text(yaml.safe_dump(document))
        model = open_model(ModelSpec(**{**spec, "path": folder / "model.onnx"}))
        self.store = LabelStore(folder / "state", model.sha256, task)
        for number in range(count):
            self.draw(number)

    def draw(self, number: int, camera: str = "gate") -> None:
        """Draw a frame, in which a white box is at 40 30 100 90."""
        picture = np.full((HEIGHT, WIDTH, 3), 40 + number, np.uint8)
        picture[30:90, 40:100] = 255
        draw = Draw(
            camera=camera, regime="a1b2", frame=number, ts=float(number), stratum=0, weight=1.0, probability=0.1,
            seen=[10.0 * (1 + number), 0, 0, 0, 0, 0], served=self._answer(1), reference=self._answer(0),
        )  # fmt: skip
        counted = Counted(np.array(draw.seen), np.array([1.0 + number, 0, 0, 0, 0, 0]))
        self.store.add(draw, cv2.imencode(".jpg", picture)[1].tobytes(), (HEIGHT, WIDTH), counted)

    def labels(self) -> list[Any]:
        """The label of each frame, as JSON has it; "skipped" for one that was skipped."""
        return ["skipped" if frame.skipped else _rows(frame.label) for frame in self.store.frames()]

    def _answer(self, class_id: int) -> Answer:
        """An engine's: the white box as this class, and one object that both engines see."""
        if self.store.task == "classify":
            return Classification(class_id, 0.75)
        boxes = np.array([[40, 30, 100, 90], [2, 2, 20 + class_id, 20]], np.float32)
        found = Detections(boxes=boxes, classes=np.array([class_id, 3]), scores=np.array([0.75, 0.5], np.float32))
        return SHAPED[self.store.task](found) if self.store.task in SHAPED else found


def _instances(found: Detections) -> Answer:
    """A mask of each box, less its upper right corner, in cells of 4 x 4 pixels."""
    cells = np.zeros((2, HEIGHT // 4, WIDTH // 4), np.bool_)
    for mask, (left, top, right, bottom) in zip(cells, np.rint(found.boxes / 4).astype(int).tolist(), strict=True):
        mask[top:bottom, left:right] = True
        mask[top : top + 2, right - 2 : right] = False
    masks = np.packbits(cells, axis=2)
    return Instances(**vars(found), masks=masks, columns=WIDTH // 4, covered=(HEIGHT, WIDTH))


def _map(found: Detections) -> Answer:
    classes = np.full((HEIGHT // 4, WIDTH // 4), NOTHING, np.int16)
    for number, (left, top, right, bottom) in zip(found.classes, np.rint(found.boxes / 4).astype(int), strict=True):
        classes[top:bottom, left:right] = number
    return LabelMap(classes, (HEIGHT, WIDTH))


def _poses(found: Detections) -> Answer:
    """Three key points of each object: two of its corners, and one that is not seen."""
    corners = found.boxes.reshape(2, 2, 2)
    places = np.concatenate((corners, corners.mean(axis=1, keepdims=True)), axis=1)
    points = np.dstack((places, np.tile([0.9, 0.8, 0.1], (2, 1)))).astype(np.float32)
    return Poses(**vars(found), points=points, sigmas=(0.05, 0.05, 0.05))


def _oriented(found: Detections) -> Answer:
    centres, sides = found.boxes.reshape(2, 2, 2).mean(axis=1), found.boxes[:, 2:] - found.boxes[:, :2]
    corners = turned(centres, sides * np.array([1.0, 0.5], np.float32), np.array([0.5, 0.0], np.float32))
    return OrientedBoxes.around(corners, found.classes, found.scores)


SHAPED: dict[str, Callable[[Detections], Answer]] = {
    "instance": _instances, "segment": _map, "pose": _poses, "obb": _oriented,
}  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {
    "detect": {"decoder": "yolox"}, "instance": {"decoder": "yolov8"}, "obb": {"decoder": "yolov8"},
    "pose": {"decoder": "yolov8", "keypoints": ["head", "foot", "tail"]},
}  # fmt: skip


def tared(bench: LabelBench | Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    """The keys that `tared label --json` prints. bench: or the path of a config.yaml."""
    config = bench if isinstance(bench, Path) else bench.config
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["label", "-c", str(config), "--json", *map(str, arguments)]) == code
    printed = json.loads(output.getvalue())
    assert isinstance(printed, dict)
    return printed


def coco(path: Path, images: dict[str, list[tuple[int, list[float]]]], /, **changes: Any) -> Path:
    """Write COCO's JSON: the category and x y width height of each object, by image."""
    listed = [{"id": number, "file_name": name, "width": WIDTH, "height": HEIGHT} for number, name in enumerate(images)]
    rows = [(number, *each) for number, objects in enumerate(images.values()) for each in objects]
    annotations = [
        {"id": at, "image_id": image, "category_id": category, "bbox": box}
        for at, (image, category, box) in enumerate(rows)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES)]
    path.write_text(json.dumps({"images": listed, "annotations": annotations, "categories": categories, **changes}))
    return path


def _rows(label: Truth | None) -> Any:
    """Return a class as it is, and boxes as [class, x1, y1, x2, y2]."""
    if not isinstance(label, LabelledBoxes):
        return label
    return [[number, *box] for number, box in zip(label.classes.tolist(), label.boxes.tolist(), strict=True)]
