"""How good predictions are: COCO's average precision, and one pass of an engine over labelled images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.dataset import ClassifiedImages, DetectionImages
from agent.decode import Classification
from agent.detections import Detections, LabelledBoxes, match
from agent.errors import DatasetError
from agent.model_spec import ModelSpec
from agent.vision import VisionTask
from engines.backend import Engine

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)
_MAX_DETECTIONS = 100
# Precision is averaged over all recalls, so detections far below the service threshold count too.
_EVALUATION_SCORE_THRESHOLD = 0.01


@dataclass
class AveragePrecision:
    """Accumulates detections and labels of many images into COCO's mean average precision.

    As pycocotools' COCOeval without crowd regions (Lin et al. 2014): the 100 best detections of each image,
    matches greedy by score, precision interpolated at 101 recalls, the mean over classes that occur.
    """

    _objects: list[NDArray[np.int64]] = field(default_factory=list)
    _classes: list[NDArray[np.int64]] = field(default_factory=list)
    _scores: list[NDArray[np.float32]] = field(default_factory=list)
    _hits: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, found: Detections, truth: LabelledBoxes) -> None:
        """Count one image; both in pixels of the same image."""
        found = found[np.argsort(-found.scores, kind="stable")[:_MAX_DETECTIONS]]
        self._objects.append(truth.classes)
        self._classes.append(found.classes)
        self._scores.append(found.scores)
        self._hits.append(match(found, truth, IOU_THRESHOLDS.tolist()))

    def by_threshold(self) -> NDArray[np.float64]:
        """The mean AP at each IoU threshold 0.50, 0.55 ... 0.95: (10,) in [0, 1]; NaN without any object."""
        objects = np.concatenate(self._objects or [np.empty(0, np.int64)])
        if not len(objects):
            return np.full(len(IOU_THRESHOLDS), np.nan)
        classes, scores = np.concatenate(self._classes), np.concatenate(self._scores)
        hits = np.concatenate(self._hits, axis=1)
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
    """The AP (thresholds,) of one class from its hits (thresholds, detections), best score first."""
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
    """What one pass over a data set gave: `scores` holds top1, or map and map50, in [0, 1]."""

    task: str
    images: int
    scores: Mapping[str, float]


def evaluate(engine: Engine, spec: ModelSpec, path: Path) -> Evaluation:
    """Run an engine over the labelled images at `path`: top-1 or mAP, as the spec's task asks.

    Raises DatasetError: labels that cannot be used, no object among them, or task `raw`, which has none.
    """
    images = labelled_images(spec, path)
    if isinstance(images, ClassifiedImages):
        return _evaluate_classifier(engine, spec, images)
    return _evaluate_detector(engine, spec, images)


def labelled_images(spec: ModelSpec, path: Path) -> ClassifiedImages | DetectionImages:
    """The images at `path` as the spec's task has them labelled. Raises DatasetError as far as that is known by now."""
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
        tensor, _ = vision.preprocess(image)
        prediction = vision.decode(engine.infer(tensor))
        assert isinstance(prediction, Classification)
        correct += prediction.class_id == class_id
    return Evaluation(spec.task, len(images), {"top1": correct / len(images)})


def _evaluate_detector(engine: Engine, spec: ModelSpec, images: DetectionImages) -> Evaluation:
    all_scores = spec.model_copy(update={"score_threshold": _EVALUATION_SCORE_THRESHOLD})
    vision = VisionTask(all_scores, engine.inputs, engine.outputs)
    precision = AveragePrecision()
    for image, truth in images:
        tensor, geometry = vision.preprocess(image)
        found = vision.decode(engine.infer(tensor))
        assert isinstance(found, Detections)
        in_frame = Detections(boxes=geometry.to_frame(found.boxes), classes=found.classes, scores=found.scores)
        precision.add(in_frame, truth)
    by_threshold = precision.by_threshold()
    if np.isnan(by_threshold).any():
        what = f"no labelled object in {len(images)} images"
        raise DatasetError("dataset.empty", what, "at least one", "check the label files")
    scores = {"map": float(by_threshold.mean()), "map50": float(by_threshold[0])}
    return Evaluation(spec.task, len(images), scores)
