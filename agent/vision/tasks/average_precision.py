"""COCO's mean average precision, by pycocotools: of boxes, masks, key points, or shapes whose overlap is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import DatasetError
from agent.vision.answer import MatchCounts
from agent.vision.detections import Detections
from agent.vision.tasks.scores import ClassScore, Evaluation

if TYPE_CHECKING:
    from pycocotools.cocoeval import COCOeval

    from agent.vision.datasets.labelled_images import LabelledObjects

_SIZES = {  # COCO's: up to 32 x 32 px, up to 96 x 96, above; it has no small persons with key points
    "bbox": ("small", "medium", "large"),
    "segm": ("small", "medium", "large"),
    "keypoints": ("medium", "large"),
}


class AveragePrecision:
    """Collect the detections and objects of many images for COCO's mean average precision.

    It is pycocotools' (Lin et al. 2014): of each image and class the 100 best detections, matches greedy by score,
    precision interpolated at 101 recalls, the mean over classes that occur. Detections in a crowd region do not count.
    Of key points the 20 best count.

    Args:
        task: Of the evaluation.
        compared: What has to overlap.
        sigmas: Of key points, (k,).
        ious: Returns the IoU of shapes (n) and shapes (m) that were added, (n, m); None: COCO's own.
    """

    def __init__(
        self,
        task: str = "detect",
        compared: Literal["bbox", "segm", "keypoints"] = "bbox",
        sigmas: Sequence[float] = (),
        ious: Callable[[Sequence[Any], Sequence[Any]], NDArray[np.float64]] | None = None,
    ) -> None:
        self.images = 0
        self._task, self._compared, self._sigmas, self._ious = task, compared, sigmas, ious
        self._objects: list[dict[str, Any]] = []
        self._detections: list[dict[str, Any]] = []
        self._listed: list[dict[str, Any]] = []

    def add(
        self,
        detections: Detections,
        truth: LabelledObjects,
        shapes: Sequence[Mapping[str, Any]] = (),
        true_shapes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Count one image; both arguments are in pixels of that image.

        shapes, true_shapes: COCO's keys for the shape of each; empty: boxes are compared.
        """
        boxes, areas, crowds = _origins_and_sides(truth.boxes), truth.areas.tolist(), truth.crowds.tolist()
        for number, (box, class_id) in enumerate(zip(boxes, truth.classes.tolist(), strict=True)):
            shape = true_shapes[number] if true_shapes else {}
            values = {"area": areas[number], "iscrowd": int(crowds[number]), **shape}
            self._append(self._objects, category_id=class_id, bbox=box, **values)
        boxes, scores = _origins_and_sides(detections.boxes), detections.scores.tolist()
        for number, (box, class_id) in enumerate(zip(boxes, detections.classes.tolist(), strict=True)):
            shape = shapes[number] if shapes else {}
            values = {"area": box[2] * box[3], **shape}
            self._append(self._detections, category_id=class_id, bbox=box, score=scores[number], **values)
        self._listed.append({"id": self.images, "height": truth.size[0], "width": truth.size[1]})
        self.images += 1

    def _append(self, annotations: list[dict[str, Any]], **values: Any) -> None:
        # To COCOeval an annotation with id 0 is none.
        annotations.append({"id": len(annotations) + 1, "image_id": self.images, **values})

    def evaluated(self) -> COCOeval:
        """Return COCOeval after `evaluate`: the images are numbered as they were added."""
        # Hundreds of milliseconds, which no daemon needs: only whoever scores labelled images waits for them.
        from pycocotools.cocoeval import COCOeval

        with redirect_stdout(None):  # it prints its progress, and stdout may be JSON
            evaluation = COCOeval(self._index(self._objects), self._index(self._detections), self._compared)
            if self._sigmas:
                evaluation.params.kpt_oks_sigmas = np.array(self._sigmas)
            if self._ious is not None:
                evaluation.computeIoU = partial(_shape_ious, evaluation, self._ious)
            evaluation.evaluate()
        return evaluation

    def mean(self, at_score: float | None = None) -> Evaluation:
        """Return the evaluation of these images, by mean average precision.

        at_score: F1 at IoU 0.5, of the detections from this score on, is one of the scores; None: it is not.

        Raises DatasetError (`dataset.empty`) if no object was added that counts: no crowd, nor one without key points.
        """
        counted = (each for each in self._objects if not each["iscrowd"] and each.get("num_keypoints", 1))
        counts = Counter(each["category_id"] for each in counted)
        if not counts:
            found = f"no labelled object in {self.images} images"
            raise DatasetError("dataset.empty", found, "at least one", "check the label files")
        evaluation = self.evaluated()
        with redirect_stdout(None):
            evaluation.accumulate()
            evaluation.summarize()
        of_class = evaluation.eval["precision"][:, :, :, 0, -1]  # thresholds, recalls, classes; of all sizes
        names = _SIZES[self._compared]
        mean, at_50, _, *sizes = evaluation.stats[: 3 + len(names)].tolist()
        by_class = [
            ClassScore(class_id, float(of_class[:, :, number].mean()), counts[class_id])
            for number, class_id in enumerate(map(int, evaluation.params.catIds))
            if class_id in counts
        ]
        by_size = {name: value if value >= 0.0 else None for name, value in zip(names, sizes, strict=True)}
        scores = {"map": mean, "map50": at_50}
        if at_score is not None:
            scores["f1"] = _f1(evaluation, at_score)
        return Evaluation(self._task, self.images, scores, by_size, by_class)

    def _index(self, annotations: list[dict[str, Any]]) -> Any:
        from pycocotools.coco import COCO

        index = COCO()
        index.dataset = {
            "images": self._listed,
            "categories": [{"id": class_id} for class_id in sorted({each["category_id"] for each in self._objects})],
            "annotations": annotations,
        }
        index.createIndex()
        return index


def _f1(evaluation: COCOeval, at_score: float) -> float:
    """Return F1 of the matches at IoU 0.5 over all images and classes; what lies in a crowd is no mistake.

    Surer detections claim their objects first, so that those below the score change no match of those above it.
    """
    counts, all_sizes = MatchCounts(), evaluation.params.areaRng[0]
    for image in evaluation.evalImgs:
        if image is None or image["aRng"] != all_sizes:
            continue
        counted = (np.array(image["dtScores"]) >= at_score) & ~image["dtIgnore"][0].astype(np.bool_)
        hits = int((image["dtMatches"][0][counted] > 0).sum())
        shown = int((~np.array(image["gtIgnore"], np.bool_)).sum())
        counts += MatchCounts(hits, int(counted.sum()) - hits, shown - hits)
    return counts.f1


def _shape_ious(
    evaluation: COCOeval,
    ious: Callable[[Sequence[Any], Sequence[Any]], NDArray[np.float64]],
    image: int,
    class_id: int,
) -> Any:
    """Return what COCOeval.computeIoU does, for shapes of another kind."""
    truth, found = evaluation._gts[image, class_id], evaluation._dts[image, class_id]
    order = np.argsort([-each["score"] for each in found], kind="mergesort")[: evaluation.params.maxDets[-1]]
    best = [found[number] for number in order]
    if not best or not truth:
        return []
    overlaps = ious(best, truth)
    areas, true_areas = (np.array([each["area"] for each in shapes]) for shapes in (best, truth))
    crowds = np.array([each["iscrowd"] for each in truth], np.bool_)
    common = overlaps * (areas[:, np.newaxis] + true_areas) / (1.0 + overlaps)
    # What lies in a crowd is part of it, however small.
    return np.where(crowds, common / np.maximum(areas[:, np.newaxis], 1.0), overlaps)


def _origins_and_sides(corners: NDArray[np.float32]) -> list[list[float]]:
    """Turn boxes (n, 4) x1 y1 x2 y2 into COCO's x, y, width, height."""
    boxes = corners.astype(np.float64)
    return np.hstack((boxes[:, :2], boxes[:, 2:] - boxes[:, :2])).tolist()  # type: ignore[no-any-return]  # a list
