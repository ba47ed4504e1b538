"""What the precision benchmark puts its contenders through: splits of real frames, task scores and times."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean

import numpy as np
import onnxruntime as ort
import yaml
from numpy.typing import NDArray

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.models.model import open_model
from agent.vision.answer import Answer
from agent.vision.evaluation import evaluate
from agent.vision.fidelity import fidelity
from agent.vision.spec import load_model_spec
from agent.vision.task import VisionTask
from benchmarks.engines import take_turns
from benchmarks.models import DATA, MODELS
from benchmarks.precision_peers import CONTENDERS, FP32, Int8Part, Job, Made, int8_part
from engines.interface import Engine
from engines.registry import open_backend

COCO, LABELS = "img_coco_train2017_first128_labelled.zip", "classes.txt"
CIFAR_TRAIN, CIFAR_TEST = "img_cifar10_train_calib_500.zip", "img_cifar10_test_A_3000.zip"
CLIP = "vid_face_asl_{}_640x480.mkv"
CLIPS = (("again", "book", "walk"), ("yes", "no", "book"))  # calibrates, plans, is scored
SCORES = {"yolox_nano": "map", "fastestdet": "map", "resnet20": "top1"}
_TIMED_FRAMES = 20


@dataclass(frozen=True)
class Split:
    """Sources of the frames that calibrate and that plan, and those scored: labelled, or a clip."""

    calibrate: Path
    plan: Path
    score: Path


@dataclass(frozen=True)
class Result:
    """One contender on one split. score: mAP, top-1 or nothing; agreement: mean fidelity with FP32; both in [0, 1].

    times: as multiples of FP32's, of the Q/DQ graph as written and as ONNX Runtime treats it by default.
    """

    made: Made
    int8: Int8Part
    score: float | None
    agreement: float
    times: tuple[float, float]


def halves(folder: Path) -> list[Path]:
    """The COCO images and labels in two zips, even and odd ones by name."""
    paths = [folder / f"half-{number}.zip" for number in (0, 1)]
    with zipfile.ZipFile(DATA / COCO) as archive:
        images = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        (folder / LABELS).write_bytes(archive.read(LABELS))
        for number, path in enumerate(paths):
            names = [LABELS, *images[number::2]]
            labels = [name.replace("images/", "labels/").replace(".jpg", ".txt") for name in images[number::2]]
            with zipfile.ZipFile(path, "w") as half:
                for name in (*names, *labels):
                    half.writestr(name, archive.read(name))
    return paths


def splits(name: str, folder: Path) -> list[Split]:
    if name == "resnet20":
        return [Split(DATA / CIFAR_TRAIN, DATA / CIFAR_TRAIN, DATA / CIFAR_TEST)]
    if name == "ultraface":
        return [Split(*(DATA / CLIP.format(clip) for clip in clips)) for clips in CLIPS]
    even, odd = halves(folder)
    return [Split(even, even, odd), Split(odd, odd, even)]


class Contest:
    """One model on one split: makes contenders' graphs and scores them."""

    def __init__(self, name: str, split: Split, max_loss: float, folder: Path) -> None:
        """folder: of the split alone, below the one with the labels."""
        keys, _ = MODELS[name]
        labels = {"labels": str(folder.parent / LABELS)} if SCORES.get(name) == "map" else {}
        spec = folder / f"{name}.yaml"
        spec.write_text(yaml.safe_dump({**keys, **labels, "path": str(DATA / str(keys["path"]))}), encoding="utf-8")
        self._name, self._split, self._folder = name, split, folder
        self._spec = load_model_spec(spec)
        self._backend = open_backend("onnxruntime")
        self.reference = open_model(self._spec).master.SerializeToString()
        self._float = self._backend.load(self.reference)
        self._task = VisionTask(self._spec, self._float.inputs, self._float.outputs)
        np.save(folder / "tensors.npy", np.concatenate(self._tensors(split.calibrate)))
        self._job = Job(spec, self._spec.path, split.calibrate, folder / "tensors.npy", split.plan, max_loss, folder)

    def make(self, contender: str) -> Made:
        """Raises PeerError."""
        if contender == FP32:
            return Made(self.reference, 0.0, 0.0)
        folder = self._folder / contender.replace(" ", "-")
        folder.mkdir()
        return CONTENDERS[contender](replace(self._job, folder=folder))

    def judge(self, made: Mapping[str, Made], rounds: int) -> dict[str, Result]:
        """All contenders' results; FP32 is among them. Timed are `rounds` inferences of each, in turn."""
        times = self._times([each.graph for each in made.values()], rounds)
        float_s = times[list(made).index(FP32)][0]
        return {
            name: Result(each, int8_part(each.graph), *self._score(each), (written / float_s, default / float_s))
            for (name, each), (written, default) in zip(made.items(), times, strict=True)
        }

    def _score(self, made: Made) -> tuple[float | None, float]:
        """The task's score and the agreement with FP32, which is of the frames where anything was found."""
        with closing(self._backend.load(made.graph)) as engine:
            found = [fidelity(self._predict(engine, tensor), truth) for tensor, truth in self._truths]
            key = SCORES.get(self._name)
            score = evaluate(engine, self._spec, self._split.score).scores[key] if key else None
        return score, mean(each.value for each in found if not each.is_empty)

    def _times(self, graphs: Sequence[bytes], rounds: int) -> list[tuple[float, float]]:
        """Median seconds of each graph, as written and as ONNX Runtime treats it by default."""
        frames = [tensor for tensor, _ in self._truths[:_TIMED_FRAMES]]
        with ExitStack() as stack:
            written = [stack.enter_context(closing(self._backend.load(graph))).infer for graph in graphs]
            medians = take_turns([*written, *map(_default_session, graphs)], frames, rounds)
        return list(zip(medians[: len(graphs)], medians[len(graphs) :], strict=True))

    def close(self) -> None:
        self._float.close()

    @cached_property
    def _truths(self) -> list[tuple[NDArray[np.float32], Answer]]:
        """Every frame to be scored, and what FP32 says of it."""
        return [(tensor, self._predict(self._float, tensor)) for tensor in self._tensors(self._split.score)]

    def _tensors(self, source: Path) -> list[NDArray[np.float32]]:
        return [self._task.preprocess(image)[0].copy() for _, image in read_images(parse_source(str(source)))]

    def _predict(self, engine: Engine, tensor: NDArray[np.float32]) -> Answer:
        return self._task.decode(engine.infer(tensor), tensor.shape)


def _default_session(graph: bytes) -> Callable[[NDArray[np.float32]], object]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda tensor: session.run(None, {name: tensor})
