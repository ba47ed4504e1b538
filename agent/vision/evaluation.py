"""Evaluate an engine on labelled images: top-1 accuracy, or COCO's mean average precision.

`ClassifiedImages` and `DetectionImages` read a folder or zip with its labels: classes as folders, or YOLO label files.
`evaluate` runs an engine over them; `AveragePrecision` counts the detections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.camera.images import ImageFiles
from agent.common.errors import DatasetError
from agent.vision.decode import Classification
from agent.vision.detections import Detections, LabelledBoxes, keep_best, match
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from engines.interface import Engine

Image = NDArray[np.uint8]

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)
_MAX_DETECTIONS = 100
# Precision is averaged over all recalls, so detections far below the service threshold count too.
_EVALUATION_SCORE_THRESHOLD = 0.01


class ClassifiedImages:
    """Images whose class is the name of their folder.

    With the model's `labels` a class is numbered by its place there; without, `classes` are the folder names in
    alphabetical order. Iteration reads lazily and yields (image BGR uint8 (h, w, 3), class id).

    Raises DatasetError as ImageFiles, and `dataset.label` for an image outside a class's folder.
    """

    def __init__(self, path: Path, labels: Sequence[str] = ()) -> None:
        self._files = ImageFiles(path)
        folders = {PurePosixPath(name).parent.name for name in self._files.names}
        self.classes = tuple(labels) or tuple(sorted(folders))
        unknown = sorted(folder for folder in folders if self.classes.count(folder) != 1 or not folder)
        if unknown:
            raise DatasetError(
                "dataset.label",
                f"images in folder '{unknown[0]}' of {path}",
                "folders named as one label of the model spec each" if labels else "one folder per class",
                "rename the folders, or correct labels in the model spec",
            )

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[tuple[Image, int]]:
        ids = {name: index for index, name in enumerate(self.classes)}
        for name in self._files.names:
            yield self._files.read(name), ids[PurePosixPath(name).parent.name]


class DetectionImages:
    """Images with YOLO label files: lines `class cx cy w h`, centre and size as fractions of the image.

    The labels of `images/train/a.jpg` are `labels/train/a.txt`; those of `a.jpg` may also be `a.txt` or `labels/a.txt`
    beside it. An image without a label file shows no object, as Ultralytics reads it. A `classes.txt` names the
    classes, which are then matched by name to the model's `labels`.

    Iteration reads lazily and yields (image BGR uint8 (h, w, 3), LabelledBoxes in its pixels).

    Raises DatasetError as ImageFiles, and `dataset.label` for a label that is malformed or out of range.
    """

    def __init__(self, path: Path, labels: Sequence[str] = ()) -> None:
        self._files = ImageFiles(path)
        present = frozenset(self._files.files)
        self._label_files = {
            name: next((file for file in _label_candidates(name) if file in present), None)
            for name in self._files.names
        }
        if not any(self._label_files.values()):
            raise DatasetError(
                "dataset.label",
                f"no label file for any of {len(self._files)} images in {path}",
                "YOLO label files, e.g. images/a.jpg and labels/a.txt",
                "add the labels, or evaluate a classifier on folders named as classes",
            )
        self._class_ids = self._match_classes(labels)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[tuple[Image, LabelledBoxes]]:
        for name in self._files.names:
            image = self._files.read(name)
            yield image, self._truth(self._label_files[name], image.shape[1], image.shape[0])

    def _match_classes(self, labels: Sequence[str]) -> Sequence[int] | None:
        """Return the model's class ids in the order of the data set's; None where every id stands for itself."""
        if "classes.txt" not in self._files.files:
            return range(len(labels)) if labels else None
        names = self._files.read_text("classes.txt").splitlines()
        names = [name.strip() for name in names if name.strip()]
        if not labels:
            return range(len(names))
        unknown = [name for name in names if name not in labels]
        if unknown:
            raise DatasetError(
                "dataset.label",
                f"class '{unknown[0]}' in classes.txt of {self._files.path}",
                "the labels of the model spec",
                "correct classes.txt, or labels in the model spec",
            )
        return [labels.index(name) for name in names]

    def _truth(self, label_file: str | None, width: int, height: int) -> LabelledBoxes:
        lines = self._files.read_text(label_file).splitlines() if label_file else []
        rows = [self._parse(f"{label_file}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]
        table = np.array(rows, np.float64).reshape(-1, 5)
        centres, sides = table[:, 1:3], table[:, 3:5]
        corners = np.hstack((centres - sides / 2, centres + sides / 2)) * ((width, height) * 2)
        return LabelledBoxes(boxes=corners.astype(np.float32), classes=table[:, 0].astype(np.int64))

    def _parse(self, where: str, line: str) -> tuple[float, ...]:
        """Parse one label line to (the model's class id, cx, cy, w, h)."""
        try:
            dataset_id, *box = (float(field) for field in line.split())
        except ValueError:
            dataset_id, box = math.nan, []
        count = math.inf if self._class_ids is None else len(self._class_ids)
        is_class = dataset_id >= 0 and dataset_id.is_integer() and dataset_id < count
        if not is_class or len(box) != 4 or not all(0.0 <= value <= 1.0 for value in box):
            raise DatasetError(
                "dataset.label",
                f"'{line.strip()}' at {where} in {self._files.path}",
                f"class cx cy w h: a class below {count:g} and four fractions of the image",
                "correct the label, or labels in the model spec",
            )
        class_id = int(dataset_id) if self._class_ids is None else self._class_ids[int(dataset_id)]
        return (class_id, *box)


def _label_candidates(name: str) -> Iterator[str]:
    """Yield the names that the label file of an image may have."""
    image = PurePosixPath(name)
    for depth in range(len(image.parent.parts)):
        if image.parts[depth] == "images":
            swapped = (*image.parts[:depth], "labels", *image.parts[depth + 1 :])
            yield PurePosixPath(*swapped).with_suffix(".txt").as_posix()
    yield image.with_suffix(".txt").as_posix()
    yield (image.parent / "labels" / image.name).with_suffix(".txt").as_posix()


class AveragePrecision:
    """Accumulate detections and labels of many images into COCO's mean average precision.

    It is computed as by pycocotools' COCOeval without crowd regions (Lin et al. 2014): the 100 best detections of each
    image, matches greedy by score, precision interpolated at 101 recalls, the mean over classes that occur.
    """

    def __init__(self) -> None:
        # Of each image: the classes of its objects; classes, scores and hits (thresholds, n) of its detections.
        self._images: list[tuple[NDArray[Any], ...]] = []

    def add(self, detections: Detections, truth: LabelledBoxes) -> None:
        """Count one image; both arguments are in pixels of that image."""
        best = keep_best(detections, _MAX_DETECTIONS)
        hits = match(best, truth, IOU_THRESHOLDS.tolist())
        self._images.append((truth.classes, best.classes, best.scores, hits))

    def resampled(self, images: Sequence[int]) -> AveragePrecision:
        """Return that of these of the added images, which may be there more than once: a bootstrap sample."""
        sample = AveragePrecision()
        sample._images = [self._images[number] for number in images]
        return sample

    def by_threshold(self) -> NDArray[np.float64]:
        """Return the mean AP at each IoU threshold 0.50, 0.55 ... 0.95: (10,) in [0, 1]; NaN without any object."""
        if not any(len(objects) for objects, *_ in self._images):
            return np.full(len(IOU_THRESHOLDS), np.nan)
        objects, classes, scores, hits = (np.concatenate(parts, axis=-1) for parts in zip(*self._images, strict=True))
        by_score = np.argsort(-scores, kind="stable")
        classes, hits = classes[by_score], hits[:, by_score]
        occurring, counts = np.unique(objects, return_counts=True)
        precisions = [
            _interpolated_precision(hits[:, classes == class_id], int(count))
            for class_id, count in zip(occurring, counts, strict=True)
        ]
        mean: NDArray[np.float64] = np.mean(precisions, axis=0)
        return mean


def _interpolated_precision(hits: NDArray[np.bool_], object_count: int) -> NDArray[np.float64]:
    """Return the AP (thresholds,) of one class from its hits (thresholds, detections), best score first."""
    true_positives = hits.cumsum(axis=1)
    precision = true_positives / np.arange(1, hits.shape[1] + 1)
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    padded = np.hstack((envelope, np.zeros((len(hits), 1))))  # recalls never reached have precision 0
    recall = true_positives / object_count
    reached = np.stack([np.searchsorted(row, _RECALLS, side="left") for row in recall])
    average: NDArray[np.float64] = np.take_along_axis(padded, reached, axis=1).mean(axis=1)
    return average


@dataclass(frozen=True)
class Evaluation:
    """The result of one pass over a data set: `scores` holds top1, or map and map50, in [0, 1]."""

    task: str
    images: int
    scores: Mapping[str, float]


def evaluate(engine: Engine, spec: ModelSpec, path: Path) -> Evaluation:
    """Run an engine over the labelled images at `path`: top-1 for task `classify`, mAP for task `detect`.

    Raises DatasetError:
        images.*, dataset.label  the images or labels cannot be used
        dataset.empty            no image has a labelled object
        dataset.task             the task is `raw`, which has no labels
    """
    images = labelled_images(spec, path)
    if isinstance(images, ClassifiedImages):
        return _evaluate_classifier(engine, spec, images)
    return _evaluate_detector(engine, spec, images)


def labelled_images(spec: ModelSpec, path: Path) -> ClassifiedImages | DetectionImages:
    """Return the images at `path`, labelled for the spec's task. Raises DatasetError as far as that is known by now."""
    if spec.task == "classify":
        return ClassifiedImages(path, spec.labels)
    if spec.task == "detect":
        return DetectionImages(path, spec.labels)
    raise DatasetError(
        "dataset.task",
        f"task '{spec.task}'",
        "classify or detect: raw outputs have no labels to compare with",
        "give the model's task, or compare engines by their fidelity",
    )


def _evaluate_classifier(engine: Engine, spec: ModelSpec, images: ClassifiedImages) -> Evaluation:
    outputs = engine.outputs
    if outputs[0].shape[-1] not in (None, len(images.classes)):
        raise DatasetError(
            "dataset.label",
            f"{len(images.classes)} folders for {outputs[0].shape[-1]} classes of the model",
            "a folder for every class, or labels that number them",
            "add labels to the model spec",
        )
    vision = VisionTask(spec, engine.inputs, outputs)
    correct = 0
    for image, class_id in images:
        prediction, _ = vision.infer(engine, image)
        assert isinstance(prediction, Classification)
        correct += prediction.class_id == class_id
    return Evaluation(spec.task, len(images), {"top1": correct / len(images)})


def average_precision(engine: Engine, spec: ModelSpec, images: DetectionImages) -> AveragePrecision:
    """Return the precision of a detector over all images. Raises DatasetError as the images do."""
    all_scores = spec.model_copy(update={"score_threshold": _EVALUATION_SCORE_THRESHOLD})
    vision = VisionTask(all_scores, engine.inputs, engine.outputs)
    precision = AveragePrecision()
    for image, truth in images:
        detections, geometry = vision.infer(engine, image)
        assert isinstance(detections, Detections)
        precision.add(replace(detections, boxes=geometry.to_frame(detections.boxes)), truth)
    return precision


def _evaluate_detector(engine: Engine, spec: ModelSpec, images: DetectionImages) -> Evaluation:
    by_threshold = average_precision(engine, spec, images).by_threshold()
    if np.isnan(by_threshold).any():
        found = f"no labelled object in {len(images)} images"
        raise DatasetError("dataset.empty", found, "at least one", "check the label files")
    scores = {"map": float(by_threshold.mean()), "map50": float(by_threshold[0])}
    return Evaluation(spec.task, len(images), scores)
