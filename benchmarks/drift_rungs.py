"""The rungs of the ladder: real frames under a condition, and what stale and fresh INT8 engines make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.config import DriftConfig, RegimesConfig
from agent.models.model import Model, calibrate, open_model, tap_weights
from agent.monitoring.drift import DriftMonitor, Regime
from agent.planning.costs import labels
from agent.planning.group_noise import describe_groups, measure_noise
from agent.planning.what_if import WhatIf
from agent.vision.answer import Answer, MatchCounts
from agent.vision.detections import Detections, count_matches
from agent.vision.fidelity import fidelity
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from benchmarks.corruption import CONDITIONS, SEVERITIES, Image, corrupt
from benchmarks.drift_signals import EVEN, OURS, OWN, Signals
from benchmarks.models import DATA, MODELS
from calibrate.histogram import AbsHistogram, merge_into
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration
from engines.interface import Array, Engine, silent
from engines.quantise.apply_plan import quantised_graph
from engines.quantise.fusion import fusion_groups
from engines.quantise.repairs import observe_channels, propose_repairs
from engines.registry import open_backend


@dataclass(frozen=True)
class Clip:
    """Images of a file, from one index to another.

    scene: Clips of one scene are left out together, for each resembles the others.
    sets: How many times the usual number of frames are taken: one answer of a classifier is right or wrong, no more.
    """

    file: str
    scene: str
    first: int = 0
    end: int | None = None
    sets: int = 1

    def images(self) -> list[Image]:
        """Return the images, BGR uint8 (H, W, 3)."""
        read = islice(read_images(parse_source(str(DATA / self.file))), self.first, self.end)
        return [image for _, image in read]


_CIFAR = "img_cifar10_test_A_3000.zip"  # 300 images of each class, by class
_STREETS = {
    "vehicles": Clip("vid_vehicle_surveillance_640x352.mp4", "vehicles"),
    "person": Clip("vid_one_by_one_person_768x432.mp4", "person"),
    "signing": Clip("vid_face_asl_walk_640x480.mkv", "signing"),
}
CLIPS = {
    "fastestdet": _STREETS,
    "yolox_nano": _STREETS,
    "ultraface": {
        sign: Clip(f"vid_face_asl_{sign}_640x480.mkv", "signing") for sign in ("again", "book", "no", "walk", "yes")
    },
    "resnet20": {
        "airplane to bird": Clip(_CIFAR, "airplane to bird", 0, 900, 4),
        "cat to dog": Clip(_CIFAR, "cat to dog", 900, 1800, 4),
        "frog to truck": Clip(_CIFAR, "frog to truck", 1800, 3000, 4),
    },
}
# yolox_nano collapses with every layer INT8, because of Conv_44. With that in float, what the other three read makes
# 63 % of the noise of all activations: the second strided depthwise convolution, and two pointwise ones beside it.
KEEP_FLOAT = {"yolox_nano": ("Conv_44", "Conv_47", "Conv_70", "Conv_73")}
SCORE_THRESHOLD = {"fastestdet": 0.65}  # on video, as ../shared/data/SOURCES.md advises
_ALL = slice(None)


@dataclass(frozen=True)
class Layout:
    """Where a model's outputs hold what is read. axis: Of the channels.

    objectness: The output and its channel that say whether there is anything; None: every cell counts alike.
    read: Outputs and channels, each relative to its own variation, in proportion to objectness.
    """

    axis: int
    objectness: tuple[str, slice] | None
    read: tuple[tuple[str, slice], ...]


LAYOUT = {
    "fastestdet": Layout(1, ("758", slice(0, 1)), (("758", slice(1, 5)), ("758", slice(5, 85)))),
    "yolox_nano": Layout(2, ("output", slice(4, 5)), (("output", slice(0, 4)), ("output", slice(5, 85)))),
    "ultraface": Layout(2, ("scores", slice(1, 2)), (("boxes", _ALL),)),
    "resnet20": Layout(1, None, (("logits", _ALL),)),
}
CLEAN, DARK = ("dark", 0), ("dark", 4)
RUNS = (
    (CLEAN, [CLEAN, *product(CONDITIONS, SEVERITIES)]),
    (DARK, [("dark", severity) for severity in (4, 3, 2, 1, 0)]),
)
GAIN_DB = 3.0  # what is worth a recalibration
_COMPARED = 3  # times the frames that calibrate
_PROBES = 3  # one calibrating frame in so many measures sensitivities

Tensors = list[NDArray[np.float32]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """Of one engine on some frames: noise over FP32's variation, and the fidelity of each frame.

    empty: the frames on which neither found anything.
    matches: With FP32; none of a classifier.
    """

    noise: float
    frames: Floats
    empty: NDArray[np.bool_]
    matches: MatchCounts

    @property
    def fidelity(self) -> float:
        """The mean, as the daemon has it; 1 where nothing was found, for then nothing was missed."""
        return float(self.frames.mean(where=~self.empty)) if not self.empty.all() else 1.0


@dataclass(frozen=True)
class Rung:
    """One condition on one clip: what the signals say, and what the stale and the fresh engine do.

    live: the stale engine, on the frames that the signals are of.
    stale, fresh: on the frames that are compared.
    switched: the engine of the other regime, where the monitor would have switched to that; else None.
    """

    clip: str
    scene: str
    calibrated: str
    condition: str
    severity: int
    signals: Mapping[str, float]
    live: Answers
    stale: Answers
    fresh: Answers
    switched: Answers | None

    @property
    def real_db(self) -> float:
        return 10.0 * float(np.log10(self.stale.noise / self.fresh.noise))

    @property
    def gained(self) -> float:
        """Of fidelity, on the frames on which one of the engines or FP32 found anything."""
        return self._mean_gain(np.ones(self.stale.empty.size, np.bool_))

    def gained_on_half(self, half: int) -> float:
        """The same on every other frame, the first of them or the second."""
        return self._mean_gain(np.arange(self.stale.empty.size) % 2 == half)

    def _mean_gain(self, chosen: NDArray[np.bool_]) -> float:
        counts = chosen & ~(self.stale.empty & self.fresh.empty)
        return float((self.fresh.frames - self.stale.frames).mean(where=counts)) if counts.any() else 0.0


def loses_fidelity(before: Answers, after: Answers, confidence: float) -> bool:
    """Whether the fidelity after is below that before, frame by frame (Student's t, one-sided)."""
    lost = (before.frames - after.frames)[~(before.empty & after.empty)]
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

    def observe(self, tensors: Tensors) -> list[dict[str, AbsHistogram]]:
        return [dict(self._observer.observe(tensor).histograms) for tensor in tensors]

    def calibrate(self, frames: Sequence[Mapping[str, AbsHistogram]]) -> Calibration:
        seen = dict[str, AbsHistogram]()
        for frame in frames:
            merge_into(seen, {tap: frame[tap] for tap in self._needed})
        return calibrate(self.model, seen, "entropy", len(frames), self.name)

    def regime(self, name: str, planned: Model, calibration: Calibration) -> Regime:
        return Regime.from_calibration(name, calibration, calibration.scales, tap_weights(planned, calibration))

    def engine(self, calibration: Calibration) -> Engine:
        graph = quantised_graph(self.model.master, self.model.plan, calibration).graph
        return self._backend.load(self._backend.build(self.model.build_request(graph, "int8")).engine)

    def truths(self, tensors: Tensors) -> list[Mapping[str, Array]]:
        return [self._observer.infer(tensor) for tensor in tensors]

    def answers(self, engine: Engine, tensors: Tensors, truths: Sequence[Mapping[str, Array]]) -> Answers:
        served = [engine.infer(tensor) for tensor in tensors]
        pairs = [(self._decode(a, x), self._decode(b, x)) for a, b, x in zip(served, truths, tensors, strict=True)]
        boxes = [(a, b) for a, b in pairs if isinstance(a, Detections) and isinstance(b, Detections)]
        matches = sum((count_matches(*pair) for pair in boxes), MatchCounts())
        agreed = [fidelity(*pair) for pair in pairs]
        empty = np.array([each.is_empty for each in agreed])
        return Answers(self.noise(served, truths), np.array([each.value for each in agreed]), empty, matches)

    def noise(self, served: Sequence[Mapping[str, Array]], truths: Sequence[Mapping[str, Array]]) -> float:
        """Of objectness, boxes and classes: squared error over variation in FP32, added up; see above."""
        layout = LAYOUT[self.name]
        weight, noise = None, 0.0
        if layout.objectness is not None:
            found, truth = (_rows(outputs, *layout.objectness, layout.axis) for outputs in (served, truths))
            noise, weight = _relative_error(found, truth, np.ones(len(truth))), truth[:, 0]
        for part in layout.read:
            found, truth = (_rows(outputs, *part, layout.axis) for outputs in (served, truths))
            noise += _relative_error(found, truth, np.ones(len(truth)) if weight is None else weight)
        return noise

    def measure_sensitivities(self, calibration: Calibration, tensors: Tensors) -> Model:
        """The model under a plan that knows what each group does alone in INT8, measured as `tared plan` does."""
        model = self.model
        grouping = fusion_groups(model.observed, model.placement)
        layers = [node for node in model.master.graph.node if node.name in model.placement.weights]
        channels = observe_channels(model.master, layers, tensors, self._backend, lambda *_: None)
        proposed = propose_repairs(model.master, model.placement, calibration, channels, ())
        nsr = np.array([sum(proposed.after.get(name, 0.0) for name in group.layers) for group in grouping.groups])
        asked = WhatIf(model, calibration, [tensors], self._backend)

        def diverge(int8: NDArray[np.bool_]) -> float:
            floats = grouping.plan(int8.tolist(), "not measured now")
            return asked.evaluate(PrecisionPlan({**floats, **model.plan.floats})).divergence

        noise = measure_noise(labels(grouping, model.plan.floats, {}), nsr, diverge, silent)
        groups = describe_groups(model.master, grouping, noise)
        return model.with_plan(replace(model.plan, evidence={"sensed": True, "groups": groups}))

    def weights(self, planned: Model, calibration: Calibration) -> dict[str, dict[str, float]]:
        """By tap, under each of the three weightings."""
        even = dict.fromkeys(self._needed, 1.0)
        return {OURS: tap_weights(planned, calibration), OWN: tap_weights(self.model, calibration), EVEN: even}

    def _decode(self, outputs: Mapping[str, Array], tensor: NDArray[np.float32]) -> Answer:
        return self._task.decode(outputs, tensor.shape)

    def close(self) -> None:
        self._observer.close()


def would_switch(serving: Regime, other: Regime, frames: Sequence[dict[str, AbsHistogram]]) -> bool:
    """Whether the daemon's monitor asks for it, by frames that are seven seconds apart."""
    monitor = DriftMonitor(DriftConfig(), RegimesConfig().switch_db, serving, [other])
    for number, histograms in enumerate(frames):
        monitor.update(7.0 * number, histograms)
    return monitor.state.switch_to == other.artefact


@dataclass(frozen=True)
class Sets:
    """Three interleaved sets of frames of a clip, none in two of them."""

    calibrating: Sequence[Image]
    observed: Sequence[Image]
    compared: Sequence[Image]


def split(images: Sequence[Image], frames: int) -> Sets:
    """So many frames calibrate, and as many are observed; of the rest up to three times as many are compared.

    The real gain is the mean over the compared ones: with as few as an observer sees it would be mostly chance.
    """
    spread = np.linspace(0, len(images) - 1, 3 * frames).astype(int).tolist()
    seen = {*spread[0::3], *spread[1::3]}
    rest = [number for number in range(len(images)) if number not in seen]
    chosen = np.linspace(0, len(rest) - 1, min(len(rest), _COMPARED * frames)).astype(int).tolist()
    return Sets(
        [images[number] for number in spread[0::3]],
        [images[number] for number in spread[1::3]],
        [images[rest[number]] for number in chosen],
    )


def climb(name: str, frames: int, advance: Callable[[], object]) -> list[Rung]:
    """All conditions on all clips. Sensitivities are measured once, on the first clip."""
    rungs, planned = list[Rung](), None
    with closing(Ladder(name)) as ladder:
        for title, clip in CLIPS[name].items():
            images = clip.images()
            sets = split(images, clip.sets * frames)
            lights = [ladder.tensors(sets.calibrating, *lit, seed=0) for lit, _ in RUNS]
            calibrations = [ladder.calibrate(ladder.observe(tensors)) for tensors in lights]
            if planned is None:
                planned = ladder.measure_sensitivities(calibrations[0], lights[0][::_PROBES])
            with ExitStack() as stack:
                engines = [stack.enter_context(closing(ladder.engine(each))) for each in calibrations]
                for which in (0, 1):
                    pair = [(calibrations[each], engines[each]) for each in (which, 1 - which)]
                    rungs += _climb_from(ladder, planned, (title, clip.scene), sets, which, pair, advance)
    return rungs


def _climb_from(
    ladder: Ladder,
    planned: Model,
    shot: tuple[str, str],
    sets: Sets,
    run: int,
    pair: Sequence[tuple[Calibration, Engine]],
    advance: Callable[[], object],
) -> list[Rung]:
    """The conditions of a run; shot: clip and scene; pair: what serves, and the other regime."""
    (lit, conditions), rungs = RUNS[run], list[Rung]()
    first, second = len(sets.calibrating), len(sets.calibrating) + len(sets.observed)  # seeds: no noise comes twice
    signals = Signals(pair[0][0], ladder.weights(planned, pair[0][0]))
    serving, other = (ladder.regime(name, planned, each[0]) for name, each in zip(("now", "then"), pair, strict=True))
    shown = f"{lit[0]} {lit[1]}" if lit[1] else "clean"
    for condition, severity in conditions:
        observed = ladder.tensors(sets.observed, condition, severity, seed=first)
        seen = ladder.observe(observed)
        now = ladder.answers(pair[0][1], observed, ladder.truths(observed))
        live = ladder.calibrate(seen)
        compared = ladder.tensors(sets.compared, condition, severity, seed=second)
        truths = ladder.truths(compared)
        with closing(ladder.engine(live)) as fresh:
            stale, anew = (ladder.answers(engine, compared, truths) for engine in (pair[0][1], fresh))
        switches = would_switch(serving, other, seen)
        switched = ladder.answers(pair[1][1], compared, truths) if switches else None
        rungs.append(Rung(*shot, shown, condition, severity, signals.of(live.histograms), now, stale, anew, switched))
        advance()
    return rungs


def _rows(outputs: Sequence[Mapping[str, Array]], name: str, channels: slice, axis: int) -> Floats:
    """One output of several frames: (cells, channels)."""
    arrays = [np.moveaxis(each[name], axis, -1) for each in outputs]
    return np.concatenate([array.reshape(-1, array.shape[-1])[:, channels] for array in arrays]).astype(np.float64)


def _relative_error(found: Floats, truth: Floats, weight: Floats) -> float:
    mean = np.average(truth, axis=0, weights=weight)
    return float((weight @ np.square(found - truth)).sum() / (weight @ np.square(truth - mean)).sum())
