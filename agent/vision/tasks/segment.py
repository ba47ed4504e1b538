"""The task segment: a class for each pixel (semantic segmentation), or one mask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.common.errors import DatasetError
from agent.vision.answer import Answer, ClassOverlap, Decoder, Hits, ServedClass, Wanted
from agent.vision.boxes import Part, Size
from agent.vision.datasets.outlines import cells_inside
from agent.vision.drawing import COLORS, Picture, draw_name
from agent.vision.labels import LabelKind
from agent.vision.policy import Policy
from agent.vision.preprocess import Geometry
from agent.vision.shape_labels import FrameOutlines, LabelledOutlines, kept_size, outlined
from agent.vision.spec import ModelSpec
from agent.vision.tasks.maps import encoded, find_maps, no_map, part_of_frame, run_lengths, without_padding
from agent.vision.tasks.scores import ClassScore, Evaluation
from agent.vision.tasks.task import ModelTask, See, disordered, image_of, mirrored
from engines.interface import Array, TensorSpec

if TYPE_CHECKING:
    from agent.vision.datasets.mask_images import MaskImages

NOTHING = -1  # the class of a pixel that shows none
_MOST_CLASSES = 1024  # as many squared are counted for a frame
_SAME_CLASS = 0.5  # IoU from which on a class is where the reference has it
_OPACITY = 0.5
_BACKGROUND = frozenset(("background", "bg"))  # names of class 0, in small letters and without `_` around them

Classes = NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class LabelMap(Answer):
    """Hold the class of each pixel.

    Args:
        classes: int16 (h, w), numbers of classes from 0, or NOTHING.
        covered: (height, width) in pixels of the network input, or of the frame, that the map covers.
        background: The class of a pixel that shows nothing of interest; NOTHING where no class means that.
    """

    classes: Classes
    covered: Size
    background: int = NOTHING

    @property
    def is_empty(self) -> bool:
        """True where no pixel shows anything but background."""
        return bool(((self.classes == NOTHING) | (self.classes == self.background)).all())

    @property
    def classes_seen(self) -> frozenset[int]:
        return frozenset(np.unique(self.classes).tolist()) - {NOTHING}

    def fidelity(self, reference: LabelMap) -> float:
        """Return the mean IoU over the classes in either map; 1 where both show nothing.

        Pixels that agree would say less: where most are background, a thin class that has gone changes few of them.
        """
        ious = class_ious(confusion(self.classes, reference.classes))
        return float(np.nanmean(ious)) if np.isfinite(ious).any() else 1.0

    def pairs(self, served: LabelMap | None) -> list[ServedClass]:
        """Return for each class of the frame the same one where IoU is 0.5, else that which most of its pixels have."""
        seen = sorted(self.classes_seen)
        if served is None:
            return [(each, None) for each in seen]
        counts = confusion(served.classes, self.classes)
        ious = class_ious(counts)
        pairs: list[ServedClass] = []
        for each in seen:
            most = int(counts[each + 1].argmax()) - 1
            instead = None if most in (NOTHING, each) else most
            pairs.append((each, each if ious[each] >= _SAME_CLASS else instead))
        return pairs

    def overlaps_by_class(self, served: LabelMap | None) -> list[ClassOverlap]:
        found = served.classes if served is not None else np.full_like(self.classes, NOTHING)
        both, either = _areas(confusion(found, self.classes))
        return [(int(each), int(both[each]), int(either[each])) for each in either.nonzero()[0]]

    def without_padding(self, part: Part, size: Size) -> LabelMap:
        return replace(self, classes=without_padding(self.classes, part, size, NOTHING))

    def accuracy(self, truth: LabelledOutlines) -> float | None:
        """Return the mean IoU over the classes in the map or in the label; a pixel without a label shows none."""
        own, labelled = self._compared_with(truth)
        return own.fidelity(labelled) if not (own.is_empty and labelled.is_empty) else None

    def hits(self, truth: LabelledOutlines, wanted: Wanted | None = None) -> Hits:
        """Return the classes of the map; one is right where its IoU with the label's is 0.5. None has a score."""
        own, labelled = self._compared_with(truth)
        found, shown = (np.array(sorted(each.classes_seen), np.int64) for each in (own, labelled))
        right = class_ious(confusion(own.classes, labelled.classes))[found] >= _SAME_CLASS
        if wanted is not None:
            is_wanted = wanted(found, None)
            found, right, shown = found[is_wanted], right[is_wanted], shown[wanted(shown, None)]
        return Hits(found, np.ones(len(found)), right, shown)

    def _compared_with(self, truth: LabelledOutlines) -> tuple[LabelMap, LabelMap]:
        """Return this map and a label's, of the same cells, at most one for each pixel of the frame."""
        height, width = (min(*sides) for sides in zip(self.classes.shape, self.covered, strict=True))
        classes = np.full((height, width), NOTHING, np.int16)
        for number, outline in zip(truth.classes.tolist(), truth.outlines, strict=True):
            classes[cells_inside(outline, self.covered, (height, width))] = number
        return self.resized((height, width)), LabelMap(classes, self.covered)

    def in_frame(self, geometry: Geometry | None) -> LabelMap:
        """Return the part of the map that the frame covers, at the map's own resolution."""
        if geometry is None:
            return self
        in_frame = part_of_frame(self.classes, self.covered, geometry, NOTHING)
        return replace(self, classes=in_frame, covered=(geometry.frame_height_px, geometry.frame_width_px))

    def resized(self, size: Size) -> LabelMap:
        """Return the map with one class for each pixel of a picture of this (height, width)."""
        if self.classes.shape == size:
            return self
        classes = cv2.resize(self.classes, (size[1], size[0]), interpolation=cv2.INTER_NEAREST_EXACT)
        return replace(self, classes=np.asarray(classes, np.int16), covered=size)

    def as_dict(self, spec: ModelSpec) -> dict[str, Any]:
        """Return for each class its share of the pixels, and its mask in COCO's run-length encoding."""
        return {
            "segments": [
                {
                    "class": number,
                    "label": spec.label(number),
                    "share": round(float((self.classes == number).mean()), 4),
                    "mask": encoded(self.classes == number),
                }
                for number in sorted(self.classes_seen)
            ]
        }

    def summary(self, spec: ModelSpec) -> str:
        """Return the classes with their shares of the pixels, the largest first."""
        shares = {each: float((self.classes == each).mean()) for each in self.classes_seen}
        largest = sorted(shares, key=lambda each: -shares[each])
        return ", ".join(f"{spec.label(each)} {shares[each]:.0%}" for each in largest) or "nothing"

    def draw(self, picture: Picture, spec: ModelSpec) -> None:
        """Paint the classes, each with its name where its area is widest."""
        self.paint(picture)
        height, width = self.classes.shape
        for number in sorted(self.classes_seen):
            inside = np.pad(self.classes == number, 1).astype(np.uint8)
            distances = cv2.distanceTransform(inside, cv2.DIST_L1, 3)
            row, column = np.unravel_index(distances.argmax(), distances.shape)
            x, y = (column - 0.5) * picture.shape[1] / width, (row - 0.5) * picture.shape[0] / height
            draw_name(picture, spec.label(number), (int(x), int(y)), number)

    def paint(self, picture: Picture) -> None:
        """Lay the colour of each class over the picture."""
        classes = self.resized((picture.shape[0], picture.shape[1])).classes
        shown = classes != NOTHING
        colors = np.array(COLORS, np.uint8)[classes % len(COLORS)]
        picture[shown] = cv2.addWeighted(picture, 1.0 - _OPACITY, colors, _OPACITY, 0.0)[shown]

    def shown(self, policy: Policy, camera: str, geometry: Geometry | None) -> LabelMap:
        """Return the map without the classes that are of no interest; a policy's masks are of boxes."""
        del camera, geometry
        is_shown = policy.is_of_interest(self.classes.astype(np.int64).ravel()).reshape(self.classes.shape)
        return self if is_shown.all() else replace(self, classes=np.where(is_shown, self.classes, np.int16(NOTHING)))

    def left_out(self, shown: LabelMap) -> int:
        """Return the number of classes that are left out."""
        return len(self.classes_seen - shown.classes_seen)


class FrameSegments(FrameOutlines[LabelMap]):
    """All areas of a frame; where two overlap, the later one counts."""

    accuracy: ClassVar[str] = "mean IoU of the classes"

    def from_answer(self, answer: LabelMap, size: Size) -> LabelledOutlines:
        classes = answer.resized(size).classes
        numbers = sorted(frozenset(np.unique(classes).tolist()) - {NOTHING})
        outlines = [{"size": [*size], "counts": run_lengths(classes == number)} for number in numbers]
        return outlined(outlines, np.array(numbers, np.int64))

    def answer_document(self, answer: LabelMap) -> dict[str, Any]:
        flat = answer.classes.ravel()
        starts = np.flatnonzero(np.diff(flat, prepend=flat[:1] - 1))
        return {
            "covered": [*answer.covered],
            "grid": [*answer.classes.shape],
            "classes": flat[starts].tolist(),
            "runs": np.diff(starts, append=flat.size).tolist(),
        }

    def read_answer(self, document: Mapping[str, Any]) -> LabelMap:
        flat = np.repeat(np.array(document["classes"], np.int16), document["runs"])
        return LabelMap(flat.reshape(kept_size(document["grid"])), kept_size(document["covered"]))


class Segment(ModelTask):
    """A class for each pixel.

    Outputs are scores for each class, (classes, h, w) or (h, w, classes), of which the largest counts; a map of class
    numbers (h, w); or one score (1, h, w), which is above the threshold where the one class is. Classes beyond the
    labels, such as "void", are nothing. A first label "background" says that a frame of it alone shows nothing.
    """

    can_be_drawn: ClassVar[bool] = True
    answers_padding: ClassVar[bool] = True
    has_large_answers: ClassVar[bool] = True
    frames_to_check: ClassVar[int] = 32
    nvinfer_remark: ClassVar[str] = (
        "classes from nvinfer itself: network-type=2, for one output of probabilities, with labels of all classes"
    )
    labels: ClassVar[LabelKind[Any, Any] | None] = FrameSegments()
    policy_keys: ClassVar[frozenset[str]] = frozenset(("classes",))
    # A point of mIoU is gone at 0.26 on ESPNet (CamVid) and 0.33 on MediaPipe's selfie mask.
    max_loss: ClassVar[float] = 0.25
    certified_loss: ClassVar[float] = 0.25

    def open_decoder(self, size: Size, outputs: Sequence[TensorSpec]) -> Decoder:
        name, axis = _find_map(outputs, size)
        threshold, labels = self.spec.score_threshold, len(self.spec.labels)
        background = 0 if labels > 1 and self.spec.labels[0].strip("_ ").lower() in _BACKGROUND else NOTHING

        def decode(batch: Mapping[str, Array]) -> LabelMap:
            classes = _classes(image_of(batch)[name], axis, threshold)
            if labels:
                classes[classes >= labels] = NOTHING
            return LabelMap(classes, size, background)

        return decode

    @property
    def listening_specs(self) -> tuple[ModelSpec, ...]:
        return (self.spec,)

    def divergence(self, served: Sequence[LabelMap], reference: Sequence[LabelMap]) -> float | None:
        """Return the square of what is lost.

        As many pixels change their class as the noise is large, and independent noises add up in their squares. The
        scores themselves would mislead: most are far from any change.
        """
        return (1.0 - served[0].fidelity(reference[0])) ** 2

    def confirmed(self, see: See, image: Picture) -> tuple[float, float]:
        """Return how far the mirrored frame has the same map, twice: the mean IoU, as fidelity has it.

        What the frame in disorder, its tiles exchanged, has in the same places is taken off: an engine that says the
        same of every frame is sure of nothing.
        """
        seen, turned, scattered = (see(view)[1] for view in (image, mirrored(image), disordered(image)))
        if seen.is_empty:
            return 0.0, 0.0
        again = replace(turned, classes=turned.classes[:, ::-1])
        agreement = max(0.0, seen.fidelity(again) - seen.fidelity(scattered))
        return agreement, agreement

    def nvinfer_parser(self, output: TensorSpec) -> Sequence[str]:
        """nvinfer takes the class of the largest probability, where that is above its threshold (Gst-nvinfer)."""
        shape = output.shape[1:]
        sides = [axis for axis in (0, 2) if len(shape) == 3 and shape[axis] in (1, len(self.spec.labels))]
        if len(sides) != 1:
            return ()
        (axis,) = sides
        threshold = self.spec.score_threshold if shape[axis] == 1 else 0.0
        order = 0 if axis == 0 else 1
        keys = f"segmentation-threshold={threshold}", f"segmentation-output-order={order}"
        return ("network-type=2", f"num-detected-classes={shape[axis]}", *keys)

    def labelled_images(self, path: Path, only: Sequence[str] = ()) -> MaskImages:
        from agent.vision.datasets.mask_images import MaskImages

        return MaskImages(path, self.spec.labels, only)

    def evaluation(self, answered: Iterable[tuple[LabelMap, Classes]]) -> Evaluation:
        """Return the mean IoU over classes, of the confusions of all images together, and the share of right pixels."""
        from agent.vision.datasets.mask_images import NO_CLASS, NOT_COUNTED

        images, counts = 0, np.zeros((1, 1), np.int64)
        for answer, truth in answered:
            images += 1
            classes = answer.resized((truth.shape[0], truth.shape[1])).classes
            counted = truth != NOT_COUNTED
            shown_there = np.where(truth == NO_CLASS, np.int16(NOTHING), truth)
            counts = _sum(counts, confusion(classes[counted], shown_there[counted]))
        shown = counts[1:].sum(axis=1)
        if not shown.any():
            found_text = f"no labelled pixel in {images} images"
            raise DatasetError(
                "dataset.empty", found_text, "at least one", "check the masks and labels of the model spec"
            )
        ious = class_ious(counts)
        labelled = np.flatnonzero(shown)
        right = np.trace(counts) / counts.sum()
        by_class = [ClassScore(int(each), float(ious[each]), int(shown[each])) for each in labelled]
        scores = {"miou": float(ious[labelled].mean()), "pixel_accuracy": float(right)}
        return Evaluation(
            self.spec.task,
            images,
            scores,
            by_class=by_class,
            class_score="iou",
            class_unit="pixels",
            names_worst=len(by_class) > 1,
        )


def confusion(served: Classes, reference: Classes) -> NDArray[np.int64]:
    """Return how many pixels have which class in both maps: (1 + classes, 1 + classes), rows the reference's.

    The first row and column are NOTHING. Both maps have one shape.
    """
    count = 2 + int(max(served.max(initial=NOTHING), reference.max(initial=NOTHING)))
    places = (reference.astype(np.int64).ravel() + 1) * count + served.ravel() + 1
    return np.bincount(places, minlength=count * count).reshape(count, count)


def class_ious(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the IoU of each class, (classes,), from a confusion; NaN for a class that is in neither map."""
    both, either = _areas(counts)
    ious: NDArray[np.float64] = np.divide(both, either, out=np.full(len(both), np.nan), where=either > 0)
    return ious


def _areas(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many pixels have each class in both maps, and in either, from a confusion; (classes,) each."""
    both = np.diag(counts)[1:]
    return both, counts.sum(axis=0)[1:] + counts.sum(axis=1)[1:] - both


def _sum(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of two confusions of different numbers of classes."""
    count = max(len(first), len(second))
    total = np.zeros((count, count), np.int64)
    for each in (first, second):
        total[: len(each), : len(each)] += each
    return total


def _find_map(outputs: Sequence[TensorSpec], size: Size) -> tuple[str, int | None]:
    """Return the name of the output that is a map, and its axis of classes without the batch; None: it has none.

    Where all maps have one shape it is the first: torchvision's second one only helps to train the first.

    Raises ConfigError (`decoder.shape`) where none is, or several of different shapes are.
    """
    fitting = find_maps({output.name: output.shape[1:] for output in outputs}, size)
    names = {name for name, _ in fitting}
    if len({output.shape for output in outputs if output.name in names}) != 1:
        raise no_map(outputs, f"one output with a map in the proportions of the input, {size[0]}x{size[1]}")
    return fitting[0]


def _classes(output: Array, axis: int | None, threshold: float) -> Classes:
    """Return the class of each pixel; NOTHING where scores or numbers are none, or a number is no class's."""
    scores = output[np.newaxis] if axis is None else np.moveaxis(output, axis, 0)
    if len(scores) > 1:
        if np.isfinite(scores).all():
            return np.asarray(scores.argmax(axis=0), np.int16)
        classes = np.where(np.isnan(scores), -np.inf, scores).argmax(axis=0)
        return np.asarray(np.where(np.isnan(scores).all(axis=0), NOTHING, classes), np.int16)
    with np.errstate(invalid="ignore"):
        if axis is None or output.dtype.kind != "f":
            is_class = (scores[0] >= 0) & (scores[0] < _MOST_CLASSES)
            return np.asarray(np.where(is_class, scores[0], NOTHING), np.int16)
        return np.asarray(np.where(scores[0] > threshold, 0, NOTHING), np.int16)
