"""Define what a task is to the rest of the program: `ModelTask`, of which every module of this package implements one.

A task turns an engine's outputs into answers (`agent.vision.answer`), and knows what an answer of its kind can be
compared with: labels, policies, what the search of plans listens to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agent.common.errors import DatasetError
from agent.vision.answer import Decoder
from agent.vision.boxes import Size
from agent.vision.drawing import Picture
from agent.vision.labels import LabelKind
from agent.vision.spec import ModelSpec
from engines.interface import Array, TensorSpec

if TYPE_CHECKING:  # with cameras and HTTP, which a job's child does without
    from agent.vision.datasets.labelled_images import LabelledImages
    from agent.vision.tasks.scores import Evaluation


# Returns the outputs for a frame, and the answer in its pixels.
See = Callable[[Picture], tuple[Mapping[str, Array], Any]]
_TILES = 32  # along each side of a frame that is put in disorder


class ModelTask(ABC):
    """One task, for the model of one spec.

    Class attributes, which the rest of the program reads:
        decoders: Names of its decoders; empty: it takes none.
        keys: Keys of a spec, beside those of every task, that a spec of this one may have.
        needed_keys: Those that it must have, each with what is expected.
        can_be_drawn: An answer can be drawn into a picture.
        has_large_answers: They are too large to be kept by the dozen.
        answers_padding: An answer has values also for the padding of the network input.
        has_open_outputs: The number of rows of an output may depend on the frame.
        finds_objects: An answer that is not empty shows that the camera sees something.
        frames_to_check: So many suffice to compare specs by it.
        scores_classes: Its output is a score for each class of the frame: inference servers answer as it does.
        nvinfer_remark: What nvinfer needs to answer as the task does, in place of raw tensors; empty: it cannot.
        labels: What a frame's label is; None: a frame cannot be labelled.
        policy_keys: Those of a policy that apply to answers.
        max_loss: The loss, 1 - mean fidelity, that a daemon accepts unless `recalibration.max_loss` says another. It is
            drawn from models with labels: where their accuracy falls by a point (python -m benchmarks.harm).
        certified_loss: The same for `tared plan`, which certifies it, unless --max-loss says another.
    """

    decoders: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[frozenset[str]] = frozenset()
    needed_keys: ClassVar[Mapping[str, str]] = {}
    can_be_drawn: ClassVar[bool] = False
    has_large_answers: ClassVar[bool] = False
    answers_padding: ClassVar[bool] = False
    has_open_outputs: ClassVar[bool] = False
    finds_objects: ClassVar[bool] = False
    frames_to_check: ClassVar[int] = 1
    scores_classes: ClassVar[bool] = False
    nvinfer_remark: ClassVar[str] = ""
    labels: ClassVar[LabelKind[Any, Any] | None] = None
    policy_keys: ClassVar[frozenset[str]] = frozenset()
    max_loss: ClassVar[float] = 0.1
    certified_loss: ClassVar[float] = 0.02

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        """Check the spec's `params`, the keys of a task that has not its own there: the method to write for them.

        Raises ValueError, which says what was expected.
        """
        if params:
            raise ValueError("null: this task has no params")

    @abstractmethod
    def open_decoder(self, size: Size, outputs: Sequence[TensorSpec]) -> Decoder:
        """Return the function from an engine's outputs by name, of a batch of one, to the answer.

        Args:
            size: (height, width) of the network input, in whose pixels answers come.
            outputs: The engine's.

        Raises ConfigError:
            decoder.import  the decoder cannot be imported
            decoder.shape   the outputs do not fit the decoder
            decoder.failed  an own decoder raises an error
            decoder.result  an own decoder returns no sound answer
        """

    @property
    def least_score(self) -> float:
        """The score from which on answers are found."""
        return 0.0

    @property
    def listening_specs(self) -> tuple[ModelSpec, ...]:
        """The specs whose answers the search of plans compares by `divergence`; without any it compares outputs.

        The first says whether a frame shows something.
        """
        return ()

    def divergence(self, served: Sequence[Any], reference: Sequence[Any]) -> float | None:
        """Return how far answers diverge from the reference's, in [0, 1], such that independent noises add up in it.

        It is None where nothing can be compared. Both are one answer for each of `listening_specs`.
        """
        del served, reference
        return None

    def confirmed(self, see: See, image: Picture) -> tuple[float, float]:
        """Return how sure the model is of a frame's answer, and of its surest object, as far as other views confirm it.

        Only what the mirrored frame confirms counts, as in test-time augmentation, of which the spread is a known sign
        of how far an answer can be trusted (Ayhan and Berens, MIDL 2018). Without a method of its own a task confirms
        nothing, and `can_be_sure` is False.
        """
        del see, image
        return 0.0, 0.0

    @property
    def expects_crops(self) -> bool:
        """Whether a frame is to be the crop of one object: another `resize` moves the object, and is no mistake."""
        return False

    @property
    def can_be_sure(self) -> bool:
        """Whether an answer says how sure the model is, which `confirmed` measures."""
        return type(self).confirmed is not ModelTask.confirmed

    def probabilities(self, outputs: Mapping[str, Array]) -> NDArray[np.float64]:
        """Return the probability of each class of a frame, float64 (classes,); none where it has no classes."""
        del outputs
        return np.empty(0)

    def nvinfer_parser(self, output: TensorSpec) -> Sequence[str]:
        """Return the keys by which nvinfer's own parser answers as the task does; none: it has no such parser.

        output: Of a graph with this one alone, whose values are probabilities.
        """
        del output
        return ()

    def labelled_images(self, path: Path, only: Sequence[str] = ()) -> LabelledImages:
        """Open labelled images.

        Args:
            path: A folder, a zip, or the JSON of a data set beside its images.
            only: The classes that count, by name; empty: all.

        Raises DatasetError as far as that is known by now: `dataset.task` for a task that has no labels.
        """
        del path, only
        raise self._without_labels()

    def check_labels(  # noqa: B027  (labels of objects fit any outputs)
        self, images: Any, outputs: Sequence[TensorSpec]
    ) -> None:
        """Check that the labels fit an engine's outputs. Raises DatasetError (`dataset.label`) otherwise."""

    @property
    def evaluation_spec(self) -> ModelSpec:
        """Return the spec with which an engine answers labelled images."""
        return self.spec

    def evaluation(self, answered: Iterable[tuple[Any, Any]]) -> Evaluation:
        """Score answers, in pixels of their images, by the labels beside them.

        Raises DatasetError: `dataset.empty` where nothing is labelled, `dataset.task` as `labelled_images`.
        """
        del answered
        raise self._without_labels()

    def _without_labels(self) -> DatasetError:
        return DatasetError(
            "dataset.task",
            f"task '{self.spec.task}'",
            "a task with labels: the outputs of this one have none to compare with",
            "give the model's task, or compare engines by their fidelity",
        )


def image_of(batch: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of a batch of one without their batch axis."""
    return {name: output[0] for name, output in batch.items()}


def mirrored(image: Picture) -> Picture:
    """Return a copy of a frame with left and right exchanged."""
    return np.ascontiguousarray(image[:, ::-1])


def disordered(image: Picture) -> Picture:
    """Return a copy of a frame whose tiles have changed places; the strip that fills no tile stays."""
    height, width = (max(1, side // _TILES) for side in image.shape[:2])
    rows, columns = image.shape[0] // height, image.shape[1] // width
    whole = image[: rows * height, : columns * width]
    tiles = whole.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
    shuffled = tiles[np.random.default_rng(0).permutation(len(tiles))]
    copy: Picture = image.copy()
    copy[: rows * height, : columns * width] = (
        shuffled.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(whole.shape)
    )
    return copy
