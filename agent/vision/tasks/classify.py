"""The task classify: one class for a frame, the surest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import ConfigError, DatasetError
from agent.vision.answer import Answer, Decoder, Hits, ServedClass, Wanted
from agent.vision.boxes import Size
from agent.vision.decoders import Outputs
from agent.vision.drawing import Picture, draw_title
from agent.vision.labels import LabelError, LabelKind, class_id
from agent.vision.policy import Policy
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.tasks.scores import Evaluation
from agent.vision.tasks.task import ModelTask, See, disordered, image_of, mirrored
from engines.interface import Array, TensorSpec

if TYPE_CHECKING:
    from agent.vision.datasets.labelled_images import ClassifiedImages


@dataclass(frozen=True)
class Classification(Answer):
    """Hold the top-1 class of one image.

    Args:
        class_id: Number of the class, from 0.
        score: Its probability, in [0, 1].
        is_withheld: True if a policy forbids to show it.
    """

    class_id: int
    score: float
    is_withheld: bool = False

    @property
    def classes_seen(self) -> frozenset[int]:
        return frozenset((self.class_id,))

    @property
    def confidence(self) -> float:
        return self.score

    def fidelity(self, reference: Classification) -> float:
        """Return 1 for the same class, else 0.

        So 1 - the mean fidelity bounds the change of accuracy without any labels: an answer that differs from the
        reference's can turn at most one frame from right to wrong, or back.
        """
        return float(self.class_id == reference.class_id)

    def pairs(self, served: Classification | None) -> list[ServedClass]:
        """Return the served class: the frame is the one object."""
        return [(self.class_id, served.class_id if served is not None else None)]

    def accuracy(self, truth: int) -> float:
        """Return 1 for the right class, else 0."""
        return float(self.class_id == truth)

    def hits(self, truth: int, wanted: Wanted | None = None) -> Hits:
        found, shown = np.array([self.class_id], np.int64), np.array([truth], np.int64)
        scores, right = np.array([self.score]), found == shown
        if wanted is not None:
            is_wanted = wanted(found, None)
            found, scores, right, shown = (
                found[is_wanted],
                scores[is_wanted],
                right[is_wanted],
                shown[wanted(shown, None)],
            )
        return Hits(found, scores, right, shown)

    def sureness(self, reference: Classification) -> float:
        """Return the lower of the two scores; below zero where the classes differ."""
        if self.class_id == reference.class_id:
            return min(self.score, reference.score)
        return -max(self.score, reference.score)

    def as_dict(self, spec: ModelSpec) -> dict[str, Any]:
        if self.is_withheld:
            return {"class": None, "label": None, "score": round(self.score, 4)}
        return {"class": self.class_id, "label": spec.label(self.class_id), "score": round(self.score, 4)}

    def summary(self, spec: ModelSpec) -> str:
        return f"{spec.label(self.class_id)} {self.score:.2f}"

    def draw(self, picture: Picture, spec: ModelSpec) -> None:
        if not self.is_withheld:
            draw_title(picture, self.summary(spec))

    def shown(self, policy: Policy, camera: str, geometry: Geometry | None) -> Classification:
        """Return the answer, or one that is withheld; a policy's masks are of boxes."""
        del camera, geometry
        is_shown = policy.is_passed(np.array([self.score], np.float32))[0]
        is_shown &= policy.is_of_interest(np.array([self.class_id]))[0]
        return self if is_shown else replace(self, is_withheld=True)

    def left_out(self, shown: Classification) -> int:
        return int(shown.is_withheld)


class FrameClass(LabelKind[int, Classification]):
    """The class of a whole frame."""

    form: ClassVar[Literal["class", "boxes", "shapes"]] = "class"
    example: ClassVar[str] = "3, a class id or name"
    accuracy: ClassVar[str] = "share of right answers"

    def read(self, document: Any, names: Sequence[str] = (), size: Size | None = None) -> int:
        del size
        if isinstance(document, list):
            found, remedy = "labels that are a list, as those of objects are", "send labels of the model's task"
            raise LabelError("labels.task", found, "a class id or name", remedy)
        return class_id(document, names)

    def document(self, truth: int) -> int:
        return int(truth)

    def is_same(self, first: int, second: int) -> bool:
        return first == second

    def answer_document(self, answer: Classification) -> dict[str, Any]:
        return {"class": int(answer.class_id), "score": float(answer.score)}

    def read_answer(self, document: Mapping[str, Any]) -> Classification:
        return Classification(int(document["class"]), float(document["score"]))


class Classify(ModelTask):
    """One class for a frame."""

    labels: ClassVar[LabelKind[int, Classification]] = FrameClass()
    keys: ClassVar[frozenset[str]] = frozenset(("reference_accuracy",))
    can_be_drawn: ClassVar[bool] = True
    frames_to_check: ClassVar[int] = 128  # a class is one answer a frame, mostly all or nothing
    scores_classes: ClassVar[bool] = True
    policy_keys: ClassVar[frozenset[str]] = frozenset(("score_threshold", "classes"))

    def open_decoder(self, size: Size, outputs: Sequence[TensorSpec]) -> Decoder:
        del size
        _check_classifier(self.spec, outputs)
        return lambda batch: _top_1(image_of(batch))

    def confirmed(self, see: See, image: Picture) -> tuple[float, float]:
        """Return the confirmed confidence of the class that a frame and its mirror image agree on best, twice.

        It is the geometric mean of the class's probabilities in the two frames, less what the frame gives it in
        disorder, its tiles exchanged: an engine that says the same of everything is sure of nothing.
        """
        views = image, mirrored(image), disordered(image)
        seen, turned, scattered = (self.probabilities(see(view)[0]) for view in views)
        agreed = np.sqrt(seen * turned)
        class_id = int(agreed.argmax())
        confidence = float(agreed[class_id] - np.sqrt(seen[class_id] * scattered[class_id]))
        confidence = max(0.0, confidence) if np.isfinite(confidence) else 0.0
        return confidence, confidence

    def probabilities(self, outputs: Mapping[str, Array]) -> NDArray[np.float64]:
        (output,) = outputs.values()
        return class_probabilities(output[0])

    def labelled_images(self, path: Path, only: Sequence[str] = ()) -> ClassifiedImages:
        from agent.vision.datasets.labelled_images import (
            ClassifiedImages,  # with cameras and HTTP, which a job's child lacks
        )

        return ClassifiedImages(path, self.spec.labels, only)

    def check_labels(self, images: ClassifiedImages, outputs: Sequence[TensorSpec]) -> None:
        if class_count(outputs[0].shape) not in (None, len(images.classes)):
            raise DatasetError(
                "dataset.label",
                f"{len(images.classes)} folders for {class_count(outputs[0].shape)} classes of the model",
                "a folder for every class, or labels that number them",
                "add labels to the model spec",
            )

    def evaluation(self, answered: Iterable[tuple[Classification, int]]) -> Evaluation:
        """Return the top-1 accuracy."""
        right = [answer.class_id == class_id for answer, class_id in answered]
        return Evaluation(self.spec.task, len(right), {"top1": sum(right) / len(right)})


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
