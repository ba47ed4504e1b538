"""COCO's mean average precision, by pycocotools."""

from __future__ import annotations

from collections import Counter
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agent.vision.detections import Detections
from agent.vision.tasks.scores import ClassScore, Evaluation

if TYPE_CHECKING:
    from pycocotools.cocoeval import COCOeval

    from agent.vision.datasets.labelled_images import LabelledObjects

_SIZES = ("small", "medium", "large")  # COCO's: up to 32 x 32 px, up to 96 x 96, above


class AveragePrecision:
    """Collect the detections and objects of many images for COCO's mean average precision.

    It is pycocotools' (Lin et al. 2014): of each image and class the 100 best detections, matches greedy by score,
    precision interpolated at 101 recalls, the mean over classes that occur. Detections in a crowd region do not count.
    """

    def __init__(self) -> None:
        self.images = 0
        self._objects: list[dict[str, Any]] = []
        self._detections: list[dict[str, Any]] = []

    def add(self, detections: Detections, truth: LabelledObjects) -> None:
        """Count one image; both arguments are in pixels of that image."""
        for box, class_id, area, crowd in zip(
            _origins_and_sides(truth.boxes), truth.classes.tolist(), truth.areas.tolist(), truth.crowds.tolist(),
            strict=True,
        ):  # fmt: skip
            self._append(self._objects, category_id=class_id, bbox=box, area=area, iscrowd=int(crowd))
        boxes, scores = _origins_and_sides(detections.boxes), detections.scores.tolist()
        for box, class_id, score in zip(boxes, detections.classes.tolist(), scores, strict=True):
            self._append(self._detections, category_id=class_id, bbox=box, area=box[2] * box[3], score=score)
        self.images += 1

    def _append(self, annotations: list[dict[str, Any]], **values: Any) -> None:
        # To COCOeval an annotation with id 0 is none.
        annotations.append({"id": len(annotations) + 1, "image_id": self.images, **values})

    def evaluated(self) -> COCOeval:
        """Return COCOeval after `evaluate`: the images are numbered as they were added."""
        # Hundreds of milliseconds, which no daemon needs: only whoever scores labelled images waits for them.
        from pycocotools.cocoeval import COCOeval

        with redirect_stdout(None):  # it prints its progress, and stdout may be JSON
            evaluation = COCOeval(self._index(self._objects), self._index(self._detections), "bbox")
            evaluation.evaluate()
        return evaluation

    def mean(self) -> Evaluation | None:
        """Return the evaluation of these images, by mean average precision.

        It is None if no object was added that is not a crowd.
        """
        counts = Counter(each["category_id"] for each in self._objects if not each["iscrowd"])
        if not counts:
            return None
        evaluation = self.evaluated()
        with redirect_stdout(None):
            evaluation.accumulate()
            evaluation.summarize()
        of_class = evaluation.eval["precision"][:, :, :, 0, -1]  # thresholds, recalls, classes; of all sizes
        mean, at_50, _, *sizes = evaluation.stats[:6].tolist()
        by_class = [
            ClassScore(class_id, float(of_class[:, :, number].mean()), counts[class_id])
            for number, class_id in enumerate(map(int, evaluation.params.catIds))
            if class_id in counts
        ]
        by_size = {name: value if value >= 0.0 else None for name, value in zip(_SIZES, sizes, strict=True)}
        return Evaluation("detect", self.images, {"map": mean, "map50": at_50}, by_size, by_class)

    def _index(self, annotations: list[dict[str, Any]]) -> Any:
        from pycocotools.coco import COCO

        index = COCO()
        index.dataset = {
            "images": [{"id": number} for number in range(self.images)],
            "categories": [{"id": class_id} for class_id in sorted({each["category_id"] for each in self._objects})],
            "annotations": annotations,
        }
        index.createIndex()
        return index


def _origins_and_sides(corners: NDArray[np.float32]) -> list[list[float]]:
    """Turn boxes (n, 4) x1 y1 x2 y2 into COCO's x, y, width, height."""
    boxes = corners.astype(np.float64)
    return np.hstack((boxes[:, :2], boxes[:, 2:] - boxes[:, :2])).tolist()  # type: ignore[no-any-return]  # a list
