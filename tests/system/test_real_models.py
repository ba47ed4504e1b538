"""Real models on real images, through the command line: accuracy in INT8, and what the decoders find."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab import ASL, CIFAR_TEST, COCO, FACES, STREET, Lab, tared
from runtime_under_test import RUNTIME

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.cli.offline_runs import open_engine
from agent.vision.boxes import LabelledBoxes
from agent.vision.detections import Detections, match
from agent.vision.fidelity import Fidelity, fidelity
from agent.vision.task import VisionTask
from engines.interface import BackendOptions
from engines.registry import open_backend


@pytest.mark.trial
def test_resnet20_in_int8_is_within_half_a_point_of_float(lab: Lab) -> None:
    scores = [tared("evaluate", target, "--dataset", lab.data / CIFAR_TEST) for target in targets(lab, "resnet20")]
    assert [score["images"] for score in scores] == [3000, 3000]
    assert scores[0]["top1"] == pytest.approx(0.91, abs=1e-4)
    assert scores[1]["top1"] >= scores[0]["top1"] - 0.005


@pytest.mark.trial
def test_fastestdet_finds_on_coco_what_its_authors_model_finds(lab: Lab) -> None:
    scores = [tared("evaluate", target, "--dataset", lab.data / COCO) for target in targets(lab, "fastestdet")]
    assert [score["images"] for score in scores] == [128, 128]
    assert scores[0]["map50"] == pytest.approx(0.3191, abs=0.01)
    assert scores[1]["map50"] >= scores[0]["map50"] - 0.03


def test_ultraface_finds_the_43_faces_of_nine_photos(lab: Lab) -> None:
    truth = labelled_faces(lab.data / FACES)
    assert sum(map(len, truth)) == 43
    for target in targets(lab, "ultraface"):
        found = [boxes_of(frame) for frame in lab.detections(target, lab.data / FACES)]
        hits = [int(match(seen, faces, 0.4).sum()) for seen, faces in zip(found, truth, strict=True)]
        assert (sum(hits), sum(map(len, found))) == (43, 43)


@pytest.mark.trial
def test_ultraface_in_int8_agrees_with_float_on_clips_it_was_not_calibrated_on(lab: Lab) -> None:
    for clip in ("book", "no", "walk", "yes"):
        agreements = list(fidelities(lab, "ultraface", ASL.format(clip)))
        assert len(agreements) > 30
        assert not any(agreement.is_empty for agreement in agreements)  # a face in every frame
        assert np.mean([agreement.value for agreement in agreements]) >= 0.95


@pytest.mark.trial
def test_yolox_nano_builds_and_runs_in_int8(lab: Lab) -> None:
    score = tared("evaluate", lab.spec("yolox_nano"), "--dataset", lab.data / COCO)
    assert score["map50"] == pytest.approx(0.5195, abs=0.01)
    clip = first_frames(lab, STREET, every=30)
    found = labels_of(lab.int8("yolox_nano"), clip)
    assert len(found) == 9
    assert sum("car" in labels for labels in found) >= 5  # its accuracy is the mixed-precision plan's affair


def targets(lab: Lab, name: str) -> tuple[Path, Path]:
    """The float reference and the INT8 artefact."""
    return lab.spec(name), lab.int8(name)


def first_frames(lab: Lab, clip: str, every: int) -> list[np.ndarray]:
    source = parse_source(str(lab.data / clip))
    return [image for _, image in itertools.islice(read_images(source), 0, None, every)]


def labels_of(target: Path, images: list[np.ndarray]) -> list[set[str]]:
    with open_engine(target, open_backend(RUNTIME, BackendOptions(threads=2))) as (engine, spec):
        task = VisionTask(spec, engine.inputs, engine.outputs)
        tensors = (task.preprocess(image)[0] for image in images)
        found = [task.decode(engine.infer(tensor), tensor.shape) for tensor in tensors]
    return [{spec.label(int(number)) for number in frame.classes} for frame in found if isinstance(frame, Detections)]


def fidelities(lab: Lab, name: str, clip: str) -> Iterator[Fidelity]:
    """Per frame, of every second one, how far the INT8 artefact says what the float reference says."""
    backend = open_backend(RUNTIME, BackendOptions(threads=2))
    spec_path, artefact = targets(lab, name)
    with open_engine(spec_path, backend) as (reference, spec), open_engine(artefact, backend) as (engine, _):
        task = VisionTask(spec, reference.inputs, reference.outputs)
        for image in first_frames(lab, clip, every=2):
            tensor, _ = task.preprocess(image)
            served, expected = (task.decode(each.infer(tensor), tensor.shape) for each in (engine, reference))
            yield fidelity(served, expected)


def labelled_faces(path: Path) -> list[LabelledBoxes]:
    """dlib's boxes, photo by photo in the order of their names."""
    boxes: dict[str, list[list[float]]] = {}
    with zipfile.ZipFile(path) as archive:
        for part in ("training.xml", "testing.xml"):
            for image in ET.fromstring(archive.read(part)).iter("image"):
                edges = [
                    [float(box.get(key, "nan")) for key in ("left", "top", "width", "height")]
                    for box in image.iter("box")
                ]
                boxes[str(image.get("file"))] = [[x, y, x + width, y + height] for x, y, width, height in edges]
    return [
        LabelledBoxes(boxes=np.array(boxes[name], np.float32), classes=np.zeros(len(boxes[name]), np.int64))
        for name in sorted(boxes)
    ]


def boxes_of(frame: list[dict[str, Any]]) -> Detections:
    return Detections(
        boxes=np.array([found["box"] for found in frame], np.float32).reshape(-1, 4),
        classes=np.array([found["class"] for found in frame], np.int64),
        scores=np.array([found["score"] for found in frame], np.float32),
    )
