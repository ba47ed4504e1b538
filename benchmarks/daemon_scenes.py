"""Engines on scenes that did not make them, for benchmarks/daemon_engines.py.

A job's own child is called in this process: on frames of one scene it calibrates, plans, builds and judges. Its engine
answers frames of every other scene of the model, beside plain INT8 of the same calibration, and both are compared with
the float network. A detector is scored on labelled photos, too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, redirect_stdout
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.progress import Progress

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.collection.collection import CalibrationSet, Collected
from agent.common.errors import AgentError
from agent.config import ObserveConfig, PlanningConfig
from agent.jobs.candidate import run_job
from agent.jobs.request import JobRequest, write_job
from agent.models.build import build_int8
from agent.models.model import Model, open_model
from agent.validation.verdict import MIN_INFORMATIVE
from agent.vision.datasets.labelled_images import object_images
from agent.vision.detections import Detections
from agent.vision.evaluation import answered
from agent.vision.fidelity import fidelity
from agent.vision.registry import accepted_loss
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from agent.vision.tasks.average_precision import AveragePrecision
from agent.vision.tasks.opening import open_task
from benchmarks.corruption import Image
from benchmarks.daemon_process import CIFAR_TEST, CIFAR_TRAIN, COCO, FRAMES, model_spec
from benchmarks.models import DATA
from benchmarks.report import Bar, Section, at_most
from calibrate.errors import TaredError
from calibrate.plan import ALL_INT8
from engines.calibration import load_calibration
from engines.interface import Engine, silent
from engines.registry import open_backend
from engines.store.artefact import read_artefact

K = TypeVar("K")  # names an engine

_ASL = "vid_face_asl_{}_640x480.mkv"
_SIGNS = ("again", "book", "no", "walk", "yes")
_PEOPLE = {
    "street": "vid_vehicle_surveillance_640x352.mp4",
    "person": "vid_one_by_one_person_768x432.mp4",
    **{sign: _ASL.format(sign) for sign in _SIGNS},
    "coco": COCO,
    "faces": "img_faces_dlib_9_labelled.zip",
}
_OBJECTS = {"cifar-train": CIFAR_TRAIN, "cifar-test": CIFAR_TEST}
SCENES = {"resnet20": _OBJECTS, "fastestdet": _PEOPLE, "ultraface": _PEOPLE, "yolox_nano": _PEOPLE}
_DETECTORS = ("fastestdet", "yolox_nano")  # detectors of COCO's classes

_HELD_OUT = ObserveConfig().held_out
_SCORED_FRAMES, _SCORED_PHOTOS = 192, 128  # per scene; on 48 frames chance moves a loss by 0.03
_LEAST_SEEN = 8  # frames with something on them: fewer say nothing of a loss
_MAX_LOSS = accepted_loss("detect", None)
_MARGIN = 0.02  # beyond max_loss, or beyond plain INT8's loss where that is larger
_POINTS = 1.0  # points of mAP below FP32
_SAMPLES = 200  # samples of the bootstrap: photos are drawn with replacement, the same for an engine and for FP32


@dataclass(frozen=True)
class Made:
    """Engines that are made of one scene: that of a job, and plain INT8.

    loss: of the job's, on its held-out frames. plans: how many the job tried.
    """

    planned: bytes
    plain: bytes
    loss: float
    int8_macs_share: float
    plans: int


@dataclass(frozen=True)
class Pair:
    """Losses on one scene of the engines that were made of another. seen: frames on which the float network sees."""

    seen: int
    planned: float
    plain: float

    @property
    def excess(self) -> float:
        """The job's loss beyond what is accepted, or beyond plain INT8's where that is larger."""
        return self.planned - max(_MAX_LOSS, self.plain)


@dataclass(frozen=True)
class Points:
    """The mAP of an engine less that of FP32, in points, and the standard deviation of that in a bootstrap."""

    difference: float
    deviation: float


@dataclass
class Matrix:
    """One model. pairs: by the scene that made the engines, and the scene that scored them.

    points: on the COCO photos, by the scene that made the engine. without: scenes of which no engine was made, and why.
    """

    made: dict[str, Made] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    pairs: dict[tuple[str, str], Pair] = field(default_factory=dict)
    points: dict[str, Points] = field(default_factory=dict)


def scenes(models: list[str], folder: Path, progress: Progress) -> tuple[list[Section], list[Bar]]:
    """Every model and pair of scenes."""
    sections, bars = list[Section](), list[Bar]()
    for name in models:
        matrix = measure(name, SCENES[name], folder, progress)
        sections += [_losses_section(name, matrix), _made_section(name, matrix)]
        bars += scene_bars(name, matrix)
    return sections, bars


def measure(name: str, sources: Mapping[str, str], folder: Path, progress: Progress) -> Matrix:
    """Make engines of each scene, then score all of them on each."""
    spec = model_spec(name)
    model, matrix = open_model(spec), Matrix()
    task = progress.add_task(f"{name}, engines and scores", total=2 * len(sources) + 1)
    for scene, file in sources.items():
        try:
            matrix.made[scene] = make(model, DATA / file, folder)
        except TaredError as error:
            matrix.without[scene] = f"{error.code}: {error.found}"
        progress.advance(task)
    for scene, file in sources.items():
        for maker, pair in _score(model, DATA / file, matrix.made).items():
            matrix.pairs[maker, scene] = pair
        progress.advance(task)
    if name in _DETECTORS:
        planned = {scene: made.planned for scene, made in matrix.made.items()}
        matrix.points = _lost_points(planned, model.master.SerializeToString(), spec)
    progress.advance(task)
    return matrix


def make(model: Model, source: Path, folder: Path) -> Made:
    """Let a job make an engine of frames of the source. Raises TaredError as the job does."""
    backend = open_backend("onnxruntime")
    with tempfile.TemporaryDirectory(dir=folder) as kept:
        place, collected = Path(kept), _collect(model, source)
        request = JobRequest(
            spec=model.spec.model_dump(mode="json"),
            model_sha256=model.sha256,
            backend=backend.name,
            threads=1,
            method="entropy",
            frames=collected.frames,
            source=source.name,
            state_dir=str(place / "state"),
            serving=None,
            max_loss=_MAX_LOSS,
            planning_s=PlanningConfig().budget_s,
        )
        write_job(place / "job", request, collected)
        outcome = run_job(place / "job", lambda _: None)
        assert outcome.artefact is not None
        assert outcome.verdict is not None
        artefact = read_artefact(outcome.artefact)
        calibration = load_calibration(artefact.path / "calibration.json")
        plain = build_int8(model, backend, ALL_INT8, calibration, {}, silent).built.engine
        share, loss = artefact.manifest["int8_macs_share"], 1.0 - outcome.verdict.fidelity
        plans = len(json.loads(artefact.read_file("plan.json"))["evidence"]["candidates"])
        return Made(artefact.read_engine(), plain, loss, share, plans)


def _collect(model: Model, source: Path) -> Collected:
    """Collect as a daemon does, from frames that lie evenly in the source. Raises AgentError (`scene.empty`)."""
    gathered = CalibrationSet(_HELD_OUT)
    with closing(model.open_observer(open_backend("onnxruntime"))) as observer:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        for image in evenly(source, FRAMES + _HELD_OUT):
            tensor, _ = task.preprocess(image)
            seen = observer.observe(tensor)
            gathered.add(tensor, seen, not task.decode(seen.outputs, tensor.shape).is_empty)
    if gathered.informative < MIN_INFORMATIVE:
        found = f"something is seen on {gathered.informative} of the frames that judge"
        raise AgentError("scene.empty", found, f"{MIN_INFORMATIVE} at least", "leave the scene out")
    return Collected(gathered.frames, gathered.histograms, gathered.held_out, gathered.sample, gathered.extremes)


def evenly(source: Path, most: int) -> Iterator[Image]:
    """Yield at most so many frames, BGR uint8 (H, W, 3), that lie evenly in a recording."""
    count = sum(1 for _ in read_images(parse_source(str(source))))
    wanted = set(np.linspace(0, count - 1, min(most, count)).astype(int).tolist())
    for number, (_, image) in enumerate(read_images(parse_source(str(source)))):
        if number in wanted:
            yield image


def _score(model: Model, source: Path, made: Mapping[str, Made]) -> dict[str, Pair]:
    """Score the engines of all scenes on one of them; one that shows next to nothing has no scores."""
    engines = {(scene, "planned"): each.planned for scene, each in made.items()}
    engines |= {(scene, "plain"): each.plain for scene, each in made.items()}
    seen, lost = losses(model, source, engines)
    if seen < _LEAST_SEEN:
        return {}
    return {scene: Pair(seen, lost[scene, "planned"], lost[scene, "plain"]) for scene in made}


def losses(model: Model, source: Path, engines: Mapping[K, bytes]) -> tuple[int, dict[K, float]]:
    """Compare engines with the float network on frames of a recording.

    Return on how many of them that sees anything, and by engine 1 - mean fidelity, over those on which either does.
    """
    backend, seen = open_backend("onnxruntime"), 0
    lost: dict[K, list[float]] = {key: [] for key in engines}
    with ExitStack() as stack:

        def load(content: bytes) -> Engine:
            return stack.enter_context(closing(backend.load(content)))

        reference = load(model.master.SerializeToString())
        loaded = {key: load(engine) for key, engine in engines.items()}
        task = VisionTask(model.spec, reference.inputs, reference.outputs)
        is_clip = parse_source(str(source)).kind == "video"
        for image in evenly(source, _SCORED_FRAMES if is_clip else _SCORED_PHOTOS):
            truth, _ = task.infer(reference, image)
            seen += not truth.is_empty
            for key, engine in loaded.items():
                agreement = fidelity(task.infer(engine, image)[0], truth)
                if not agreement.is_empty:
                    lost[key].append(1.0 - agreement.value)
    return seen, {key: float(np.mean(each)) if each else 0.0 for key, each in lost.items()}


def _lost_points(engines: Mapping[str, bytes], reference: bytes, spec: ModelSpec) -> dict[str, Points]:
    """Return how many points of mAP each engine has beyond the float network, on the COCO photos."""
    images = object_images(DATA / COCO, spec.labels)

    samples = np.random.default_rng(0).integers(len(images), size=(_SAMPLES, len(images)))

    def points(content: bytes) -> list[float]:
        """Return the mAP in points on all images, and on each sample of them."""
        with closing(open_backend("onnxruntime").load(content)) as engine:
            precision = AveragePrecision()
            for found, truth in answered(engine, open_task(spec).evaluation_spec, images):
                assert isinstance(found, Detections)
                precision.add(found, truth)
            evaluation = precision.evaluated()
        return [_sampled_points(evaluation, sample) for sample in (range(len(images)), *samples)]

    of_float = points(reference)
    found = {}
    for scene, content in engines.items():
        lost = np.subtract(points(content), of_float)
        found[scene] = Points(float(lost[0]), float(np.std(lost[1:])))
    return found


def _sampled_points(evaluation: Any, images: Sequence[int]) -> float:
    """Return the mAP in points on these images, which may be there more than once. evaluation: COCOeval's."""
    of_each = evaluation.evalImgs  # by class, then size, of which the first is any, then image
    params = copy(evaluation.params)
    count, sizes = len(params.imgIds), len(params.areaRng)
    sample = copy(evaluation)
    sample.evalImgs = [
        of_each[number * sizes * count + image] for number in range(len(params.catIds)) for image in images
    ]
    params.imgIds, params.areaRng, params.maxDets = list(range(len(images))), params.areaRng[:1], params.maxDets[-1:]
    sample.params = sample._paramsEval = params
    with redirect_stdout(None):
        sample.accumulate()
    precision = sample.eval["precision"]
    return 100.0 * float(precision[precision >= 0.0].mean())


def _losses_section(name: str, matrix: Matrix) -> Section:
    """One row for each scene that made engines, one column for each that scored them."""
    scored = list(dict.fromkeys(scene for _, scene in matrix.pairs))
    table = Section(
        f"{name}: loss on other scenes, of the job's engine / of plain INT8",
        ("made of", *scored, *(["mAP to FP32, points"] if matrix.points else [])),
        note=f"Bold: beyond max({_MAX_LOSS:g}, plain INT8's) + {_MARGIN:g}. In brackets: its own scene. "
        "±: standard deviation in a bootstrap of the photos.",
    )
    for scene in matrix.made:
        cells = [_cell(matrix.pairs[scene, other], other == scene) for other in scored]
        each = matrix.points.get(scene)
        points = [f"{each.difference:+.2f} ± {each.deviation:.2f}"] if each is not None else []
        table.rows.append((scene, *cells, *(f"({cell})" if scene == "coco" else cell for cell in points)))
    return table


def _cell(pair: Pair, own: bool) -> str:
    shown = f"{pair.planned:.3f} / {pair.plain:.3f}"
    if own:
        return f"({shown})"
    return f"**{shown}**" if pair.excess > _MARGIN else shown


def _made_section(name: str, matrix: Matrix) -> Section:
    columns = ("made of", "MACs in INT8", "loss on held-out frames", "plans tried", "without an engine because")
    table = Section(f"{name}: engines", columns)
    for scene, made in matrix.made.items():
        table.rows.append((scene, f"{made.int8_macs_share:.3f}", f"{made.loss:.3f}", str(made.plans), ""))
    table.rows += [(scene, "", "", "", reason) for scene, reason in matrix.without.items()]
    return table


def scene_bars(name: str, matrix: Matrix) -> list[Bar]:
    """The bars of one model: the worst pair counts."""
    others = {places: pair for places, pair in matrix.pairs.items() if len(set(places)) == 2}
    if not others:
        return []
    (maker, scene), worst = max(others.items(), key=lambda item: item[1].excess)
    what = f"{name}: loss beyond what is accepted, worst of {len(others)} pairs: {maker} on {scene}"
    bars = [at_most(what, _MARGIN, worst.excess, "")]
    lost = {scene: -points.difference for scene, points in matrix.points.items() if scene != "coco"}
    if lost:
        scene = max(lost, key=lambda each: lost[each])
        bars.append(at_most(f"{name}: points of mAP lost, worst: made of {scene}", _POINTS, lost[scene], ""))
    return bars
