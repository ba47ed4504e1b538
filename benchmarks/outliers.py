"""A board that sees what no other sees, among twelve: how far it is from its group in dB, and whether it is left out.

    python -m benchmarks.outliers [--models resnet20 yolox_nano] [--images 32] [--markdown | --json]

Needs ../shared/data (or $TARED_SHARED/data). Each board has seen images of its own, the thirteenth those of the first,
spoilt. Wrongly left out: boards of the twelve.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.models.model import open_model
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from benchmarks.models import DATA, MODELS
from benchmarks.report import Section, add_output_option, publish
from calibrate.histogram import AbsHistogram, merge_into
from engines.interface import Backend
from engines.registry import open_backend
from fleet.merge.calibration import Merger
from fleet.merge.outliers import Distance, Group, OutlierLimits, Sketch

BOARDS = 12
Image = NDArray[np.uint8]
Histograms = dict[str, AbsHistogram]

WAYS: dict[str, Callable[[Image], Image]] = {
    "brightness x 0.6": lambda image: (image * 0.6).astype(np.uint8),
    "brightness x 0.25": lambda image: (image * 0.25).astype(np.uint8),
    "brightness + 120": lambda image: np.minimum(image.astype(np.int32) + 120, 255).astype(np.uint8),
    "out of focus": lambda image: cv2.GaussianBlur(image, (0, 0), max(image.shape) / 16.0).astype(np.uint8),
    "covered": lambda image: np.full_like(image, 3),
    "noise in the place of a picture": lambda image: np.random.default_rng(0).integers(0, 256, image.shape, np.uint8),
}


def seen(name: str, backend: Backend, images: int) -> tuple[list[Histograms], dict[str, Histograms]]:
    """What twelve boards have counted, and by the way that it was spoilt what a thirteenth would have."""
    keys, source = MODELS[name]
    spec = ModelSpec.model_validate({**keys, "path": DATA / str(keys["path"])})
    model = open_model(spec)
    wanted = islice(read_images(parse_source(str(DATA / source))), BOARDS * images)
    pictures = [image for _, image in wanted]
    with closing(backend.observer(model.reference, model.placement.taps)) as observer:
        task = VisionTask(spec, observer.inputs, observer.outputs)

        def counted(some: Sequence[Image], way: Callable[[Image], Image] = lambda image: image) -> Histograms:
            found: Histograms = {}
            for image in some:
                merge_into(found, observer.observe(task.preprocess(way(image))[0]).histograms)
            return found

        share = len(pictures) // BOARDS
        boards = [counted(pictures[number * share :][:share]) for number in range(BOARDS)]
        return boards, {words: counted(pictures[:share], way) for words, way in WAYS.items()}


def distances(boards: Sequence[Histograms]) -> list[Distance]:
    tensors = sorted(boards[0])
    sketches = [Sketch.from_histograms(each, tensors) for each in boards]
    group, merger = Group(tensors, sketches), Merger()
    for each in boards:
        merger.add(each.items())
    costs = group.costs_to_group_db(merger.histograms, sketches)
    return [Distance(group.cost_to_board_db(each), cost) for each, cost in zip(boards, costs, strict=True)]


def table(name: str, boards: list[Histograms], spoilt: dict[str, Histograms]) -> Section:
    columns = ("the thirteenth sees", "costs it, dB", "costs the group, dB", "limits, dB", "left out", "wrongly")
    found = Section(name, columns)
    for words, each in spoilt.items():
        *others, odd = distances([*boards, each])
        limits = OutlierLimits.from_distances([*others, odd])
        wrongly = sum(bool(limits.reason(other)) for other in others)
        told = "yes" if limits.reason(odd) else "no"
        bounds = f"{limits.limit.to_board_db:.1f}, {limits.limit.to_group_db:.1f}"
        found.rows.append((words, f"{odd.to_board_db:.1f}", f"{odd.to_group_db:.1f}", bounds, told, str(wrongly)))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Boards that are unlike their group.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet20", "yolox_nano"])
    parser.add_argument("--images", type=int, default=32, help="for each board, as far as there are so many")
    add_output_option(parser)
    options = parser.parse_args()
    backend = open_backend("onnxruntime")
    publish([table(name, *seen(name, backend, options.images)) for name in options.models], options)


if __name__ == "__main__":
    main()
