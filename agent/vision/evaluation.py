"""Evaluate an engine on labelled images, in the currency of the model's task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from agent.vision.answer import Answer
from agent.vision.datasets.labelled_images import Image
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from agent.vision.tasks.opening import open_task
from agent.vision.tasks.scores import Evaluation
from engines.interface import Engine

TruthT = TypeVar("TruthT")


def evaluate(engine: Engine, spec: ModelSpec, path: Path, only: Sequence[str] = ()) -> Evaluation:
    """Run an engine over the labelled images at `path`, and score its answers as the spec's task does.

    Args:
        only: The classes that count, by name; empty: all.

    Raises DatasetError:
        images.*, dataset.label, dataset.coco  the images or labels cannot be used
        dataset.classes                        the model or the data set lacks one of the classes in `only`
        dataset.empty                          no image has a labelled object
        dataset.task                           the task has no labels
    """
    task = open_task(spec)
    images = task.labelled_images(path, only)
    task.check_labels(images, engine.outputs)
    return task.evaluation(answered(engine, task.evaluation_spec, images))


def answered(
    engine: Engine, spec: ModelSpec, images: Iterable[tuple[Image, TruthT]]
) -> Iterator[tuple[Answer, TruthT]]:
    """Yield the engine's answer to each image, in its pixels, beside its label. Raises DatasetError as the images."""
    vision = VisionTask(spec, engine.inputs, engine.outputs)
    for image, truth in images:
        answer, geometry = vision.infer(engine, image)
        yield answer.in_frame(geometry), truth
