"""The task detect: boxes with classes and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import ConfigError
from agent.vision.answer import Decoder
from agent.vision.boxes import NO_BOXES, FloatArray, LabelledBoxes, Size, iou_matrix
from agent.vision.datasets.object_rows import BOX_ROW, RowForm
from agent.vision.decoders import BUILTIN_DECODERS, WITHOUT_BATCH, Outputs
from agent.vision.detections import MATCH_IOU, Detections, DetectionsT, keep_best, suppress_overlaps
from agent.vision.drawing import Picture
from agent.vision.labels import LabelError, LabelKind, checked_box, class_id, whole
from agent.vision.spec import ModelSpec
from agent.vision.tasks.own_decoder import import_decoder
from agent.vision.tasks.scores import Evaluation
from agent.vision.tasks.task import ModelTask, See, disordered, image_of, mirrored
from engines.graph.constant_inputs import box_size
from engines.interface import Array, TensorSpec

if TYPE_CHECKING:
    from agent.vision.datasets.labelled_images import CocoImages, LabelledObjects, YoloImages

MAX_CANDIDATES = 1000
_MOST_BOXES = 1000  # in a label
_EVALUATION_SCORE_THRESHOLD = 0.01
# Shares of the score threshold. Objects count down to a third of it: there are more of them, and an object just below
# the threshold today is above it in tomorrow's scene. Their nearest candidates are searched down to a tenth.
_SEEN, _FAINT = 1.0 / 3.0, 0.1


class FrameBoxes(LabelKind[LabelledBoxes, Detections]):
    """All objects of a frame, as boxes."""

    form: ClassVar[Literal["class", "boxes", "shapes"]] = "boxes"
    example: ClassVar[str] = '[{"class": 0, "box": [x1, y1, x2, y2]}]'
    accuracy: ClassVar[str] = "mean F1 of the boxes"
    unnamed: LabelledBoxes | None = NO_BOXES

    def read(self, document: Any, names: Sequence[str] = (), size: Size | None = None) -> LabelledBoxes:
        """Return the boxes as they are given; with `size`, cut at the frame's edges, corners in any order."""
        if not isinstance(document, list) or not all(
            isinstance(each, dict) and isinstance(each.get("box"), list) for each in document
        ):
            expected = 'a list of boxes, [{"class": 0, "box": [x1, y1, x2, y2]}]'
            remedy = "send labels of the model's task"
            raise LabelError("labels.task", "a label that is no list of boxes", expected, remedy)
        if len(document) > _MOST_BOXES:
            expected = f"at most {_MOST_BOXES} in a frame"
            raise LabelError("labels.box", f"{len(document)} boxes", expected, "leave out some")
        classes = [class_id(whole(each.get("class")), names) for each in document]
        boxes = [checked_box(each["box"], size) for each in document]
        return LabelledBoxes(
            boxes=np.array(boxes, np.float32).reshape(-1, 4), classes=np.array(classes, np.int64).reshape(-1)
        )

    def document(self, truth: LabelledBoxes) -> list[dict[str, Any]]:
        boxes = truth.boxes.round(2).tolist()
        return [{"class": number, "box": box} for number, box in zip(truth.classes.tolist(), boxes, strict=True)]

    def is_same(self, first: LabelledBoxes, second: LabelledBoxes) -> bool:
        if first.classes.tolist() != second.classes.tolist():
            return False
        return bool(np.allclose(first.boxes, second.boxes, rtol=0.0, atol=0.02))

    def is_nothing(self, truth: LabelledBoxes) -> bool:
        return not len(truth)

    def from_answer(self, answer: Detections, size: Size) -> LabelledBoxes:
        del size
        return LabelledBoxes(boxes=answer.boxes, classes=answer.classes)

    def answer_document(self, answer: Detections) -> dict[str, Any]:
        return box_document(answer)

    def read_answer(self, document: Mapping[str, Any]) -> Detections:
        return kept_boxes(document)


def box_document(answer: Detections) -> dict[str, Any]:
    """Return the boxes, classes and scores of an answer for JSON."""
    return {
        "boxes": answer.boxes.round(2).tolist(),
        "classes": answer.classes.tolist(),
        "scores": answer.scores.round(4).tolist(),
    }


def kept_boxes(document: Mapping[str, Any]) -> Detections:
    """Return detections from the document of an answer. Raises ValueError, KeyError and the like for any other."""
    found = Detections(
        boxes=np.array(document["boxes"], np.float32).reshape(-1, 4),
        classes=np.array(document["classes"], np.int64),
        scores=np.array(document["scores"], np.float32),
    )
    if not len(found.boxes) == len(found.classes) == len(found.scores):
        raise ValueError("boxes, classes and scores of different numbers")
    return found


class Detect(ModelTask):
    """Boxes with classes and scores.

    Candidates pass the score threshold, then suppression at the IoU threshold as the spec's `nms` has it. They come
    best first, a thousand at most. A decoder of the user's own is called as the built-in ones are: (outputs without
    batch axis, (height, width), score threshold) -> Detections.
    """

    decoders: ClassVar[tuple[str, ...]] = tuple(BUILTIN_DECODERS)
    keys: ClassVar[frozenset[str]] = frozenset(("nms",))
    can_be_drawn: ClassVar[bool] = True
    frames_to_check: ClassVar[int] = 32
    has_open_outputs: ClassVar[bool] = True
    finds_objects: ClassVar[bool] = True
    nvinfer_remark: ClassVar[str] = (
        "boxes from nvinfer itself: network-type=0, parse-bbox-func-name and custom-lib-path of your parser"
    )
    labels: ClassVar[LabelKind[Any, Any] | None] = FrameBoxes()
    policy_keys: ClassVar[frozenset[str]] = frozenset(("score_threshold", "classes", "masks"))

    @property
    def least_score(self) -> float:
        return self.spec.score_threshold

    def open_decoder(self, size: Size, outputs: Sequence[TensorSpec]) -> Decoder:
        decoder = self._open_decoder(size)
        if all(None not in output.shape[1:] for output in outputs):
            # Decoding zeros once finds a decoder that does not fit before the first frame does.
            zeros = {
                output.name: np.zeros((1, *output.shape[1:]), output.dtype)  # type: ignore[type-var]  # none is open
                for output in outputs
            }
            decoder(zeros)
        return decoder

    def _open_decoder(self, size: Size) -> Decoder:
        spec, find_candidates = self.spec, self._candidate_decoder(size)
        limit = np.float32(4 * max(size))
        to_network = self._to_network(size)

        def detect(batch: Mapping[str, Array]) -> Detections:
            outputs = dict(batch) if spec.decoder in WITHOUT_BATCH else image_of(batch)
            with np.errstate(all="ignore"):  # a broken engine may emit anything
                candidates = find_candidates(outputs)
            _check_detections(candidates, spec.decoder)
            if to_network is not None:
                candidates = replace(candidates, boxes=candidates.boxes * to_network)
            if len(candidates):
                candidates = _made_sound(candidates, limit, spec.score_threshold)
            if spec.suppression == "none" or not len(candidates):
                kept = keep_best(candidates, MAX_CANDIDATES)
            else:
                kept = self._suppressed(candidates)
                if kept is candidates:  # an own decoder may return views of the outputs
                    kept = kept[np.arange(len(kept))]
            return self._finished(kept, outputs, size)

        return detect

    def _to_network(self, size: Size) -> FloatArray | None:
        """Return the factors of x1 y1 x2 y2 from the picture that a constant of the model is the size of; else None."""
        picture = box_size(self.spec.inputs or {})
        if picture is None or picture == size:
            return None
        return np.array((size[1] / picture[1], size[0] / picture[0]) * 2, np.float32)

    def _candidate_decoder(self, size: Size) -> Callable[[Outputs], Detections]:
        """Return what finds the candidates of one image."""
        assert self.spec.decoder is not None, "the model spec requires a decoder of every detector"
        decode = BUILTIN_DECODERS.get(self.spec.decoder) or import_decoder(self.spec.decoder)
        return lambda outputs: decode(outputs, size, self.spec.score_threshold)

    def _suppressed(self, candidates: DetectionsT) -> DetectionsT:
        is_agnostic = self.spec.suppression == "agnostic"
        return suppress_overlaps(candidates, self.spec.iou_threshold, MAX_CANDIDATES, is_agnostic)

    def _finished(self, found: Detections, outputs: Outputs, size: Size) -> Detections:
        """Return the answer from what is left of the candidates, which owns its arrays."""
        del outputs, size
        return found

    def _wrong_result(self, found: Detections, expected: str) -> ConfigError:
        result = f"a {type(found).__name__} from decoder '{self.spec.decoder}'"
        return ConfigError("decoder.result", result, expected, "correct the decoder function")

    @property
    def listening_specs(self) -> tuple[ModelSpec, ...]:
        """Specs that give what is seen, and the candidates that it is chosen from, before overlaps are suppressed.

        Which of two neighbours survives the suppression is chance.
        """
        threshold = self.spec.score_threshold
        seen = {"score_threshold": _SEEN * threshold}
        faint = {"score_threshold": _FAINT * threshold, "iou_threshold": 1.0}
        return tuple(self.spec.model_copy(update=changes) for changes in (seen, faint))

    def divergence(self, served: Sequence[Detections], reference: Sequence[Detections]) -> float | None:
        """Mean of (1 - IoU)**2 + (score difference)**2 from each detection of either to the other's nearest candidate.

        Candidates of the same class count. An error is at most 1, which is also the cost of having no candidate. None
        if neither detects anything.
        """
        (detections, candidates), (expected, all_expected) = served, reference
        missed, invented = _errors(expected, candidates), _errors(detections, all_expected)
        errors = np.concatenate((missed, invented))
        return float(errors.mean()) if len(errors) else None

    def confirmed(self, see: See, image: Picture) -> tuple[float, float]:
        """Return how much of a frame's detections its mirror image confirms, and of the surest one.

        A detection's confirmed confidence is the geometric mean of its score and that of the detection of its class in
        the mirrored frame, times their overlap, from MATCH_IOU on. What the frame in disorder, its tiles exchanged,
        confirms likewise is taken off: a saturated network finds the same in every frame. The first number is the sum
        of their squares, so that one sure object counts more than several doubtful ones, times the share of all scores
        that is confirmed: such a network takes everything for an object, and some of it is confirmed by chance.
        """
        seen, turned = see(image)[1], see(mirrored(image))[1]
        if not len(seen) or not len(turned):
            return 0.0, 0.0
        boxes = turned.boxes.copy()
        boxes[:, [0, 2]] = np.float32(image.shape[1]) - boxes[:, [2, 0]]
        again, scattered = _confidences(seen, turned, boxes), see(disordered(image))[1]
        confirmed = np.maximum(again - _confidences(seen, scattered, scattered.boxes), 0.0)
        scores = sum(float(each.scores.sum(dtype=np.float64)) for each in (seen, turned))
        return float(np.square(confirmed).sum() * 2.0 * confirmed.sum() / scores), float(confirmed.max())

    @property
    def evaluation_spec(self) -> ModelSpec:
        """Return a spec of a far lower threshold: precision is averaged over all recalls."""
        return self.spec.model_copy(update={"score_threshold": _EVALUATION_SCORE_THRESHOLD})

    @property
    def label_row(self) -> RowForm:
        """What a line of a YOLO label file has behind the class."""
        return BOX_ROW

    def labelled_images(self, path: Path, only: Sequence[str] = ()) -> YoloImages | CocoImages:
        from agent.vision.datasets.labelled_images import object_images  # with cameras, which a job's child lacks

        return object_images(path, self.spec.labels, only, self.label_row)

    def evaluation(self, answered: Iterable[tuple[Any, LabelledObjects]]) -> Evaluation:
        """Return COCO's mean average precision."""
        from agent.vision.tasks.average_precision import AveragePrecision

        precision = AveragePrecision(self.spec.task)
        for detections, truth in answered:
            precision.add(detections, truth)
        return precision.mean()


def _confidences(seen: Detections, other: Detections, boxes: FloatArray) -> NDArray[np.float64]:
    """Return how sure each detection is as far as another answer, with these boxes (m, 4), has it as well: (n,)."""
    overlaps = iou_matrix(seen.boxes, boxes)
    overlaps[(overlaps < MATCH_IOU) | (seen.classes[:, np.newaxis] != other.classes)] = 0.0
    first, second = (each.scores.astype(np.float64) for each in (seen, other))
    confidences: NDArray[np.float64] = (np.sqrt(first[:, np.newaxis] * second) * overlaps).max(axis=1, initial=0.0)
    return confidences


def _errors(detections: Detections, candidates: Detections) -> NDArray[np.float64]:
    """(detections,): the error of each detection's nearest candidate."""
    same_class = detections.classes[:, np.newaxis] == candidates.classes[np.newaxis]
    distance = np.square(1.0 - detections.overlaps(candidates, same_class))
    distance += np.square(detections.scores[:, np.newaxis] - candidates.scores[np.newaxis])
    distance[~same_class] = 1.0
    nearest: NDArray[np.float64] = distance.min(axis=1, initial=1.0)
    return nearest


def _check_detections(result: object, name: str | None) -> None:
    """Check that a decoder has returned arrays that fit each other.

    Raises ConfigError (`decoder.result`) otherwise.
    """
    if isinstance(result, Detections):
        count = len(result.scores)
        lengths = {len(each) for each in vars(result).values() if isinstance(each, np.ndarray)}  # masks, key points too
        shapes_found = result.boxes.shape, result.classes.shape, result.scores.shape
        if shapes_found == ((count, 4), (count,), (count,)) and lengths == {count}:
            return
        shapes = f"boxes {result.boxes.shape}, classes {result.classes.shape}, scores {result.scores.shape}"
    else:
        shapes = f"a {type(result).__name__}"
    raise ConfigError(
        "decoder.result",
        f"{shapes} from decoder '{name}'",
        "Detections of boxes (n, 4), classes (n,) and scores (n,), and n of whatever else each has",
        "correct the decoder function",
    )


def _made_sound(candidates: DetectionsT, limit: np.float32, score_threshold: float) -> DetectionsT:
    """Drop candidates that are not finite or not above the threshold, and bring the others within bounds.

    An own decoder may not have applied the threshold.
    """
    boxes, scores = candidates.boxes, candidates.scores
    if type(candidates) is Detections:  # the usual case first: five comparisons, which no NaN passes
        is_bounded = boxes.max() <= limit and boxes.min() >= -limit and (boxes[:, :2] <= boxes[:, 2:]).all()
        if is_bounded and scores.max() <= 1.0 and scores.min() > score_threshold:
            return candidates
    is_sound = scores > score_threshold
    for each in vars(candidates).values():
        if isinstance(each, np.ndarray) and each.dtype.kind == "f":
            is_sound = is_sound & np.isfinite(each.reshape(len(scores), -1)).all(axis=1)
    return candidates[is_sound].bounded(float(limit))
