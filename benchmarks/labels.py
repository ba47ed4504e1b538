"""How well a few labels bound accuracy: how often the truth lies outside, and how much narrower than labels alone.

`python -m benchmarks.labels`

The answers of two models in INT8 and in float to labelled images, clean and under corruptions, are drawn as streams of
frames whose condition changes half-way. Frames are drawn for labelling as the daemon does it. At every label the three
intervals (INT8, float, what INT8 loses) are compared with what all frames of the stream so far score.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from agent.labelling.accuracy import count_frame
from agent.models.model import calibrate
from agent.vision.datasets.labelled_images import ClassifiedImages, object_images
from agent.vision.labels import Truth
from benchmarks.corruption import corrupt
from benchmarks.models import DATA, observe
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish
from calibrate.statistics.evidence import ConfidenceSequence
from calibrate.statistics.sampling import MIN_LABELS, STRATA, SampledTotals, Strata
from engines.quantise.apply_plan import insert_qdq
from engines.registry import open_backend

_IMAGES = {"resnet20": "img_cifar10_test_A_3000.zip", "yolox_nano": "img_coco_train2017_first128_labelled.zip"}
_CONDITIONS = (("clean", 0), ("dark", 3), ("noise", 2), ("contrast", 3), ("blur", 1), ("night", 2))
_STREAMS, _RATE, _LABELS, _LOOKS = 500, 0.1, 800, (100, 200, 400, 800)
_WARM_UP = 60
_COUNTS = 10  # counts of both engines, as count_frame has five of each
_INT8 = tuple(np.eye(_COUNTS)[each].tolist() for each in (0, 1))
_FLOAT = tuple(np.eye(_COUNTS)[each].tolist() for each in (5, 6))

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """Of all images under all conditions. conditions: (n,) their numbers. sure: (n,). counts: (n, _COUNTS)."""

    conditions: NDArray[np.int64]
    sure: Floats
    counts: Floats


def real_answers(name: str) -> Answers:
    """Run a model in INT8 and in float over its labelled images under each condition."""
    backend = open_backend("onnxruntime")
    observed = observe(name, backend)
    calibration = calibrate(observed.model, observed.histograms, "entropy", observed.frames, "benchmark", backend)
    model, task = observed.model, observed.task
    graph = insert_qdq(model.master, model.placement, calibration.amax)
    int8 = backend.load(backend.build(model.build_request(graph, "int8")).engine)
    reference = backend.load(backend.build(model.reference).engine)
    path = DATA / _IMAGES[name]
    images: Sequence[tuple[NDArray[np.uint8], Truth]]
    images = list(ClassifiedImages(path, model.spec.labels)) if name == "resnet20" else list(object_images(path))
    conditions, sure, counts = [], [], []
    with closing(int8), closing(reference):
        for number, (condition, severity) in enumerate(track(_CONDITIONS, name, console=Console(stderr=True))):
            for seed, (image, truth) in enumerate(images):
                shown = corrupt(image, condition, severity, seed) if severity else image
                tensor, geometry = task.preprocess(shown)
                answers = [
                    task.decode(engine.infer(tensor), tensor.shape).in_frame(geometry) for engine in (int8, reference)
                ]
                conditions.append(number)
                sure.append(answers[0].sureness(answers[1]))
                counts.append(
                    np.hstack([count_frame(each.accuracy(truth), each.hits(truth), [])[0] for each in answers])
                )
    return Answers(np.array(conditions), np.array(sure), np.array(counts))


@dataclass(frozen=True)
class Stream:
    """missed: whether INT8, float and the loss ever lay outside. widths: of INT8's interval, by number of labels."""

    missed: tuple[bool, bool, bool]
    widths: dict[int, float]


def run(answers: Answers, rows: NDArray[np.int64], chance: np.random.Generator, stratified: bool = True) -> Stream:
    """Label some of these frames. stratified: draw and guess by strata; else all frames are of one."""
    strata, frames = Strata.by_quantiles(answers.sure[rows[:_WARM_UP]].tolist()), rows[_WARM_UP:]
    numbers = [strata.index(each) if stratified else 0 for each in answers.sure[frames]]
    draws, counts = chance.random(len(frames)), answers.counts[frames]
    so_far = counts.cumsum(axis=0)
    totals, seen = SampledTotals(1, _COUNTS), np.zeros(STRATA)
    missed, widths = np.zeros(3, bool), dict[int, float]()
    for frame, (stratum, draw) in enumerate(zip(numbers, draws, strict=True)):
        strata.see(stratum)
        seen[stratum] += 1.0
        probability = strata.probability(stratum, _RATE) if stratified else _RATE
        if draw >= probability:
            continue
        totals.add(stratum, 1.0, probability, seen.tolist(), [counts[frame].tolist()])
        if counts[frame, 1]:
            strata.learn(stratum, counts[frame, 0])
        if totals.labels < MIN_LABELS:
            continue
        true = [so_far[frame, first] / so_far[frame, first + 1] for first in (0, 5)]
        int8, reference = totals.ratio(0, *_INT8), totals.ratio(0, *_FLOAT)
        loss = totals.difference(0, _FLOAT, _INT8)
        for place, (interval, value) in enumerate(((int8, true[0]), (reference, true[1]), (loss, true[1] - true[0]))):
            missed[place] |= not interval.low <= value <= interval.high
        widths.setdefault(totals.labels, int8.high - int8.low)
        if totals.labels == _LABELS:
            break
    return Stream((bool(missed[0]), bool(missed[1]), bool(missed[2])), widths)


def frames_of(answers: Answers, first: int, second: int, chance: np.random.Generator) -> NDArray[np.int64]:
    """Return a stream of rows: of one condition, and of another from half-way on."""
    half = int(_LABELS / _RATE * 0.75)
    parts = [np.flatnonzero(answers.conditions == each) for each in (first, second)]
    return np.concatenate([chance.choice(part, half) for part in parts])


def alone(answers: Answers, rows: NDArray[np.int64]) -> dict[int, float]:
    """Return the widths by labels alone, of frames drawn evenly: a confidence sequence of their scores."""
    sequence, widths = ConfidenceSequence(), dict[int, float]()
    scored = rows[answers.counts[rows, 1] > 0.0][:_LABELS]
    for number, score in enumerate(answers.counts[scored, 0].tolist(), 1):
        sequence.update(score)
        widths[number] = sequence.interval.high - sequence.interval.low
    return widths


def _width_rows(answers: Answers, streams: int) -> Iterator[tuple[str, float, list[tuple[float, float, float]]]]:
    """Yield each condition with INT8's score, and for each look the widths: drawn, alike without strata, alone."""
    for number, (condition, _) in enumerate(_CONDITIONS):
        widths = []
        for seed in range(streams):
            chance = np.random.default_rng(seed)
            rows = frames_of(answers, number, number, chance)
            kinds = (run(answers, rows, chance).widths, run(answers, rows, chance, stratified=False).widths)
            widths.append([[each[look] for look in _LOOKS] for each in (*kinds, alone(answers, rows))])
        mean = np.mean(widths, axis=0).T
        here = answers.counts[answers.conditions == number].sum(axis=0)
        yield condition, here[0] / here[1], [tuple(row) for row in mean.tolist()]


def _measure(name: str, streams: int) -> tuple[Section, list[Bar]]:
    """Return the widths under each condition, and the bars of one model."""
    answers, missed = real_answers(name), []
    for seed in track(range(streams), f"{name}: streams", console=Console(stderr=True)):
        chance = np.random.default_rng(seed)
        first, second = chance.choice(len(_CONDITIONS), 2)
        missed.append(run(answers, frames_of(answers, first, second, chance), chance).missed)
    inside = 1.0 - np.mean(missed, axis=0)
    bars = [
        at_least(f"{name}, {figure}: share of {streams} streams inside at every look", 0.95, share, "")
        for figure, share in zip(("INT8", "float", "loss by INT8"), inside.tolist(), strict=True)
    ]
    heads = ("condition", "INT8's score", *(f"{look} labels: width (ratios)" for look in _LOOKS))
    section = Section(name, heads, note="ratios: to the same bound without strata, and to labels alone")
    for condition, score, widths in _width_rows(answers, max(5, streams // 25)):
        shown = [f"{drawn:.3f} ({drawn / alike:.2f}, {drawn / of_labels:.2f})" for drawn, alike, of_labels in widths]
        section.rows.append((condition, f"{score:.2f}", *shown))
        if condition == "clean":
            ratio = widths[-1][0] / widths[-1][2]
            bars.append(at_most(f"{name}, clean, {_LABELS} labels: width by that of labels alone", 0.7, ratio))
    return section, bars


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Accuracy from labels of drawn frames: how sure, and how narrow.")
    parser.add_argument("--streams", type=int, default=_STREAMS, help=f"of each model (default: {_STREAMS})")
    add_output_option(parser)
    options = parser.parse_args()
    measured = [_measure(name, options.streams) for name in _IMAGES]
    publish(
        [*(section for section, _ in measured), bars_section([bar for _, bars in measured for bar in bars])], options
    )


if __name__ == "__main__":
    main()
