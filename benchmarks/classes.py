"""How soon a lost class is named while an engine serves, and how rarely one is named for nothing.

`python -m benchmarks.classes`

The answers of resnet20 in INT8 and in float to real images, clean and under corruptions, are drawn as a stream of
frames, one in a second. After ten hours the engine loses 20 points of the recall of one class, in turn: a fifth of what
it answered rightly is answered as the next class.
"""

from __future__ import annotations

import argparse
from contextlib import closing

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.models.model import calibrate
from agent.monitoring.class_losses import ClassLosses
from agent.vision.tasks.classify import Classification
from benchmarks.corruption import corrupt
from benchmarks.models import DATA, observe
from benchmarks.report import Section, add_output_option, at_least, at_most, bars_section, publish
from engines.quantise.apply_plan import insert_qdq
from engines.registry import open_backend

_IMAGES = "img_cifar10_test_A_3000.zip"
_CONDITIONS = (("clean", 0), ("dark", 2), ("contrast", 2))
_CLASSES, _PERIOD_S, _DAY_FRAMES = 10, 1.0, 86_400
_RUNS, _FAULT_AT, _WITHIN, _LOST = 200, 36_000, 2_000, 0.2

Answers = NDArray[np.int64]  # (n, 2): the class that INT8 answers, and the reference's


def real_answers() -> Answers:
    """Run resnet20 in INT8 and in float over the test images under each condition."""
    backend = open_backend("onnxruntime")
    observed = observe("resnet20", backend)
    calibration = calibrate(observed.model, observed.histograms, "entropy", observed.frames, "benchmark", backend)
    model = observed.model
    graph = insert_qdq(model.master, model.placement, calibration.amax)
    int8 = backend.load(backend.build(model.build_request(graph, "int8")).engine)
    reference = backend.load(backend.build(model.reference).engine)
    rows: list[tuple[int, int]] = []
    with closing(int8), closing(reference):
        images = list(read_images(parse_source(str(DATA / _IMAGES))))
        for condition, severity in track(_CONDITIONS, "answers", console=Console(stderr=True)):
            for seed, (_, image) in enumerate(images):
                shown = corrupt(image, condition, severity, seed) if severity else image
                tensor, _ = observed.task.preprocess(shown)
                served, right = (observed.task.decode(each.infer(tensor), tensor.shape) for each in (int8, reference))
                assert isinstance(served, Classification)
                assert isinstance(right, Classification)
                rows.append((served.class_id, right.class_id))
    return np.array(rows)


def frames_to_name(answers: Answers, run: int) -> int | None:
    """Return after how many frames of the fault its class is named; None if another is, or none in time."""
    chance, fault = np.random.default_rng(run), run % _CLASSES
    losses = ClassLosses(_PERIOD_S, 1.0)
    for frame, (served, right) in enumerate(chance.choice(answers, _FAULT_AT + _WITHIN).tolist()):
        is_lost = frame >= _FAULT_AT and served == right == fault and chance.random() < _LOST
        answer = (fault + 1) % _CLASSES if is_lost else served
        losses.add(frame, float(frame), [(right, answer)])
        if losses.lost:
            return frame - _FAULT_AT if frame >= _FAULT_AT and losses.lost[0].class_id == fault else None
    return None


def names_for_nothing(answers: Answers, days: int, seed: int) -> int:
    """Return how many classes are named in so many days without a fault."""
    losses, chance = ClassLosses(_PERIOD_S, 1.0), np.random.default_rng(seed)
    for day in track(range(days), "days", console=Console(stderr=True)):
        for frame, (served, right) in enumerate(chance.choice(answers, _DAY_FRAMES).tolist(), day * _DAY_FRAMES):
            losses.add(frame, float(frame), [(right, served)])
    return len(losses.lost)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Lost classes: how soon they are named, and how rarely for nothing.")
    parser.add_argument("--days", type=int, default=30, help="simulated days without a fault")
    add_output_option(parser)
    options = parser.parse_args()
    answers = real_answers()
    found = [frames_to_name(answers, run) for run in track(range(_RUNS), "faults", console=Console(stderr=True))]
    named = [frames for frames in found if frames is not None]
    false = names_for_nothing(answers, options.days, seed=1)
    usual = [float((answers[answers[:, 1] == each, 0] != each).mean()) for each in range(_CLASSES)]
    section = Section(
        "A class of ten that loses 20 points of its recall",
        ("usual loss, least and largest class", "named within 2,000 frames", "frames, median and 95 %", "false names"),
        [
            (
                f"{min(usual):.3f}, {max(usual):.3f}",
                f"{len(named)} of {_RUNS}",
                f"{np.median(named):.0f}, {np.quantile(named, 0.95):.0f}" if named else "-",
                f"{false} in {options.days} days",
            )
        ],
    )
    bars = [
        at_least(f"runs in which the class is named within {_WITHIN:,} frames", 0.95, len(named) / _RUNS, ""),
        at_most(f"classes named for nothing in {options.days} days", 0, float(false), ""),
    ]
    publish([section, bars_section(bars)], options)


if __name__ == "__main__":
    main()
