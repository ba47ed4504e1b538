"""Does the predicted gain of a recalibration tell what a recalibration gains? Real video, real INT8 engines.

    python -m benchmarks.drift_ladder [--models fastestdet yolox_nano] [--frames 24] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data). Every clip gives three interleaved sets of frames: one calibrates; the
second, under a condition of the corruption ladder (benchmarks/corruption.py), is what the observer sees and what a
recalibration has; the third, under the same condition, is what both engines are compared on with FP32. *Stale* is the
engine of the first calibration, *fresh* that of the recalibration. A second run calibrates in the dark (severity 4) and
then lets the light come back. Engines are Q/DQ graphs on ONNX Runtime, one thread, thresholds by tared's default.

The real gain is the noise of the stale engine's raw outputs over that of the fresh one's, in dB. Detections would be no
measure where nothing is found, and in the dark nothing is. All outputs alike would be none either: nearly all are boxes
and classes of background, which nobody reads, and boxes would drown scores. So objectness counts everywhere, boxes and
classes in proportion to FP32's objectness, and each of the three relative to its own variation in FP32. What a user
would notice stands beside it: F1 against FP32 at the score threshold, over all frames of a condition.

The predicted gain is calibrate.noise's, less what the calibration leaves on the table on its own frames, as in
agent/drift.py; here it may be negative. Its tensors are weighted by *sensitivity*: the noise that a tensor makes in the
outputs when it alone is quantised, over its own noise to signal, on a few calibrating frames. Beside it stand two
weightings that need no inference, and PSI and the Jensen-Shannon distance (benchmarks/drift_signals.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from scipy.special import stdtrit

from agent.camera import parse_source, read_images
from agent.detections import Detections
from agent.fidelity import MatchCounts, count_matches, fidelity
from agent.model import calibrate, open_model
from agent.model_spec import ModelSpec
from agent.sampling import Collection
from agent.vision import VisionTask
from benchmarks.corruption import CONDITIONS, SEVERITIES, Image, corrupt
from benchmarks.drift_signals import OURS, SIGNALS, Score, Signals, auc, bootstrapped, spearman
from benchmarks.models import DATA, MODELS
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish
from calibrate.noise import network_noise
from engines.backend import Array, Engine, open_backend
from engines.calibration import Calibration
from engines.placement import place
from engines.planned import quantised_graph
from engines.qdq import insert_qdq

CLIPS = {
    "vehicles": "vid_vehicle_surveillance_640x352.mp4",
    "person": "vid_one_by_one_person_768x432.mp4",
    "signing": "vid_face_asl_walk_640x480.mkv",
}
# yolox_nano collapses with every layer INT8, because of Conv_44. With that in float, what the other three read makes
# 63 % of the noise of all activations: the second strided depthwise convolution, and two pointwise ones beside it.
KEEP_FLOAT = {"yolox_nano": ("Conv_44", "Conv_47", "Conv_70", "Conv_73")}
SCORE_THRESHOLD = {"fastestdet": 0.65}  # on video, as ../shared/data/SOURCES.md advises
# Axis of the output that holds the channels, which of them is objectness, and which are boxes; the last 80 are classes.
LAYOUT = {"fastestdet": (1, 0, slice(1, 5)), "yolox_nano": (2, 4, slice(0, 4))}
_CLASSES = slice(5, 85)
CLEAN, DARK = ("dark", 0), ("dark", 4)
RUNS = (
    (CLEAN, [CLEAN, *product(CONDITIONS, SEVERITIES)]),
    (DARK, [("dark", severity) for severity in (4, 3, 2, 1, 0)]),
)
GAIN_DB = 3.0  # what is worth a recalibration
_PROBES = 4  # one calibrating frame in so many measures sensitivities

Tensors = list[NDArray[np.float32]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """Of one engine on the compared frames: noise over FP32's variation, matches with FP32, F1 of each frame.

    empty: the frames on which neither found anything.
    """

    noise: float
    matches: MatchCounts
    f1: Floats
    empty: NDArray[np.bool_]


@dataclass(frozen=True)
class Rung:
    """One condition on one clip: what the signals say, and what the stale and the fresh engine do."""

    clip: str
    calibrated: str
    condition: str
    severity: int
    signals: Mapping[str, float]
    stale: Answers
    fresh: Answers

    @property
    def real_db(self) -> float:
        return 10.0 * float(np.log10(self.stale.noise / self.fresh.noise))

    def loses_fidelity(self, confidence: float) -> bool:
        """Whether the fresh engine's fidelity is below the stale one's, frame by frame (Student's t, one-sided)."""
        lost = (self.stale.f1 - self.fresh.f1)[~(self.stale.empty & self.fresh.empty)]
        if lost.size < 2 or lost.mean() <= 0.0:
            return False
        return bool(lost.mean() > stdtrit(lost.size - 1, confidence) * lost.std(ddof=1) / np.sqrt(lost.size))


class Ladder:
    """One model: FP32, its observer, and engines made from what that sees."""

    def __init__(self, name: str) -> None:
        keys, _ = MODELS[name]
        precision = {"keep_float": KEEP_FLOAT.get(name, ())}
        changed = {"path": DATA / str(keys["path"]), "precision": precision}
        if name in SCORE_THRESHOLD:
            changed["score_threshold"] = SCORE_THRESHOLD[name]
        self.name = name
        self.model = open_model(ModelSpec.model_validate({**keys, **changed}))
        self._backend = open_backend("onnxruntime")
        self._observer = self._backend.observer(self.model.reference, self.model.placement.taps)
        self._task = VisionTask(self.model.spec, self._observer.inputs, self._observer.outputs)
        self._needed = self.model.needed_taps

    def tensors(self, images: Sequence[Image], condition: str, severity: int, seed: int) -> Tensors:
        seen = [corrupt(image, condition, severity, seed + number) for number, image in enumerate(images)]
        return [self._task.preprocess(image)[0].copy() for image in seen]

    def calibrate(self, tensors: Tensors) -> Calibration:
        collection = Collection(held_out_size=0)
        for tensor in tensors:
            collection.add(tensor, self._observer.observe(tensor).histograms)
        seen = {tap: collection.histograms[tap] for tap in self._needed}
        return calibrate(self.model, seen, "entropy", collection.frames, self.name)

    def engine(self, calibration: Calibration) -> Engine:
        graph = quantised_graph(self.model.master, self.model.plan, calibration).graph
        return self._backend.load(self._backend.build(self.model.request(graph, "int8")).engine)

    def truths(self, tensors: Tensors) -> list[Mapping[str, Array]]:
        return [self._observer.infer(tensor) for tensor in tensors]

    def answers(self, engine: Engine, tensors: Tensors, truths: Sequence[Mapping[str, Array]]) -> Answers:
        served = [engine.infer(tensor) for tensor in tensors]
        pairs = [(self._decode(a, x), self._decode(b, x)) for a, b, x in zip(served, truths, tensors, strict=True)]
        matches = sum((count_matches(*pair) for pair in pairs), MatchCounts())
        agreed = [fidelity(*pair) for pair in pairs]
        empty = np.array([each.is_empty for each in agreed])
        return Answers(self.noise(served, truths), matches, np.array([each.value for each in agreed]), empty)

    def noise(self, served: Sequence[Mapping[str, Array]], truths: Sequence[Mapping[str, Array]]) -> float:
        """Of objectness, boxes and classes: squared error over variation in FP32, added up; see above."""
        axis, objectness, boxes = LAYOUT[self.name]
        found, truth = (_rows(outputs, axis) for outputs in (served, truths))
        seen = truth[:, objectness]
        everywhere = np.ones_like(seen)
        parts = ((slice(objectness, objectness + 1), everywhere), (boxes, seen), (_CLASSES, seen))
        return sum(_relative_error(found[:, part], truth[:, part], weight) for part, weight in parts)

    def measure_sensitivities(self, calibration: Calibration, tensors: Tensors) -> dict[str, float]:
        """Per tap the noise that it alone makes in the outputs, over its own noise to signal."""
        placement, graph = place(self.model.master, self.model.plan), self.model.master
        truths = self.truths(tensors)
        seen = self.calibrate(tensors).histograms
        found: dict[str, float] = {}
        for group in placement.groups:
            reads = {
                node.name: tuple(i for i in placement.reads[node.name] if node.input[i] in group.tensors)
                for node in graph.graph.node
                if node.name in placement.reads
            }
            alone = insert_qdq(graph, replace(placement, reads=reads, weights={}, groups=(group,)), calibration.amax)
            with closing(self._backend.load(alone.SerializeToString())) as engine:
                made = self.noise([engine.infer(tensor) for tensor in tensors], truths)
            (own,), _ = network_noise({tap: seen[tap] for tap in group.taps}, [calibration.scales])
            found.update(dict.fromkeys(group.taps, made / own.total if own.total > 0.0 else 0.0))
        return found

    def _decode(self, outputs: Mapping[str, Array], tensor: NDArray[np.float32]) -> Detections:
        found = self._task.decode(outputs, tensor.shape)
        assert isinstance(found, Detections)
        return found

    def close(self) -> None:
        self._observer.close()


def climb(name: str, frames: int, advance: Callable[[], object]) -> list[Rung]:
    """All conditions on all clips. Sensitivities are measured once, on the first clip."""
    rungs, sensitivities = list[Rung](), dict[str, float]()
    with closing(Ladder(name)) as ladder:
        for clip, file in CLIPS.items():
            images = [image for _, image in read_images(parse_source(str(DATA / file)))]
            thirds = [images[i] for i in np.linspace(0, len(images) - 1, 3 * frames).astype(int)]
            for lit, conditions in RUNS:
                tensors = ladder.tensors(thirds[0::3], *lit, seed=0)
                calibration = ladder.calibrate(tensors)
                if not sensitivities:
                    sensitivities = ladder.measure_sensitivities(calibration, tensors[::_PROBES])
                signals = Signals(calibration, sensitivities)
                with closing(ladder.engine(calibration)) as stale:
                    for condition, severity in conditions:
                        live = ladder.calibrate(ladder.tensors(thirds[1::3], condition, severity, seed=frames))
                        compared = ladder.tensors(thirds[2::3], condition, severity, seed=2 * frames)
                        truths = ladder.truths(compared)
                        with closing(ladder.engine(live)) as fresh:
                            answers = [ladder.answers(engine, compared, truths) for engine in (stale, fresh)]
                        shown = f"{lit[0]} {lit[1]}" if lit[1] else "clean"
                        rungs.append(Rung(clip, shown, condition, severity, signals.of(live.histograms), *answers))
                        advance()
    return rungs


def _rows(outputs: Sequence[Mapping[str, Array]], axis: int) -> Floats:
    """The one output of several frames: (cells, channels)."""
    arrays = [np.moveaxis(next(iter(each.values())), axis, -1) for each in outputs]
    return np.concatenate([array.reshape(-1, array.shape[-1]) for array in arrays]).astype(np.float64)


def _relative_error(found: Floats, truth: Floats, weight: Floats) -> float:
    mean = np.average(truth, axis=0, weights=weight)
    return float((weight @ np.square(found - truth)).sum() / (weight @ np.square(truth - mean)).sum())


@dataclass(frozen=True)
class Judged:
    """One signal: its AUC for a real gain worth having, and its rank correlation with the real gain."""

    area: Score
    rank: Score


def judged(rungs: Sequence[Sequence[Rung]]) -> dict[str, Judged]:
    """By signal. Each element is a condition, on one clip or on several: it counts by its means."""
    real_db = _real_db(rungs)
    scores = {}
    for name in SIGNALS:
        signal = np.array([np.mean([rung.signals[name] for rung in each]) for each in rungs])
        area = bootstrapped(lambda s, g: auc(s, g >= GAIN_DB), signal, real_db)
        scores[name] = Judged(area, bootstrapped(spearman, signal, real_db))
    return scores


def _real_db(rungs: Sequence[Sequence[Rung]]) -> Floats:
    return np.array([np.mean([rung.real_db for rung in each]) for each in rungs])


def by_condition(rungs: Sequence[Rung]) -> list[list[Rung]]:
    """The same condition on all clips, in the order of the ladder."""
    found: dict[tuple[str, str, int], list[Rung]] = {}
    for rung in rungs:
        found.setdefault((rung.calibrated, rung.condition, rung.severity), []).append(rung)
    return list(found.values())


def compare(models: Mapping[str, Sequence[Rung]]) -> tuple[Section, list[Bar]]:
    """The signals beside each other, per model and over all; per condition, and per condition and clip."""
    conditions = {name: by_condition(rungs) for name, rungs in models.items()}
    conditions["all"] = [condition for each in conditions.values() for condition in each]
    conditions["all, each clip by itself"] = [[rung] for rungs in models.values() for rung in rungs]
    table = Section(
        "Does it tell what a recalibration gains?",
        ("conditions", "signal", f"AUC, gain of {GAIN_DB:g} dB", "Spearman", f"of {GAIN_DB:g} dB"),
        note="A condition is the mean over its clips. 95 % bootstrap intervals over conditions.",
    )
    for title, each in conditions.items():
        worth = f"{(_real_db(each) >= GAIN_DB).sum()} of {len(each)}"
        table.rows += [(title, name, str(its.area), str(its.rank), worth) for name, its in judged(each).items()]
    scores = judged(conditions["all"])
    ours, peers = scores[OURS], [scores["PSI"], scores["JS distance"]]
    area, rank = (f"{what} ahead of the better of PSI and JS" for what in ("AUC", "Spearman"))
    return table, [
        at_least("AUC of the predicted gain", 0.9, ours.area.value, ""),
        at_least("Spearman of predicted and real gain", 0.75, ours.rank.value, ""),
        at_least(area, 0.0, ours.area.value - max(peer.area.value for peer in peers), ""),
        at_least(rank, 0.0, ours.rank.value - max(peer.rank.value for peer in peers), ""),
    ]


def ladder_section(name: str, rungs: Sequence[Rung]) -> Section:
    """Per condition the mean over clips."""
    table = Section(name, ("calibrated", "condition", "predicted, dB", "real, dB", "PSI", "JS", "F1 stale", "F1 fresh"))
    for each in by_condition(rungs):
        signals = [np.mean([rung.signals[signal] for rung in each]) for signal in (OURS, "PSI", "JS distance")]
        real_db = np.mean([rung.real_db for rung in each])
        matches = (sum((getattr(rung, side).matches for rung in each), MatchCounts()) for side in ("stale", "fresh"))
        stale, fresh = (f"{each.f1:.2f}" for each in matches)
        figures = (f"{signals[0]:.1f}", f"{real_db:.1f}", f"{signals[1]:.2f}", f"{signals[2]:.2f}", stale, fresh)
        condition = f"{each[0].condition} {each[0].severity}" if each[0].severity else "clean"
        table.rows.append((each[0].calibrated, condition, *figures))
    return table


def promised(name: str, rungs: Sequence[Rung]) -> list[Bar]:
    """What a recalibration has to keep on one model."""
    lit = [rung.fresh.matches for rung in rungs if rung.calibrated != "clean" and not rung.severity]
    chance = 0.05 / len(rungs)  # Bonferroni's: 5 % for one of them to be found to lose where none does
    worse = sum(rung.loses_fidelity(1.0 - chance) for rung in rungs)
    blurred = float(np.median([rung.signals[OURS] for rung in rungs if rung.condition == "blur"]))
    return [
        at_least(
            f"{name}: calibrated dark, then daylight: F1 of the recalibrated", 0.85, sum(lit, MatchCounts()).f1, ""
        ),
        at_most(f"{name}: conditions of {len(rungs)} where a recalibration lost fidelity", 0, worse, ""),
        at_most(f"{name}: median predicted gain under blur", GAIN_DB, blurred, " dB"),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The predicted gain beside the real one, on real video.")
    parser.add_argument("--models", nargs="+", choices=LAYOUT, default=list(LAYOUT))
    parser.add_argument("--frames", type=int, default=24, help="of each of the three sets of a clip")
    add_output_option(parser)
    options = parser.parse_args()
    conditions = len(CLIPS) * sum(len(conditions) for _, conditions in RUNS)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("conditions", total=conditions * len(options.models))
        rungs = {name: climb(name, options.frames, lambda: progress.advance(task)) for name in options.models}
    table, bars = compare(rungs)
    bars += [bar for name, each in rungs.items() for bar in promised(name, each)]
    publish([*(ladder_section(*each) for each in rungs.items()), table, bars_section(bars)], options)


if __name__ == "__main__":
    main()
