"""Turn an engine's outputs into a prediction, as the model spec's task and decoder say.

`open_decoder` returns the function that does it for a batch of one. A detector's candidates come from one of the
built-in decoders (`agent.vision.decoders`) or from one of the user's own, which a spec names as
'package.module:function' or by the name that an installed package gives it in the entry point group `tared.decoders`
(PyPA, entry points specification). They are checked, and overlaps are suppressed here. `prediction_as_dict` writes a
prediction for JSON.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import ConfigError
from agent.vision.decoders import BUILTIN_DECODERS, CandidateDecoder, Outputs
from agent.vision.detections import Detections, Size, keep_best, suppress_overlaps
from agent.vision.preprocess import Geometry
from agent.vision.spec import DECODER_GROUP, ModelSpec
from engines.interface import Array, TensorSpec


@dataclass(frozen=True)
class Classification:
    """Hold the top-1 class of one image.

    Args:
        class_id: Number of the class, from 0.
        score: Its probability, in [0, 1].
        is_withheld: True if a policy forbids to show it.
    """

    class_id: int
    score: float
    is_withheld: bool = False


RawOutputs = Mapping[str, Array]  # the outputs as they are, of a batch of one
Prediction = Detections | Classification | RawOutputs
Decoder = Callable[[Mapping[str, Array]], Prediction]

_MAX_CANDIDATES = 1000


def open_decoder(spec: ModelSpec, size: Size, outputs: Sequence[TensorSpec]) -> Decoder:
    """Return the function from an engine's outputs by name, of a batch of one, to the prediction.

    A detector's candidates pass the score threshold, then suppression at the IoU threshold as the spec's `nms` has it.
    They come best first, a thousand at most. A decoder of the user's own is called as the built-in ones are: (outputs
    without batch axis, (height, width), score threshold) -> Detections.

    Args:
        spec: The model's.
        size: (height, width) of the network input, in whose pixels detections come.
        outputs: The engine's.

    Raises ConfigError:
        decoder.import  the decoder cannot be imported
        decoder.shape   the outputs do not fit the decoder
        decoder.failed  an own decoder raises an error
        decoder.result  an own decoder returns no sound Detections
    """
    if spec.task == "raw":
        return dict
    if spec.task == "classify":
        _check_classifier(spec, outputs)
        return lambda batch: _top_1(_image(batch))
    decoder = _open_detector(spec, size)
    if all(None not in output.shape[1:] for output in outputs):
        # Decoding zeros once finds a decoder that does not fit before the first frame does.
        zeros = {
            output.name: np.zeros((1, *output.shape[1:]), output.dtype)  # type: ignore[type-var]  # none is open
            for output in outputs
        }
        decoder(zeros)
    return decoder


def _check_classifier(spec: ModelSpec, outputs: Sequence[TensorSpec]) -> None:
    """Check that there is one output, with a score for each label.

    Raises ConfigError (`decoder.shape`) otherwise.
    """
    classes = class_count(outputs[0].shape) if len(outputs) == 1 else 0
    if classes == 0 or (spec.labels and classes not in (None, len(spec.labels))):
        shapes = ", ".join(f"{output.name} {output.shape}" for output in outputs)
        raise ConfigError(
            "decoder.shape",
            f"outputs {shapes} and {len(spec.labels)} labels",
            "one output (batch, classes), and as many labels or none",
            "correct labels in the model spec, or choose task 'raw'",
        )


def class_count(shape: Sequence[int | None]) -> int | None:
    """Return how many classes an output has; None if that is open, 0 if it is no vector for each image.

    Args:
        shape: (batch, classes), with further axes of size 1 or without; None for an open size.

    >>> class_count((1, 1000)), class_count((None, 10, 1, 1)), class_count((1, 3, 416, 416))
    (1000, 10, 0)
    """
    sides = [side for side in shape[1:] if side != 1]
    known = [side for side in sides if side is not None]
    if len(sides) == len(known) < 2:
        return known[0] if known else 1
    return None if len(known) < 2 else 0


def _top_1(image: Outputs) -> Classification:
    """Return the top class and its probability; 0 where a broken engine emits inf or NaN."""
    (output,) = image.values()
    class_id = int(output.argmax())
    top = class_probabilities(output)[class_id]
    return Classification(class_id, float(top) if np.isfinite(top) else 0.0)


def class_probabilities(output: Array) -> NDArray[np.float64]:
    """Return the probability of each class, float64 (classes,), from one image's logits or probabilities.

    Logits go through a softmax. Probabilities are recognised by their sum of 1. Of inf and NaN no probability follows.

    >>> class_probabilities(np.float32([0.0, 0.0])).tolist()
    [0.5, 0.5]
    """
    scores: NDArray[np.float64] = output.astype(np.float64).ravel()
    with np.errstate(all="ignore"):
        if scores.min() >= 0.0 and abs(scores.sum() - 1.0) < 1e-3:
            return scores
        weights = np.exp(scores - scores.max())
        softmax: NDArray[np.float64] = weights / weights.sum()
    return softmax


def _image(batch: Mapping[str, Array]) -> Outputs:
    """Return the outputs of a batch of one without their batch axis."""
    return {name: output[0] for name, output in batch.items()}


def _open_detector(spec: ModelSpec, size: Size) -> Decoder:
    assert spec.decoder is not None, "the model spec requires a decoder of every detector"
    find_candidates = BUILTIN_DECODERS.get(spec.decoder) or import_decoder(spec.decoder)
    limit = np.float32(4 * max(size))

    def detect(batch: Mapping[str, Array]) -> Detections:
        with np.errstate(all="ignore"):  # a broken engine may emit anything
            candidates = find_candidates(_image(batch), size, spec.score_threshold)
        _check_detections(candidates, spec.decoder)
        if not len(candidates):
            return candidates
        candidates = _made_sound(candidates, limit, spec.score_threshold)
        if spec.suppression == "none":
            return keep_best(candidates, _MAX_CANDIDATES)
        return suppress_overlaps(candidates, spec.iou_threshold, _MAX_CANDIDATES, spec.suppression == "agnostic")

    return detect


def _check_detections(result: object, name: str | None) -> None:
    """Check that a decoder has returned arrays that fit each other.

    Raises ConfigError (`decoder.result`) otherwise.
    """
    if isinstance(result, Detections):
        count = len(result.scores)
        if (result.boxes.shape, result.classes.shape, result.scores.shape) == ((count, 4), (count,), (count,)):
            return
        shapes = f"boxes {result.boxes.shape}, classes {result.classes.shape}, scores {result.scores.shape}"
    else:
        shapes = f"a {type(result).__name__}"
    raise ConfigError(
        "decoder.result",
        f"{shapes} from decoder '{name}'",
        "Detections of boxes (n, 4), classes (n,) and scores (n,)",
        "correct the decoder function",
    )


def _made_sound(candidates: Detections, limit: np.float32, score_threshold: float) -> Detections:
    """Drop candidates that are not finite or not above the threshold, and cut boxes that lie far outside.

    In the suppression a finite box far outside would swallow the precision of all others. An own decoder may not have
    applied the threshold.
    """
    boxes, scores = candidates.boxes, candidates.scores
    # The usual case first: four comparisons, which no NaN passes.
    if boxes.max() <= limit and boxes.min() >= -limit and scores.max() < np.inf and scores.min() > score_threshold:
        return candidates
    is_finite = np.isfinite(boxes).all(axis=1) & np.isfinite(scores)
    sound = candidates[is_finite & (scores > score_threshold)]
    return Detections(boxes=np.clip(sound.boxes, -limit, limit), classes=sound.classes, scores=sound.scores)


def import_decoder(name: str) -> CandidateDecoder:
    """Return the function of a decoder that users keep in a package of their own.

    The returned function raises ConfigError (`decoder.failed`) where the user's raises anything.

    Args:
        name: 'package.module:function', or the name of an entry point in the group `tared.decoders`.

    Raises ConfigError:
        decoder.import  there is no such name, several packages have it, or it is nothing to call
    """
    entry = EntryPoint(name, name, DECODER_GROUP) if ":" in name else _entry_point(name)
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
            result: Detections = function(outputs, size, score_threshold)
        except Exception as error:  # it is the user's
            last = extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
            shapes = ", ".join(f"{output} {array.shape} {array.dtype}" for output, array in outputs.items())
            raise ConfigError(
                "decoder.failed",
                f"decoder '{name}' that raises {where}, with {shapes}, size {size}",
                "Detections of whatever the engine puts out, zeros as well",
                "correct the decoder function",
            ) from error
        return result  # its type is checked where all detections are

    return decode


def _entry_point(name: str) -> EntryPoint:
    entries = {entry.value: entry for entry in entry_points(group=DECODER_GROUP, name=name)}
    if len(entries) != 1:
        values = "".join(f", {value}" for value in sorted(entries))
        raise ConfigError(
            "decoder.import",
            f"decoder '{name}' of {len(entries)} installed packages{values}",
            f"one entry point of that name in group '{DECODER_GROUP}'",
            "install the package that has it, or name the function as 'package.module:function'",
        )
    (entry,) = entries.values()
    return entry


_NULL = np.array(None, object)


def prediction_as_dict(prediction: Prediction, geometry: Geometry | None, spec: ModelSpec) -> dict[str, Any]:
    """Return a prediction in JSON's terms: boxes in frame pixels, null for a value that is not finite or is withheld.

    Args:
        prediction: Of one image.
        geometry: Where the frame lay in the network input, in whose pixels the boxes are; None: they are in the
            frame's.
        spec: The model's, which names the classes.
    """
    if isinstance(prediction, Detections):
        in_frame = geometry.to_frame(prediction.boxes) if geometry is not None else prediction.boxes
        boxes = np.round(in_frame.astype(float), 2).tolist()
        rows = zip(prediction.classes.tolist(), prediction.scores.tolist(), boxes, strict=True)
        return {
            "detections": [
                {"class": number, "label": spec.label(number), "score": round(score, 4), "box": box}
                for number, score, box in rows
            ]
        }
    if isinstance(prediction, Classification):
        if prediction.is_withheld:
            return {"class": None, "label": None, "score": round(prediction.score, 4)}
        label = spec.label(prediction.class_id)
        return {"class": prediction.class_id, "label": label, "score": round(prediction.score, 4)}
    return {"outputs": {name: _values(output) for name, output in prediction.items()}}


def _values(output: Array) -> list[Any]:
    finite = np.isfinite(output)
    values: list[Any] = (output if finite.all() else np.where(finite, output.astype(object), _NULL)).tolist()
    return values
