"""A state directory with drawn frames, and `tared label` over it; without a daemon."""

from __future__ import annotations

import json
from collections.abc import Sequence
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

HEIGHT, WIDTH = 120, 160
CLASSES = ("cat", "dog", "traffic light", "bus", "owl")


class LabelBench:
    """A folder with config.yaml, a tiny model of this task, and its store of drawn frames."""

    def __init__(self, folder: Path, task: str, count: int, labels: Sequence[str] = CLASSES) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        onnx.save(residual_net(), folder / "model.onnx")
        spec: dict[str, Any] = {"path": "model.onnx", "task": task, "labels": list(labels)}
        if task == "detect":
            spec["decoder"] = "yolox"
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
        return Detections(boxes=boxes, classes=np.array([class_id, 3]), scores=np.array([0.75, 0.5], np.float32))


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
