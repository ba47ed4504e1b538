"""What choosing frames is worth: INT8 engines made of chosen frames, of every n-th frame, and of the first ones.

    python -m benchmarks.selection [--frames 256 64] [--markdown | --json]

Needs ../shared/data (or $TARED_SHARED/data). The clip is a room that people enter one at a time, and in which for
seconds nothing moves; once as it is, once with a quarter of its light until 100 of its 139 s have passed. Every second
frame is offered, five a second, to all three at once; of the frames between every fourth is judged on, and calibrates
nobody. "Every n-th" knows how long the clip is, which no camera does; "the first" takes whatever comes. The same
reference engine, FastestDet, method and threads for all. A selection has the whole clip's time to take its frames. SQNR
is the worst output's; fidelity is of frames on which either engine found somebody.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.collection.collection import CalibrationSet
from agent.collection.selection import TAKEN, FrameSelector, LumaGrid
from agent.models.model import Model, calibrate, open_model
from agent.vision.fidelity import fidelity
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from benchmarks.models import DATA, MODELS
from benchmarks.report import Section, add_output_option, publish
from calibrate.noise import worst_sqnr_db
from engines.interface import Backend, Engine
from engines.quantise.apply_plan import insert_qdq
from engines.registry import open_backend

CLIP, OFFERED_PER_S, SCORE = "vid_one_by_one_person_768x432.mp4", 5.0, 0.5
CHOSEN, EVENLY, FIRST = "chosen", "every n-th", "the first"
_HELD_OUT = 3 / 4  # a selection takes so many more than it is asked for, to hold some out; here none is

_LAMP_AT_S, _BY_NIGHT = 100.0, 0.25

Image = NDArray[np.uint8]


@dataclass
class Contender:
    """One way to pick frames, and what it has picked. takes: from the number of an offered frame to whether it does."""

    name: str
    frames: int
    takes: Callable[[int], bool]
    collection: CalibrationSet = field(default_factory=lambda: CalibrationSet(held_out_size=0))
    sqnr_db: list[float] = field(default_factory=list)
    fidelity: list[float] = field(default_factory=list)


def contenders(offered: Sequence[Image], sizes: Sequence[int], classes: Sequence[frozenset[int]]) -> list[Contender]:
    """All of them, for each number of frames. classes: what the reference sees on each offered frame."""
    made = []
    for size in sizes:
        selection = FrameSelector(round(size * _HELD_OUT), len(offered) / OFFERED_PER_S)
        chosen = [
            number
            for number, image in enumerate(offered)
            if selection.consider(number / OFFERED_PER_S, LumaGrid.from_image(image), classes[number]) == TAKEN
        ][:size]
        evenly = np.linspace(0, len(offered) - 1, size).round().astype(int).tolist()
        for name, numbers in ((CHOSEN, chosen), (EVENLY, evenly), (FIRST, range(size))):
            made.append(Contender(name, len(numbers), frozenset(numbers).__contains__))
    return made


def observe(model: Model, backend: Backend, offered: Sequence[Image], sizes: Sequence[int]) -> list[Contender]:
    """Run the reference over all offered frames; each contender keeps the histograms of its own."""
    with closing(backend.observer(model.reference, model.placement.taps)) as observer:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        tensors = [task.preprocess(image)[0].copy() for image in offered]
        seen = [observer.observe(tensor) for tensor in tensors]
        classes = [
            task.decode(each.outputs, tensor.shape).classes_seen for each, tensor in zip(seen, tensors, strict=True)
        ]
    made = contenders(offered, sizes, classes)
    for contender in made:
        for number in filter(contender.takes, range(len(offered))):
            contender.collection.add(tensors[number], seen[number])
    return made


def judge(model: Model, backend: Backend, made: Sequence[Contender], images: Sequence[Image]) -> None:
    """Run every contender's engine and the reference over the same frames."""
    with ExitStack() as stack:
        reference = stack.enter_context(closing(backend.load(backend.build(model.reference).engine)))
        engines = [stack.enter_context(closing(_engine(model, backend, each))) for each in made]
        task = VisionTask(model.spec, reference.inputs, reference.outputs)
        for image in images:
            tensor, _ = task.preprocess(image)
            truth = dict(reference.infer(tensor))
            expected = task.decode(truth, tensor.shape)
            for contender, engine in zip(made, engines, strict=True):
                outputs = engine.infer(tensor)
                contender.sqnr_db.append(worst_sqnr_db(truth, outputs))
                agreement = fidelity(task.decode(outputs, tensor.shape), expected)
                if not agreement.is_empty:
                    contender.fidelity.append(agreement.value)


def _engine(model: Model, backend: Backend, contender: Contender) -> Engine:
    collection = contender.collection
    calibration = calibrate(model, collection.histograms, "entropy", collection.frames, CLIP)
    graph = insert_qdq(model.master, model.placement, calibration.amax)
    return backend.load(backend.build(model.build_request(graph, "int8")).engine)


def night(images: Sequence[Image]) -> list[Image]:
    """All frames of the clip, the light of which goes on late."""
    lit_from = round(_LAMP_AT_S * 2 * OFFERED_PER_S)
    return [image if n >= lit_from else (image * _BY_NIGHT).astype(np.uint8) for n, image in enumerate(images)]


def table(scene: str, made: Sequence[Contender]) -> Section:
    columns = ("frames", "picked", "median SQNR, dB", "worst 5 %, dB", "fidelity", "of frames")
    section = Section(f"FastestDet on {CLIP}, {scene}", columns)
    for each in made:
        median, worst = np.quantile(each.sqnr_db, (0.5, 0.05))
        mean = float(np.mean(each.fidelity))
        figures = (f"{median:.2f}", f"{worst:.2f}", f"{mean:.4f}", str(len(each.fidelity)))
        section.rows.append((str(each.frames), each.name, *figures))
    return section


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What choosing frames is worth.")
    parser.add_argument("--frames", nargs="+", type=int, default=[256, 64])
    add_output_option(parser)
    options = parser.parse_args()
    if not (DATA / CLIP).exists():
        sys.exit(f"no {CLIP} in {DATA}; set TARED_SHARED")
    keys, _ = MODELS["fastestdet"]
    spec = {**keys, "path": DATA / str(keys["path"]), "score_threshold": SCORE}
    model, backend = open_model(ModelSpec.model_validate(spec)), open_backend("onnxruntime")
    images = [image for _, image in read_images(parse_source(str(DATA / CLIP)))]
    sections = []
    for scene, frames in (("as it is", images), ("a lamp that goes on late", night(images))):
        made = observe(model, backend, frames[::2], options.frames)
        judge(model, backend, made, frames[1::8])
        sections.append(table(scene, made))
    publish(sections, options)


if __name__ == "__main__":
    main()
