"""The task instance: boxes with classes and scores, and a mask of each object (instance segmentation)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agent.vision.boxes import FloatArray, LabelledBoxes, Size
from agent.vision.datasets.object_rows import OUTLINE_ROW, RowForm
from agent.vision.datasets.outlines import cells_inside
from agent.vision.decoders import EXTENDED_DECODERS, Candidates, Outputs, no_fit
from agent.vision.detections import Detections
from agent.vision.drawing import Picture
from agent.vision.labels import LabelKind
from agent.vision.preprocess import Geometry
from agent.vision.shape_labels import FrameOutlines, LabelledOutlines, kept_size, outlined
from agent.vision.spec import ModelSpec
from agent.vision.tasks.detect import Detect, box_document, kept_boxes
from agent.vision.tasks.maps import encoded, enlarged, has_proportions, mask_of_runs, part_of_frame, run_lengths
from agent.vision.tasks.scores import Evaluation
from agent.vision.tasks.segment import NOTHING, LabelMap
from agent.vision.tasks.shapes import OVERLAP_LOSS, Shapes, comparable, outlines_of, shape_ious
from engines.interface import Array

if TYPE_CHECKING:
    from agent.vision.datasets.labelled_images import LabelledObjects

_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1).sum(axis=1).astype(np.uint8)  # in a byte

Bits = NDArray[np.uint8]


@dataclass(frozen=True, eq=False, kw_only=True)
class Instances(Shapes):
    """Hold the objects of one image with their masks.

    Args:
        masks: uint8 (n, rows, bytes), whose bits are the cells of each row, the first in the highest bit.
        columns: How many cells a row has.
        covered: (height, width) in pixels of the network input, or of the frame, that a mask covers.
    """

    masks: Bits
    columns: int
    covered: Size

    def overlaps(self, truth: LabelledBoxes, wanted: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Return the IoU of every mask with every mask of the other answer, which has as many cells."""
        own = self
        if isinstance(truth, LabelledOutlines):
            own = self._within(self.covered)
            truth = own._instances(truth)
        assert isinstance(truth, Instances), "instances are compared with instances"
        masks, others = own.masks, truth.masks

        def common(some: NDArray[np.intp], other: NDArray[np.intp]) -> NDArray[np.float64]:
            return _cells(masks[some] & others[other])

        compared = comparable(self.boxes, truth.boxes, wanted)
        return shape_ious(self.boxes, truth.boxes, common, (_cells(masks), _cells(others)), compared)

    def _within(self, size: Size) -> Instances:
        """Return the instances with at most a cell for each pixel of a picture of this (height, width)."""
        rows, columns = min(self.masks.shape[1], size[0]), min(self.columns, size[1])
        if (rows, columns) == (self.masks.shape[1], self.columns):
            return self
        masks = [enlarged(self.mask(index), (rows, columns)) for index in range(len(self))]
        return replace(self, masks=_packed(masks, (rows, columns)), columns=columns)

    def _instances(self, truth: LabelledOutlines) -> Instances:
        """Return the objects of a label of the same frame, in as many cells as these."""
        grid = self.masks.shape[1], self.columns
        masks = [cells_inside(each, self.covered, grid) for each in truth.outlines]
        scores = np.ones(len(truth), np.float32)
        return replace(self, boxes=truth.boxes, classes=truth.classes, scores=scores, masks=_packed(masks, grid))

    def mask(self, index: int) -> NDArray[np.bool_]:
        """Return the mask of one object, bool (rows, columns)."""
        return np.unpackbits(self.masks[index], axis=1, count=self.columns).view(np.bool_)

    def in_frame(self, geometry: Geometry | None) -> Instances:
        """Return the instances with the part of their masks that the frame covers, at the masks' own resolution."""
        if geometry is None:
            return self
        masks = np.unpackbits(self.masks, axis=2, count=self.columns)
        part = part_of_frame(masks, self.covered, geometry, 0)
        return replace(
            self,
            boxes=geometry.to_frame(self.boxes),
            masks=np.packbits(part, axis=2),
            columns=part.shape[2],
            covered=(geometry.frame_height_px, geometry.frame_width_px),
        )

    def as_dict(self, spec: ModelSpec) -> dict[str, Any]:
        """Return each object with its mask in COCO's run-length encoding."""
        found = super().as_dict(spec)
        for index, each in enumerate(found["detections"]):
            each["mask"] = encoded(self.mask(index))
        return found

    def draw(self, picture: Picture, spec: ModelSpec) -> None:
        """Draw the masks, the best on top, and the boxes."""
        if not len(self):
            return
        classes = np.full((self.masks.shape[1], self.columns), NOTHING, np.int16)
        for index in np.argsort(self.scores, kind="stable"):
            classes[self.mask(index)] = self.classes[index]
        LabelMap(classes, self.covered).paint(picture)
        super().draw(picture, spec)


class FrameInstances(FrameOutlines[Instances]):
    """All objects of a frame, with their outlines."""

    accuracy: ClassVar[str] = "mean panoptic quality of the masks"

    def from_answer(self, answer: Instances, size: Size) -> LabelledOutlines:
        masks = [enlarged(answer.mask(index), size) for index in range(len(answer))]
        runs = [{"size": [*size], "counts": run_lengths(each)} for each in masks]
        shown = np.array([each.any() for each in masks], np.bool_)
        return outlined([each for each, is_shown in zip(runs, shown, strict=True) if is_shown], answer.classes[shown])

    def answer_document(self, answer: Instances) -> dict[str, Any]:
        return {
            **box_document(answer),
            "covered": [*answer.covered],
            "grid": [answer.masks.shape[1], answer.columns],
            "masks": [run_lengths(answer.mask(index)) for index in range(len(answer))],
        }

    def read_answer(self, document: Mapping[str, Any]) -> Instances:
        found, grid = kept_boxes(document), kept_size(document["grid"])
        masks = [mask_of_runs(each, grid) for each in document["masks"]]
        if len(masks) != len(found):
            raise ValueError("masks and boxes of different numbers")
        covered = kept_size(document["covered"])
        return Instances(**vars(found), masks=_packed(masks, grid), columns=grid[1], covered=covered)


class Instance(Detect):
    """Boxes with classes, scores and masks.

    A mask is the sum of the model's prototypes, (factors, rows, columns), times the object's factors, where that is
    above zero in its box (Bolya et al. 2019, YOLACT; Ultralytics' segmentation models since YOLOv5). A decoder of the
    user's own returns `Instances`.
    """

    decoders: ClassVar[tuple[str, ...]] = tuple(EXTENDED_DECODERS)
    nvinfer_remark: ClassVar[str] = (
        "masks from nvinfer itself: network-type=3, output-instance-mask=1, parse-bbox-instance-mask-func-name and "
        "custom-lib-path of your parser"
    )
    labels: ClassVar[LabelKind[Any, Any] | None] = FrameInstances()
    max_loss: ClassVar[float] = OVERLAP_LOSS
    certified_loss: ClassVar[float] = OVERLAP_LOSS

    def _candidate_decoder(self, size: Size) -> Callable[[Outputs], Detections]:
        decode = EXTENDED_DECODERS.get(self.spec.decoder or "")
        if decode is None:
            return super()._candidate_decoder(size)
        threshold = self.spec.score_threshold
        return lambda outputs: decode(outputs, size, threshold, len(_prototypes(outputs, size)))

    def _finished(self, found: Detections, outputs: Outputs, size: Size) -> Instances:
        if isinstance(found, Instances):
            return found
        if not isinstance(found, Candidates):
            raise self._wrong_result(found, "Instances, each with a mask")
        prototypes = _prototypes(outputs, size).astype(np.float32, copy=False)
        masks = _masks(prototypes, found.extras, found.boxes, size)
        shown = masks.any(axis=(1, 2))  # an object without a cell is none
        return Instances(
            boxes=found.boxes[shown],
            classes=found.classes[shown],
            scores=found.scores[shown],
            masks=masks[shown],
            columns=prototypes.shape[2],
            covered=size,
        )

    @property
    def label_row(self) -> RowForm:
        return OUTLINE_ROW

    def evaluation(self, answered: Iterable[tuple[Instances, LabelledObjects]]) -> Evaluation:
        """Return COCO's mean average precision of masks."""
        from agent.vision.tasks.average_precision import AveragePrecision

        precision = AveragePrecision(self.spec.task, "segm")
        for answer, truth in answered:
            masks = (enlarged(answer.mask(index), truth.size) for index in range(len(answer)))
            shapes = [{"segmentation": encoded(each), "area": int(each.sum())} for each in masks]
            precision.add(answer, truth, shapes, [{"segmentation": each} for each in outlines_of(truth)])
        return precision.mean()


def _prototypes(outputs: Outputs, size: Size) -> Array:
    """Return the mask prototypes (factors, rows, columns). Raises ConfigError (`decoder.shape`)."""
    maps = [each for each in outputs.values() if each.ndim == 3 and has_proportions(each.shape[1:], size)]
    if len(maps) != 1:
        proportions = f"in the proportions of the input, {size[0]}x{size[1]}"
        expected = f"boxes, and one output with mask prototypes (batch, factors, rows, columns) {proportions}"
        raise no_fit(outputs, expected)
    return maps[0]


def _masks(prototypes: FloatArray, factors: FloatArray, boxes: FloatArray, size: Size) -> Bits:
    """Return the mask of each box, (n, rows, bytes): a cell is in a box whose bounds its middle is between."""
    _, rows, columns = prototypes.shape
    cells = boxes * np.array((columns / size[1], rows / size[0]) * 2, np.float32)
    bounds = np.clip(np.ceil(cells - 0.5), 0, (columns, rows) * 2).astype(int).tolist()
    masks = np.zeros((len(boxes), rows, columns), np.bool_)
    with np.errstate(all="ignore"):  # a broken engine may emit anything
        for mask, own, (left, top, right, bottom) in zip(masks, factors, bounds, strict=True):
            mask[top:bottom, left:right] = np.tensordot(own, prototypes[:, top:bottom, left:right], 1) > 0.0
    return np.packbits(masks, axis=2)


def _packed(masks: Sequence[NDArray[np.bool_]], grid: Size) -> Bits:
    """Return masks bool (rows, columns) as `Instances` holds them."""
    return np.packbits(np.array(masks, np.bool_).reshape(-1, *grid), axis=2)


def _cells(masks: Bits) -> NDArray[np.float64]:
    """Return how many cells each mask has."""
    cells: NDArray[np.float64] = _ONES[masks].sum(axis=(1, 2), dtype=np.float64)
    return cells
