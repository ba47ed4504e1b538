"""The task pose: objects with classes, scores and key points, or the key points of the one object in the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.vision.boxes import COVERED, FloatArray, LabelledBoxes, Size, iou_matrix
from agent.vision.datasets.object_rows import RowForm, point_row
from agent.vision.decoders import EXTENDED_DECODERS, Candidates, Outputs, no_fit
from agent.vision.detections import Detections
from agent.vision.drawing import Picture, draw_points
from agent.vision.labels import LabelError, LabelKind, checked_box
from agent.vision.preprocess import Geometry
from agent.vision.shape_labels import FrameShapes, numbers
from agent.vision.spec import ModelSpec
from agent.vision.tasks.detect import Detect, box_document, kept_boxes
from agent.vision.tasks.maps import find_maps
from agent.vision.tasks.scores import Evaluation
from agent.vision.tasks.shapes import Shapes, comparable, points_of
from agent.vision.tasks.task import See, disordered, mirrored

if TYPE_CHECKING:  # Self is in `typing` since Python 3.11
    from typing_extensions import Self

    from agent.vision.datasets.labelled_images import LabelledObjects

SEEN = 0.5  # the score from which on a key point is seen, of several objects
FAR = 0.05  # by the object's longer side: a key point farther away is elsewhere
# COCO's, as it lists them: nose, eyes, ears, shoulders, elbows, wrists, hips, knees, ankles (cocodataset.org).
COCO_SIGMAS = (
    0.026, 0.025, 0.025, 0.035, 0.035, 0.079, 0.079, 0.072, 0.072, 0.062, 0.062, 0.107, 0.107, 0.087, 0.087, 0.089,
    0.089,
)  # fmt: skip
# Pairs of its key points, from 0.
COCO_SKELETON = (
    (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10),
    (0, 1), (0, 2), (1, 3), (2, 4),
)  # fmt: skip
COCO_NAMES = (
    "nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
    "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle",
    "right_ankle",
)  # fmt: skip
_WITH_VISIBILITY = 5  # x, y, z, visibility, presence
_OF_ONE = ("heatmaps", "landmarks")  # decoders of the one object in the picture
_LEAST_SCORE = 1e-6
_SIGMA = 0.05  # for key points that nobody has measured: some 5 % of the object's side


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledPoints(LabelledBoxes):
    """Hold the objects of one image with their key points, as people label them.

    Args:
        points: float32 (n, k, 3): x, y, and COCO's visibility: 0 not labelled, 1 hidden, 2 visible.
    """

    points: FloatArray

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Which key points are labelled: bool (n, k)."""
        return self.points[..., 2] > 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Poses(Shapes):
    """Hold the objects of one image with their key points.

    Args:
        points: float32 (n, k, 3): x, y, and a score in [0, 1].
        sigmas: of each key point, how far people's labels scatter, by the root of an object's area; a tuple.
        is_one: The picture is of one object, whose box is around its key points.
        seen_from: The score from which on a key point is seen.
    """

    points: FloatArray
    sigmas: tuple[float, ...]
    is_one: bool = False
    seen_from: float = SEEN

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Which key points are seen: bool (n, k)."""
        return self.points[..., 2] >= self.seen_from

    def overlaps(self, truth: LabelledBoxes, wanted: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Return the object keypoint similarity (COCO) of every object with every object of the other answer.

        A key point that only one of the two sees counts as far as `_agreement` says. Where neither sees any, the boxes'
        IoU counts. Distances are measured by the smaller object of both. Against a label, its own size and its key
        points count, and those alone, whatever the score of this answer's.
        """
        assert isinstance(truth, (Poses, LabelledPoints)), "poses are compared with poses"
        is_label = isinstance(truth, LabelledPoints)
        similarity = iou_matrix(self.boxes, truth.boxes)
        if not len(truth):  # a label that says so knows no number of key points
            return similarity
        areas, true_areas = _areas(self), _areas(truth)
        within = np.broadcast_to(true_areas, similarity.shape) if is_label else np.minimum.outer(areas, true_areas)
        spread = 2.0 * np.square(2.0 * np.asarray(self.sigmas))
        compared = comparable(self.boxes, truth.boxes, wanted)
        for index, (points, seen) in enumerate(zip(self.points, self.seen, strict=True)):
            others = slice(None) if compared is None else compared[index].nonzero()[0]
            expected, shown = truth.points[others], truth.seen[others]
            squares = np.square(expected[..., :2].astype(np.float64) - points[:, :2]).sum(axis=2)
            squares /= within[index, others][:, np.newaxis] * spread
            counted = shown if is_label else seen | shown
            agreement = counted if is_label else self._agreement(expected[..., 2], points[:, 2]) * counted
            near, counts = (np.exp(-squares) * agreement).sum(axis=1), counted.sum(axis=1)
            boxes = similarity[index, others]
            similarity[index, others] = np.divide(near, counts, out=boxes.copy(), where=counts > 0)
        if compared is not None:
            similarity[~compared] = 0.0
        return similarity

    @property
    def is_empty(self) -> bool:
        """True where no object was found, and where the one object has no key point that is seen."""
        return not len(self) or (self.is_one and not self.seen.any())

    def fidelity(self, reference: Detections) -> float:
        """Return panoptic quality; of one object how near its key points are to the reference's, and its score.

        A point counts by a Gaussian of its distance, whose spread is FAR. So one point that has jumped costs no more
        than its share, where it would drown a mean of distances. A share of points that are near enough would hide that
        all have moved by a little less.
        """
        assert isinstance(reference, Poses), "poses are compared with poses"
        if not self.is_one:
            return super().fidelity(reference)
        if not (len(self) and len(reference)):
            return float(len(self) == len(reference))
        expected, found = reference.points[0], self.points[0]
        counted = reference.seen[0] | self.seen[0]
        if not counted.any():
            return 1.0
        squares = _squares(found, expected) / (FAR * min(_side(self), _side(reference))) ** 2
        near = np.exp(-squares / 2.0) * self._agreement(expected[:, 2], found[:, 2])
        apart = abs(float(self.scores[0]) - float(reference.scores[0]))
        return float(near[counted].mean()) * (1.0 - min(apart, 1.0))

    def accuracy(self, truth: LabelledBoxes) -> float | None:
        """Return panoptic quality; of one object the share of the labelled key points that are not far from there.

        It is None where the one object has no key point that is labelled.
        """
        assert isinstance(truth, LabelledPoints), "poses are compared with labels of poses"
        if not self.is_one or not (len(self) and len(truth)):
            return super().accuracy(truth)
        labelled = truth.seen[0]
        is_near = _squares(self.points[0], truth.points[0]) <= (FAR * _side(truth)) ** 2
        return float(is_near[labelled].mean()) if labelled.any() else None

    def _agreement(self, first: FloatArray, second: FloatArray) -> NDArray[np.float64]:
        """Return how far two scores of each key point agree that it is seen, in [0, 1].

        It is 1 on one side of `seen_from`. Beyond that a difference of as much is a miss, and a smaller one a part of
        it: scores nearby cross it by chance.
        """
        is_alike = (first >= self.seen_from) == (second >= self.seen_from)
        apart = np.abs(first.astype(np.float64) - second)
        return np.where(is_alike, 1.0, 1.0 - np.minimum(apart / max(self.seen_from, _LEAST_SCORE), 1.0))

    def bounded(self, limit: float) -> Self:
        least, most = np.array([(-limit, -limit, 0.0), (limit, limit, 1.0)], np.float32)
        return replace(super().bounded(limit), points=np.clip(self.points, least, most))

    def in_frame(self, geometry: Geometry | None) -> Poses:
        if geometry is None:
            return self
        points = np.dstack((geometry.points_to_frame(self.points[..., :2]), self.points[..., 2:]))
        return replace(self, boxes=geometry.to_frame(self.boxes), points=points)

    def as_dict(self, spec: ModelSpec) -> dict[str, Any]:
        """Return each object with its key points: x, y in pixels, and the score."""
        found = super().as_dict(spec)
        for each, points in zip(found["detections"], self.points.astype(float).tolist(), strict=True):
            each["keypoints"] = [[round(x, 2), round(y, 2), round(score, 4)] for x, y, score in points]
        return found

    def draw(self, picture: Picture, spec: ModelSpec) -> None:
        if not self.is_one:
            super().draw(picture, spec)
        skeleton = COCO_SKELETON if self.points.shape[1] == len(COCO_SIGMAS) else ()
        for points, seen, class_id in zip(self.points[..., :2], self.seen, self.classes.tolist(), strict=True):
            draw_points(picture, points, seen, skeleton, class_id)


class FramePoints(FrameShapes[LabelledPoints, Poses]):
    """All objects of a frame, with their key points.

    Args:
        names: Of an object's key points; None: any number of them is one.
        is_one: The model has the key points of one object.
    """

    shape_key: ClassVar[str] = "keypoints"
    example: ClassVar[str] = '[{"class": 0, "keypoints": [x1, y1, 2, x2, y2, 0]}]'
    accuracy: ClassVar[str] = "mean panoptic quality of the key points; of one object, the share of its points"

    def __init__(self, names: Sequence[str] | None = None, is_one: bool = False) -> None:
        self._names, self._is_one = names, is_one
        count = len(names or ())
        empty = np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros((0, count, 3), np.float32)
        self.unnamed = LabelledPoints(boxes=empty[0], classes=empty[1], points=empty[2])

    def fitted(self, spec: ModelSpec) -> FramePoints:
        count = spec.keypoint_count
        names = COCO_NAMES if count == len(COCO_NAMES) else tuple(map(str, range(1, count + 1)))
        return FramePoints(spec.keypoints if isinstance(spec.keypoints, tuple) else names, spec.decoder in _OF_ONE)

    def _objects(
        self, documents: Sequence[Mapping[str, Any]], classes: NDArray[np.int64], size: Size | None
    ) -> LabelledPoints:
        if self._is_one and len(documents) > 1:
            found = f"{len(documents)} objects"
            raise LabelError("labels.shape", found, "one: the model has the key points of one", "remove the others")
        count = len(self._names) if self._names is not None else -1
        points = [self._points(each["keypoints"], count, size) for each in documents]
        if len({len(each) for each in points}) > 1:
            found, expected = "objects with different numbers of key points", "as many in each"
            raise LabelError("labels.shape", found, expected, "correct the label")
        boxes = [self._box(each, row, size) for each, row in zip(documents, points, strict=True)]
        return LabelledPoints(
            boxes=np.array(boxes, np.float32).reshape(-1, 4),
            classes=classes,
            points=np.array(points, np.float32).reshape(len(points), len(points[0]) if points else max(count, 0), 3),
        )

    def _points(self, given: Any, count: int, size: Size | None) -> FloatArray:
        points = numbers(given, (count, 3), "key points", (0.0, np.inf), size)
        if not np.isin(points[:, 2], (0.0, 1.0, 2.0)).all():
            found, expected = f"key points {given!s:.80}", "x, y and a visibility of 0, 1 or 2 each"
            raise LabelError("labels.shape", found, expected, "correct the label")
        labelled = points[:, 2] > 0.0
        numbers(points[labelled], (-1, 3), "key points", (0.0, 1.0), size)  # what is not labelled may be anywhere
        return np.where(labelled[:, np.newaxis], points, np.float32(0.0))

    def _box(self, document: Mapping[str, Any], points: FloatArray, size: Size | None) -> Sequence[float]:
        if document.get("box") is not None:
            return checked_box(document["box"], size)
        places = points[points[:, 2] > 0.0, :2]
        return (*places.min(axis=0), *places.max(axis=0)) if len(places) else (0.0, 0.0, 0.0, 0.0)

    def document(self, truth: LabelledPoints) -> list[dict[str, Any]]:
        rows = zip(truth.classes.tolist(), truth.boxes, truth.points, strict=True)
        return [
            {"class": number, "box": _rounded(box), "keypoints": _rounded(points.ravel())}
            for number, box, points in rows
        ]

    def from_answer(self, answer: Poses, size: Size) -> LabelledPoints:
        """Return the key points that are seen; one beyond the frame is not."""
        x, y = answer.points[..., 0], answer.points[..., 1]
        seen = answer.seen & (x >= 0.0) & (y >= 0.0) & (x <= size[1]) & (y <= size[0])
        points = np.dstack((answer.points[..., :2], np.full(seen.shape, 2.0))) * seen[..., np.newaxis]
        boxes = np.clip(answer.boxes, 0.0, np.array(size[::-1] * 2, np.float32))
        return LabelledPoints(boxes=boxes, classes=answer.classes, points=points.astype(np.float32))

    def answer_document(self, answer: Poses) -> dict[str, Any]:
        points = np.round(answer.points.astype(float), 4).tolist()
        kept = {"sigmas": [*answer.sigmas], "is_one": answer.is_one, "seen_from": answer.seen_from}
        return {**box_document(answer), "points": points, **kept}

    def read_answer(self, document: Mapping[str, Any]) -> Poses:
        found, sigmas = kept_boxes(document), tuple(map(float, document["sigmas"]))
        points = np.array(document["points"], np.float32).reshape(len(found), len(sigmas), 3)
        seen_from = float(document.get("seen_from", SEEN))  # earlier ones have none
        return Poses(
            **vars(found), points=points, sigmas=sigmas, is_one=document["is_one"] is True, seen_from=seen_from
        )

    def coco_category(self) -> dict[str, Any]:
        names = self._names or ()
        pairs = [[first + 1, second + 1] for first, second in COCO_SKELETON] if len(names) == len(COCO_NAMES) else []
        return {"keypoints": [*names], "skeleton": pairs}

    def to_coco(self, document: Mapping[str, Any]) -> dict[str, Any]:
        points = document["keypoints"]
        return {**super().to_coco(document), "keypoints": points, "num_keypoints": sum(v > 0 for v in points[2::3])}

    def from_coco(self, box: Sequence[float], outline: Any, keypoints: Any, size: Size) -> dict[str, Any]:
        del outline, size
        return {"box": box, "keypoints": keypoints}


class Pose(Detect):
    """Objects with key points.

    - `yolov8`, `end2end`: Ultralytics' pose models, x y or x y and a score of each key point behind the classes.
    - `heatmaps`: one object; each key point is where its map, (k, h, w) or (h, w, k), is largest after a blur.
    - `landmarks`: one object; one output (k * d) with x, y in pixels, d from 2 on, and for d = 5 a logit of its
      visibility behind z (MediaPipe's pose, hand and face models).

    Key points of several objects are seen from a score of 0.5 on. Those of one object are seen from the score threshold
    on, which also the mean of their scores has to exceed: networks differ in how high their maps peak.

    A decoder of the user's own returns `Poses`.
    """

    decoders: ClassVar[tuple[str, ...]] = ("yolov8", "end2end", "heatmaps", "landmarks")
    keys: ClassVar[frozenset[str]] = frozenset(("nms", "keypoints", "sigmas"))
    needed_keys: ClassVar[Mapping[str, str]] = {"keypoints": "how many key points an object has, or their names"}
    nvinfer_remark: ClassVar[str] = "the objects of nvinfer have no key points: read the tensors in a probe"
    labels: ClassVar[LabelKind[Any, Any] | None] = FramePoints()
    # A point of AP by key points, on persons of COCO, is gone at 0.19 on BlazePose and 0.32 on CPM. On the sample's
    # head, whose labels are exact, it is at 0.05, below plain INT8's 0.07. Plans of BlazePose have 89 % of the MACs in
    # INT8 at 0.18, and 82 % at 0.15; both keep the AP.
    max_loss: ClassVar[float] = 0.18
    certified_loss: ClassVar[float] = 0.18

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Those of the spec; COCO's for its 17 key points, else the same for each."""
        count = self.spec.keypoint_count
        if self.spec.sigmas:
            return self.spec.sigmas
        return COCO_SIGMAS if count == len(COCO_SIGMAS) else (_SIGMA,) * count

    def _candidate_decoder(self, size: Size) -> Callable[[Outputs], Detections]:
        name, threshold, count = self.spec.decoder or "", self.spec.score_threshold, self.spec.keypoint_count
        decode = EXTENDED_DECODERS.get(name)
        if decode is not None:
            return lambda outputs: self._several(decode(outputs, size, threshold, self._extras(outputs)))
        if name == "heatmaps":
            return lambda outputs: self._one(_from_heatmaps(outputs, size, count))
        if name == "landmarks":
            return lambda outputs: self._one(_from_landmarks(outputs, count))
        return super()._candidate_decoder(size)

    def _extras(self, outputs: Outputs) -> int:
        """Return how many columns the key points have: two or three each, as the number of classes tells."""
        count, classes = self.spec.keypoint_count, max(1, len(self.spec.labels))
        known = 6 if self.spec.decoder == "end2end" else 4 + classes
        for output in outputs.values():
            for length in output.shape[-2:]:
                if output.ndim == 2 and length - known in (2 * count, 3 * count):
                    return int(length - known)
        expected = (
            f"{known} channels and {count} key points of two or three: {known + 2 * count} or {known + 3 * count}"
        )
        raise no_fit(outputs, f"one output with {expected}")

    def _several(self, found: Detections) -> Poses:
        """Return the poses of objects, whose key points follow the classes."""
        assert isinstance(found, Candidates), "columns of key points were asked for"
        count = self.spec.keypoint_count
        points = found.extras.reshape(len(found), count, found.extras.shape[1] // count)
        if points.shape[2] == 2:
            points = np.insert(points, 2, np.float32(1.0), axis=2)
        boxes, classes, scores = found.boxes, found.classes, found.scores
        return Poses(boxes=boxes, classes=classes, scores=scores, points=points, sigmas=self.sigmas)

    def _one(self, points: FloatArray) -> Poses:
        """Return the pose of the one object, whose score is the mean of its key points'.

        Its key points are seen from the spec's score threshold on: so an object that is found has one. A key point that
        is not finite is not seen.
        """
        points = np.where(np.isfinite(points).all(axis=1, keepdims=True), points, np.float32(0.0))
        seen_from = self.spec.score_threshold
        is_seen = points[:, 2] >= seen_from
        seen = points[is_seen] if is_seen.any() else points
        box = np.hstack((seen[:, :2].min(axis=0), seen[:, :2].max(axis=0)))[np.newaxis]
        score, classes = points[:, 2].mean(keepdims=True), np.zeros(1, np.int64)
        return Poses(
            boxes=box,
            classes=classes,
            scores=score,
            points=points[np.newaxis],
            sigmas=self.sigmas,
            is_one=True,
            seen_from=seen_from,
        )

    def _finished(self, found: Detections, outputs: Outputs, size: Size) -> Poses:
        del outputs, size
        if not isinstance(found, Poses):
            raise self._wrong_result(found, "Poses, each with key points")
        return found

    @property
    def expects_crops(self) -> bool:
        return self.spec.decoder in _OF_ONE

    def confirmed(self, see: See, image: Picture) -> tuple[float, float]:
        """Return how far the mirrored frame confirms the key points of the one object, twice; objects by their boxes.

        What the frame in disorder, its tiles exchanged, has in the same places is taken off: a network that is fed
        wrongly puts the points where they are on average.
        """
        if not self.expects_crops:
            return super().confirmed(see, image)
        seen, turned, scattered = (see(view)[1] for view in (image, mirrored(image), disordered(image)))
        if seen.is_empty or turned.is_empty:
            return 0.0, 0.0
        points = turned.points * np.array((-1.0, 1.0, 1.0), np.float32)
        points[..., 0] += np.float32(image.shape[1])
        agreement = _shared(seen, replace(turned, points=points)) - _shared(seen, scattered)
        return max(0.0, agreement), max(0.0, agreement)

    @property
    def label_row(self) -> RowForm:
        return point_row(self.spec.keypoint_count)

    def evaluation(self, answered: Iterable[tuple[Poses, LabelledObjects]]) -> Evaluation:
        """Return COCO's mean average precision by object keypoint similarity."""
        from agent.vision.tasks.average_precision import AveragePrecision

        precision = AveragePrecision(self.spec.task, "keypoints", self.sigmas)
        count = self.spec.keypoint_count
        for answer, truth in answered:
            true_points = [
                {"keypoints": each.ravel().tolist(), "num_keypoints": int((each[:, 2] > 0.0).sum())}
                for each in points_of(truth, count)
            ]
            shapes = [{"keypoints": each.ravel().tolist()} for each in answer.points]
            precision.add(answer, truth, shapes, true_points)
        return precision.mean()


def _shared(first: Poses, second: Poses) -> float:
    """Return how near the key points of two poses are, in [0, 1]: the mean over the pairs that fit best.

    A pair counts by the root of the product of its scores, times a Gaussian of its distance, of which the spread is
    twice what is far. In a mirrored frame left and right change places, so that any point may be the other's.
    """
    if first.is_empty or second.is_empty:
        return 0.0
    from scipy.optimize import linear_sum_assignment  # slow to import, and no frame path needs it

    (ours, theirs), side = (each.points[0].astype(np.float64) for each in (first, second)), _side(first)
    squares = np.square(ours[:, np.newaxis, :2] - theirs[np.newaxis, :, :2]).sum(axis=2)
    near = np.exp(-squares / (2.0 * (2.0 * FAR * side) ** 2)) * np.sqrt(ours[:, np.newaxis, 2] * theirs[:, 2])
    return float(near[linear_sum_assignment(near, maximize=True)].mean())


def _squares(found: FloatArray, expected: FloatArray) -> NDArray[np.float64]:
    """Return the squared distance of each key point, (k,), from (k, 3) and (k, 3)."""
    squares: NDArray[np.float64] = np.square(found[:, :2].astype(np.float64) - expected[:, :2]).sum(axis=1)
    return squares


def _areas(poses: LabelledBoxes) -> NDArray[np.float64]:
    """Return the area of each object, (n,), at least a pixel, by its box."""
    sides = (poses.boxes[:, 2:] - poses.boxes[:, :2]).astype(np.float64)
    areas: NDArray[np.float64] = np.maximum(sides.prod(axis=1) * COVERED, 1.0)
    return areas


def _side(pose: LabelledBoxes) -> float:
    """Return the longer side of the first object, at least a pixel."""
    return max(float((pose.boxes[0, 2:] - pose.boxes[0, :2]).max()), 1.0)


def _rounded(values: FloatArray) -> list[float]:
    rounded: list[float] = np.round(values.astype(float), 2).tolist()
    return rounded


def _from_heatmaps(outputs: Outputs, size: Size, count: int) -> FloatArray:
    """Return the key points (k, 3) in pixels of the input: the middle of each map's largest cell, blurred 5 x 5."""
    found = find_maps({name: each.shape for name, each in outputs.items()}, size, count)
    if len({name for name, _ in found}) != 1:
        raise no_fit(outputs, f"one output with {count} heatmaps (batch, {count}, rows, columns), or channels last")
    name, axis = found[0]
    output = outputs[name][np.newaxis] if axis is None else outputs[name]
    maps = np.ascontiguousarray(np.moveaxis(output, axis or 0, 2), np.float32)
    maps = np.nan_to_num(maps, posinf=0.0, neginf=0.0)
    rows, columns = maps.shape[:2]
    blurred = np.asarray(cv2.GaussianBlur(maps, (5, 5), 0)).reshape(-1, count)
    y, x = np.divmod(blurred.argmax(axis=0), columns)
    scores = blurred.max(axis=0).clip(0.0, 1.0)
    return np.stack(((x + 0.5) * size[1] / columns, (y + 0.5) * size[0] / rows, scores), axis=1).astype(np.float32)


def _from_landmarks(outputs: Outputs, count: int) -> FloatArray:
    """Return the key points (k, 3) of the largest output whose values are `count` times 2 to 5, the first of several.

    MediaPipe's models have the same points in metres in a later output.
    """
    fitting = [each.ravel() for each in outputs.values() if each.size in [count * values for values in (2, 3, 4, 5)]]
    if not fitting:
        raise no_fit(outputs, f"one output with {count} key points of 2 to 5 values")
    rows = max(fitting, key=len).reshape(count, -1).astype(np.float32)
    scores: FloatArray = np.ones(count, np.float32)
    if rows.shape[1] == _WITH_VISIBILITY:
        with np.errstate(over="ignore"):
            scores = np.float32(1.0) / (np.float32(1.0) + np.exp(-rows[:, 3]))
    return np.column_stack((rows[:, :2], scores)).astype(np.float32)
