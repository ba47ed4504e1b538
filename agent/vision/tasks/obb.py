"""The task obb: objects with classes and scores in oriented boxes (rotated rectangles)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.vision.boxes import FloatArray, LabelledBoxes, Size
from agent.vision.datasets.object_rows import CORNER_ROW, RowForm
from agent.vision.decoders import EXTENDED_DECODERS, Candidates, Outputs
from agent.vision.detections import Detections, DetectionsT, keep_best
from agent.vision.drawing import Picture, draw_outline
from agent.vision.labels import LabelError, LabelKind
from agent.vision.preprocess import Geometry
from agent.vision.shape_labels import FrameShapes, numbers, sound_outline
from agent.vision.spec import ModelSpec
from agent.vision.tasks.dbnet import text_regions
from agent.vision.tasks.detect import MAX_CANDIDATES, Detect, box_document, kept_boxes
from agent.vision.tasks.maps import mask_of_runs
from agent.vision.tasks.scores import Evaluation
from agent.vision.tasks.shapes import OVERLAP_LOSS, Shapes, comparable, outlines_of, shape_ious

if TYPE_CHECKING:  # Self is in `typing` since Python 3.11
    from typing_extensions import Self

    from agent.vision.datasets.labelled_images import LabelledObjects

# The corners of a box, in halves of its sides, clockwise from the upper left.
_CORNERS = np.array([(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)], np.float32) * np.float32(0.5)
_BLOCK = 32  # candidates that are compared with the others at a time
_ROUNDING = 1e-6  # by the size of corners in float32
_LEAST_AREA = 0.01  # square pixels, for a label


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledCorners(LabelledBoxes):
    """Hold the oriented boxes of one image, as people label them; corners are those of `OrientedBoxes`."""

    corners: FloatArray


@dataclass(frozen=True, eq=False, kw_only=True)
class OrientedBoxes(Shapes):
    """Hold the oriented boxes of one image.

    Corners are the same for an angle and its half turn, and for a box whose sides have changed places: no angle jumps.

    Args:
        boxes: float32 (n, 4), x1 y1 x2 y2 around each.
        corners: float32 (n, 4, 2), x y, one after another around the box.
    """

    corners: FloatArray

    @classmethod
    def around(cls, corners: FloatArray, classes: NDArray[np.int64], scores: FloatArray) -> OrientedBoxes:
        """Return the oriented boxes of these corners (n, 4, 2)."""
        boxes = np.hstack((corners.min(axis=1), corners.max(axis=1))).reshape(-1, 4)
        return cls(boxes=boxes, classes=classes, scores=scores, corners=corners)

    def overlaps(self, truth: LabelledBoxes, wanted: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Return the IoU of every box with every box of the other answer."""
        assert isinstance(truth, (OrientedBoxes, LabelledCorners)), "oriented boxes are compared with oriented boxes"
        return corner_ious(self.corners, truth.corners, comparable(self.boxes, truth.boxes, wanted))

    def bounded(self, limit: float) -> Self:
        return replace(super().bounded(limit), corners=np.clip(self.corners, -limit, limit))

    def in_frame(self, geometry: Geometry | None) -> OrientedBoxes:
        if geometry is None:
            return self
        corners = geometry.points_to_frame(self.corners)
        return replace(self, boxes=geometry.to_frame(self.boxes), corners=corners)

    def as_dict(self, spec: ModelSpec) -> dict[str, Any]:
        """Return each object with its four corners, in pixels."""
        found = super().as_dict(spec)
        for each, corners in zip(found["detections"], np.round(self.corners.astype(float), 2).tolist(), strict=True):
            each["corners"] = corners
        return found

    def draw(self, picture: Picture, spec: ModelSpec) -> None:
        rows = zip(self.corners, self.classes.tolist(), self.scores.tolist(), strict=True)
        for corners, class_id, score in rows:
            draw_outline(picture, corners, f"{spec.label(class_id)} {score:.2f}", class_id)


class FrameCorners(FrameShapes[LabelledCorners, OrientedBoxes]):
    """All objects of a frame, each with four corners."""

    shape_key: ClassVar[str] = "corners"
    example: ClassVar[str] = '[{"class": 0, "corners": [[x1, y1], [x2, y2], [x3, y3], [x4, y4]]}]'
    accuracy: ClassVar[str] = "mean panoptic quality of the oriented boxes"
    unnamed: LabelledCorners | None = LabelledCorners(
        boxes=np.zeros((0, 4), np.float32), classes=np.zeros(0, np.int64), corners=np.zeros((0, 4, 2), np.float32)
    )

    def _objects(
        self, documents: Sequence[Mapping[str, Any]], classes: NDArray[np.int64], size: Size | None
    ) -> LabelledCorners:
        # A box may stick out of the frame: the object is cut off there.
        found = [numbers(each["corners"], (4, 2), "corners", (1.0, 0.0), size) for each in documents]
        corners = np.array([_convex(each) for each in found], np.float32).reshape(-1, 4, 2)
        boxes = np.hstack((corners.min(axis=1), corners.max(axis=1))).reshape(-1, 4)
        return LabelledCorners(boxes=boxes, classes=classes, corners=corners)

    def document(self, truth: LabelledCorners) -> list[dict[str, Any]]:
        corners = np.round(truth.corners.astype(float), 2).tolist()
        return [
            {"class": number, "corners": each} for number, each in zip(truth.classes.tolist(), corners, strict=True)
        ]

    def from_answer(self, answer: OrientedBoxes, size: Size) -> LabelledCorners:
        del size
        return LabelledCorners(boxes=answer.boxes, classes=answer.classes, corners=answer.corners)

    def answer_document(self, answer: OrientedBoxes) -> dict[str, Any]:
        return {**box_document(answer), "corners": np.round(answer.corners.astype(float), 2).tolist()}

    def read_answer(self, document: Mapping[str, Any]) -> OrientedBoxes:
        found = kept_boxes(document)
        return OrientedBoxes(**vars(found), corners=np.array(document["corners"], np.float32).reshape(len(found), 4, 2))

    def to_coco(self, document: Mapping[str, Any]) -> dict[str, Any]:
        corners = np.array(document["corners"])
        (left, top), (right, bottom) = corners.min(axis=0).tolist(), corners.max(axis=0).tolist()
        area = round(float(_area(corners)), 2)
        return {
            "bbox": [left, top, round(right - left, 2), round(bottom - top, 2)],
            "area": area,
            "segmentation": [corners.ravel().tolist()],
        }

    def from_coco(self, box: Sequence[float], outline: Any, keypoints: Any, size: Size) -> dict[str, Any]:
        """Return the four corners of a polygon, of the least rectangle around any other outline, or of the box."""
        del keypoints
        if not outline:
            left, top, right, bottom = box
            return {"corners": [left, top, right, top, right, bottom, left, bottom]}
        if isinstance(outline, list) and len(outline) == 1 and isinstance(outline[0], list) and len(outline[0]) == 8:
            return {"corners": outline[0]}
        return {"corners": _least_rectangle(sound_outline(outline, size)).tolist()}


def _convex(corners: FloatArray) -> FloatArray:
    """Return corners that go around a convex shape; of others those of the least rectangle. Raises LabelError."""
    if not cv2.isContourConvex(corners):
        corners = np.asarray(cv2.boxPoints(cv2.minAreaRect(corners)), np.float32)
    if _area(corners) < _LEAST_AREA:
        found = f"corners {corners.ravel().tolist()}"
        raise LabelError("labels.shape", found, "a box with an area", "correct the object, or remove it")
    return corners


class Obb(Detect):
    """Oriented boxes with classes and scores.

    - `yolov8`, `end2end`: Ultralytics' models since YOLOv8: cx cy w h, and an angle in radians, of which a positive one
      turns x towards y.
    - `dbnet`: text, of one class, from a map of probabilities (PaddleOCR).

    A decoder of the user's own returns `OrientedBoxes`.
    """

    decoders: ClassVar[tuple[str, ...]] = ("yolov8", "end2end", "dbnet")
    nvinfer_remark: ClassVar[str] = "the objects of nvinfer have no angle: read the tensors in a probe"
    labels: ClassVar[LabelKind[Any, Any] | None] = FrameCorners()
    max_loss: ClassVar[float] = OVERLAP_LOSS
    certified_loss: ClassVar[float] = OVERLAP_LOSS

    def _candidate_decoder(self, size: Size) -> Callable[[Outputs], Detections]:
        decode, is_end2end = EXTENDED_DECODERS.get(self.spec.decoder or ""), self.spec.decoder == "end2end"
        threshold = self.spec.score_threshold

        def find_text(outputs: Outputs) -> OrientedBoxes:
            corners, scores = text_regions(outputs, size, threshold)
            return OrientedBoxes.around(corners, np.zeros(len(scores), np.int64), scores)

        if self.spec.decoder == "dbnet":
            return find_text
        if decode is None:
            return super()._candidate_decoder(size)

        def find(outputs: Outputs) -> OrientedBoxes:
            found = decode(outputs, size, threshold, 1)
            assert isinstance(found, Candidates), "an extra column was asked for"
            if is_end2end:
                centres, sides = found.boxes[:, :2], found.boxes[:, 2:]
            else:  # corners of the box before it was turned
                centres = (found.boxes[:, :2] + found.boxes[:, 2:]) / np.float32(2.0)
                sides = found.boxes[:, 2:] - found.boxes[:, :2]
            return OrientedBoxes.around(turned(centres, sides, found.extras[:, 0]), found.classes, found.scores)

        return find

    def _suppressed(self, candidates: DetectionsT) -> DetectionsT:
        best = keep_best(candidates, MAX_CANDIDATES)
        if self.spec.iou_threshold >= 1.0 or not isinstance(best, OrientedBoxes):
            return best
        is_agnostic = self.spec.suppression == "agnostic"
        kept = np.ones(len(best), np.bool_)
        for first in range(0, len(best), _BLOCK):  # one by one takes a millisecond each
            block = first + kept[first : first + _BLOCK].nonzero()[0]
            rest = first + kept[first:].nonzero()[0]
            wanted = rest > block[:, np.newaxis]
            if not is_agnostic:
                wanted &= best.classes[rest] == best.classes[block, np.newaxis]
            overlaps = corner_ious(best.corners[block], best.corners[rest], wanted) > self.spec.iou_threshold
            for index, is_overlapped in zip(block, overlaps, strict=True):
                if kept[index]:
                    kept[rest[is_overlapped]] = False
        return best[kept]

    def _finished(self, found: Detections, outputs: Outputs, size: Size) -> OrientedBoxes:
        del outputs, size
        if not isinstance(found, OrientedBoxes):
            raise self._wrong_result(found, "OrientedBoxes, each with four corners")
        return found

    @property
    def label_row(self) -> RowForm:
        return CORNER_ROW

    def evaluation(self, answered: Iterable[tuple[OrientedBoxes, LabelledObjects]]) -> Evaluation:
        """Return COCO's mean average precision by the IoU of oriented boxes, and F1 at the spec's score threshold."""
        from agent.vision.tasks.average_precision import AveragePrecision

        def ious(found: Sequence[Mapping[str, Any]], truth: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
            first, second = (np.array([one["corners"] for one in each], np.float32) for each in (found, truth))
            return corner_ious(first, second)

        precision = AveragePrecision(self.spec.task, ious=ious)
        for answer, truth in answered:
            shapes = [{"corners": each, "area": float(_area(each))} for each in answer.corners]
            corners = [_least_rectangle(each) for each in outlines_of(truth)]
            true_shapes = [{"corners": each, "area": float(_area(each))} for each in corners]
            precision.add(answer, truth, shapes, true_shapes)
        return precision.mean(self.spec.score_threshold)


def turned(centres: FloatArray, sides: FloatArray, angles: FloatArray) -> FloatArray:
    """Return the corners float32 (n, 4, 2) of rectangles.

    Args:
        centres: (n, 2), x y.
        sides: (n, 2), width and height.
        angles: (n,), in radians; a positive one turns x towards y.

    >>> turned(np.float32([[0, 0]]), np.float32([[4, 2]]), np.float32([np.pi / 2])).round(3).tolist()
    [[[1.0, -2.0], [1.0, 2.0], [-1.0, 2.0], [-1.0, -2.0]]]
    """
    offsets = _CORNERS * sides[:, np.newaxis]
    cos, sin = np.cos(angles)[:, np.newaxis], np.sin(angles)[:, np.newaxis]
    x, y = offsets[..., 0] * cos - offsets[..., 1] * sin, offsets[..., 0] * sin + offsets[..., 1] * cos
    corners: FloatArray = centres[:, np.newaxis] + np.stack((x, y), axis=2)
    return corners


def corner_ious(found: FloatArray, truth: FloatArray, wanted: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """Return the IoU of every convex shape (n, 4, 2) with every other one (m, 4, 2), float64 (n, m).

    It is 1 for equal ones, also for those without an area.

    wanted: bool (n, m), the pairs that are asked for; None: all.
    """

    def common(some: NDArray[np.intp], other: NDArray[np.intp]) -> NDArray[np.float64]:
        return common_areas(found[some], truth[other])

    bounds = [np.hstack((each.min(axis=1), each.max(axis=1))) for each in (found, truth)]
    areas = _sound_area(found, bounds[0]), _sound_area(truth, bounds[1])
    ious = shape_ious(bounds[0], bounds[1], common, areas, wanted)
    are_equal = (found[:, np.newaxis] == truth).all(axis=(2, 3))
    ious[are_equal if wanted is None else are_equal & wanted] = 1.0
    return ious


def common_areas(found: FloatArray, truth: FloatArray) -> NDArray[np.float64]:
    """Return the area of each pair of convex shapes that both cover: (n, 4, 2) and (n, 4, 2) to float64 (n,).

    The first is clipped by one side of the second after the other (Sutherland and Hodgman 1974). Where others have more
    corners, the last one is repeated, which adds no area. OpenCV's intersectConvexConvex is no choice here: of boxes
    whose sides nearly coincide, as float's and INT8's do, it loses up to all of their area.
    """
    places, clip = found.astype(np.float64), truth.astype(np.float64)
    turn = np.sign(_cross(clip[:, 2] - clip[:, 0], clip[:, 3] - clip[:, 1]))[:, np.newaxis]
    for side in range(4):
        start, end = clip[:, np.newaxis, side], clip[:, np.newaxis, (side + 1) % 4]
        inner = turn * _cross(end - start, places - start)  # positive for corners that stay
        nexts, next_inner = np.roll(places, -1, axis=1), np.roll(inner, -1, axis=1)
        stays, crosses = inner >= 0.0, (inner >= 0.0) != (next_inner >= 0.0)
        share = np.divide(inner, inner - next_inner, out=np.zeros_like(inner), where=crosses)
        crossings = places + share[..., np.newaxis] * (nexts - places)
        both = np.stack((places, crossings), axis=2).reshape(len(places), -1, 2)
        kept = np.stack((stays, crosses), axis=2).reshape(len(places), -1)
        counts = kept.sum(axis=1, keepdims=True)
        # Those that are kept come first; after the last of them it is repeated.
        order = np.argsort(~kept, axis=1, kind="stable")
        numbers = np.minimum(np.arange(max(1, counts.max(initial=0))), np.maximum(counts - 1, 0))
        places = np.take_along_axis(both, np.take_along_axis(order, numbers, axis=1)[..., np.newaxis], axis=1)
        places[counts[:, 0] == 0] = 0.0  # nothing is left
    from_first = places - places[:, :1]
    areas: NDArray[np.float64] = np.abs(_cross(from_first, np.roll(from_first, -1, axis=1)).sum(axis=1)) / 2.0
    return areas


def _cross(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    product: NDArray[np.float64] = first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0]
    return product


def _area(corners: FloatArray) -> NDArray[np.float64]:
    """Return the area of shapes (..., 4, 2), by their diagonals."""
    first, second = ((corners[..., end, :] - corners[..., end - 2, :]).astype(np.float64) for end in (2, 3))
    areas: NDArray[np.float64] = np.abs(_cross(first, second)) / 2.0
    return areas


def _sound_area(corners: FloatArray, bounds: FloatArray) -> NDArray[np.float64]:
    """Return the area of shapes (n, 4, 2) between these bounds (n, 4), 0 where it is no more than rounding."""
    sides = (bounds[:, 2:] - bounds[:, :2]).max(axis=1).astype(np.float64)
    areas = _area(corners)
    return np.where(areas > _ROUNDING * sides * np.abs(bounds).max(axis=1), areas, 0.0)


def _least_rectangle(outline: Any) -> FloatArray:
    """Return the corners (4, 2) of the least rectangle around an outline in COCO's terms; 0 around an empty mask."""
    if isinstance(outline, list):
        points = np.concatenate([np.array(each, np.float32).reshape(-1, 2) for each in outline])
    else:
        cells = np.argwhere(mask_of_runs(outline["counts"], outline["size"]))
        points = cells.astype(np.float32)[:, ::-1] + np.float32(0.5)
    return np.asarray(cv2.boxPoints(cv2.minAreaRect(points)), np.float32) if len(points) else np.zeros((4, 2), "f4")
