"""Decoders that are not ours: named 'package.module:function', or by an installed package.

A package names its decoders in the entry point group `tared.decoders` (PyPA, entry points specification).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np

from agent.common.errors import ConfigError
from agent.vision import decoders
from agent.vision import decoders as grid_decoders
from agent.vision.decoders import CandidateDecoder, Outputs
from agent.vision.detections import Detections, Size, keep_best, suppress_overlaps
from agent.vision.preprocess import Geometry
from agent.vision.spec import GROUP, ModelSpec
from engines.interface import Array, TensorSpec


def import_decoder(name: str) -> CandidateDecoder:
    """The function behind 'package.module:function' or behind an entry point of that name.

    Raises ConfigError (`decoder.import`): no such name, several packages with it, or nothing to call. What comes back
    raises it, too (`decoder.failed`), where the function raises anything.
    """
    entry = EntryPoint(name, name, GROUP) if ":" in name else _entry_point(name)
    try:
        module = importlib.import_module(entry.module)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(
            "decoder.import",
            f"decoder '{name}' whose module fails to import: {type(error).__name__}: {error}",
            "an importable module",
            "install its package, or put its folder on PYTHONPATH",
        ) from error
    function_name = entry.attr or ""  # None where an entry point names a module alone
    try:
        function = attrgetter(function_name)(module)
    except AttributeError:
        function = None
    if not callable(function):
        raise ConfigError(
            "decoder.import",
            f"decoder '{name}', and no function '{function_name}' in module '{entry.module}'",
            "a function (outputs, (height, width), score_threshold) -> agent.vision.detections.Detections",
            "correct the name after the colon",
        )

    def decode(outputs: Outputs, size: Size, score_threshold: float) -> Detections:
        try:
            found: Detections = function(outputs, size, score_threshold)
        except Exception as error:  # it is the user's
            shapes = ", ".join(f"{output} {array.shape} {array.dtype}" for output, array in outputs.items())
            raise ConfigError(
                "decoder.failed",
                f"decoder '{name}' that raises {_where(error)}, with {shapes}, size {size}",
                "Detections of whatever the engine puts out, zeros as well",
                "correct the decoder function",
            ) from error
        return found  # whether they are any is seen where all detections are checked

    return decode


def _where(error: Exception) -> str:
    """The error and the line of the user's that it came from."""
    last = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def _entry_point(name: str) -> EntryPoint:
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if len(found) != 1:
        raise ConfigError(
            "decoder.import",
            f"decoder '{name}' of {len(found)} installed packages{''.join(f', {value}' for value in sorted(found))}",
            f"one entry point of that name in group '{GROUP}'",
            "install the package that has it, or name the function as 'package.module:function'",
        )
    (entry,) = found.values()
    return entry


@dataclass(frozen=True)
class Classification:
    """The top-1 class of one image and its probability."""

    class_id: int
    score: float


RawOutputs = Mapping[str, Array]  # the outputs as they are, of a batch of one
Prediction = Detections | Classification | RawOutputs
Decoder = Callable[[Mapping[str, Array]], list[Prediction]]

BUILTIN: Mapping[str, CandidateDecoder] = {
    "yolox": grid_decoders.yolox,
    "yolov5": decoders.yolov5,
    "yolov8": decoders.yolov8,
    "end2end": decoders.end2end,
    "ssd": decoders.ssd,
    "fastestdet": decoders.fastestdet,
    "nanodet": grid_decoders.nanodet,
    "nanodet-plus": grid_decoders.nanodet_plus,
    "yunet": grid_decoders.yunet,
}
_MAX_CANDIDATES = 1000


def open_decoder(spec: ModelSpec, size: Size, outputs: Sequence[TensorSpec]) -> Decoder:
    """The function from an engine's outputs by name to one prediction per image of the batch.

    size: of the network input, (height, width), in whose pixels detections come. A detector's
    candidates pass the score threshold, then suppression at the IoU threshold as the spec's `nms` has it;
    they come best first, a thousand at most.
    An own decoder is called as the built-in ones are: (outputs without batch axis, (height, width), score
    threshold) -> Detections.

    Raises ConfigError: a decoder that cannot be imported, or outputs that do not fit the decoder.
    """
    if spec.task == "raw":
        return lambda batch: [dict(batch)]
    if spec.task == "classify":
        _check_classifier(spec, outputs)
        return lambda batch: [_top_1(image) for image in _images(batch)]
    decoder = _open_detector(spec, size)
    if all(None not in output.shape[1:] for output in outputs):
        # Decoding zeros once finds a decoder that does not fit before the first frame does.
        # The guard above rules out open dimensions, which the checker cannot follow.
        decoder({output.name: np.zeros((1, *output.shape[1:]), output.dtype) for output in outputs})  # type: ignore[arg-type]
    return decoder


def _open_detector(spec: ModelSpec, size: Size) -> Decoder:
    assert spec.decoder is not None, "the model spec requires a decoder of every detector"
    candidates_of = BUILTIN.get(spec.decoder) or import_decoder(spec.decoder)
    limit = np.float32(4 * max(size))

    def detect(image: Outputs) -> Detections:
        with np.errstate(all="ignore"):  # a broken engine may emit anything
            found = candidates_of(image, size, spec.score_threshold)
        _check_detections(found, spec.decoder)
        if not len(found):
            return found
        if not _is_sound(found, limit, spec.score_threshold):
            found = _made_sound(found, limit, spec.score_threshold)
        if spec.suppression == "none":
            return keep_best(found, _MAX_CANDIDATES)
        return suppress_overlaps(found, spec.iou_threshold, _MAX_CANDIDATES, spec.suppression == "agnostic")

    return lambda batch: [detect(image) for image in _images(batch)]


def _is_sound(found: Detections, limit: np.float32, score_threshold: float) -> bool:
    """Whether nothing is for `_made_sound` to do: four comparisons, which no NaN passes."""
    boxes, scores = found.boxes, found.scores
    return bool(
        boxes.max() <= limit and boxes.min() >= -limit and scores.max() < np.inf and scores.min() > score_threshold
    )


def _made_sound(found: Detections, limit: np.float32, score_threshold: float) -> Detections:
    """What is not finite is dropped, and a finite box far outside is cut: in the suppression it would swallow the
    precision of all others. So is what an own decoder did not hold against the threshold."""
    is_finite = np.isfinite(found.boxes).all(axis=1) & np.isfinite(found.scores)
    found = found[is_finite & (found.scores > score_threshold)]
    return Detections(boxes=np.clip(found.boxes, -limit, limit), classes=found.classes, scores=found.scores)


def _check_detections(found: object, name: str | None) -> None:
    if isinstance(found, Detections):
        count = len(found.scores)
        if (found.boxes.shape, found.classes.shape, found.scores.shape) == ((count, 4), (count,), (count,)):
            return
        shapes = f"boxes {found.boxes.shape}, classes {found.classes.shape}, scores {found.scores.shape}"
    else:
        shapes = f"a {type(found).__name__}"
    raise ConfigError(
        "decoder.result",
        f"{shapes} from decoder '{name}'",
        "Detections of boxes (n, 4), classes (n,) and scores (n,)",
        "correct the decoder function",
    )


def _check_classifier(spec: ModelSpec, outputs: Sequence[TensorSpec]) -> None:
    """Raises ConfigError unless there is one output, with a score per label."""
    classes = outputs[0].shape[-1] if len(outputs) == 1 else None
    if len(outputs) != 1 or (spec.labels and classes not in (None, len(spec.labels))):
        shapes = ", ".join(f"{output.name} {output.shape}" for output in outputs)
        raise ConfigError(
            "decoder.shape",
            f"outputs {shapes} and {len(spec.labels)} labels",
            "one output (batch, classes), and as many labels or none",
            "correct labels in the model spec, or choose task 'raw'",
        )


def _top_1(image: Outputs) -> Classification:
    """The top class of logits, by softmax, or of probabilities, known by their sum of 1."""
    (output,) = image.values()
    scores = output.astype(np.float64).ravel()
    class_id = int(scores.argmax())
    with np.errstate(all="ignore"):  # a broken engine may emit inf and NaN, of which no probability follows
        is_probability = scores.min() >= 0.0 and abs(scores.sum() - 1.0) < 1e-3
        top = scores[class_id] if is_probability else 1.0 / np.exp(scores - scores[class_id]).sum()
    return Classification(class_id, float(top) if np.isfinite(top) else 0.0)


def _images(batch: Mapping[str, Array]) -> Iterator[Outputs]:
    """The outputs of one image after the other."""
    for index in range(len(next(iter(batch.values())))):
        yield {name: output[index] for name, output in batch.items()}


_NULL = np.array(None, object)


def described(prediction: Prediction, geometry: Geometry | None, spec: ModelSpec) -> dict[str, Any]:
    """A prediction in JSON's terms: boxes in frame pixels, null for what is no finite number.

    geometry: where the frame lay in the network input, in whose pixels the boxes are; None: they are in the frame's.
    """
    if isinstance(prediction, Detections):
        in_frame = geometry.to_frame(prediction.boxes) if geometry is not None else prediction.boxes
        boxes = np.round(in_frame.astype(float), 2).tolist()
        found = zip(prediction.classes.tolist(), prediction.scores.tolist(), boxes, strict=True)
        return {
            "detections": [
                {"class": number, "label": spec.label(number), "score": round(score, 4), "box": box}
                for number, score, box in found
            ]
        }
    if isinstance(prediction, Classification):
        label = spec.label(prediction.class_id)
        return {"class": prediction.class_id, "label": label, "score": round(prediction.score, 4)}
    return {"outputs": {name: _values(output) for name, output in prediction.items()}}


def _values(output: Array) -> list[Any]:
    finite = np.isfinite(output)
    values: list[Any] = (output if finite.all() else np.where(finite, output.astype(object), _NULL)).tolist()
    return values
