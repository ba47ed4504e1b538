"""Real models on real images, through the command line: accuracy in INT8, what the decoders find, constant memory."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from brokers import free_port

from agent.build import open_model
from agent.camera import parse_source, read_images
from agent.cli import main
from agent.detections import Detections, LabelledBoxes, match
from agent.fidelity import Fidelity, fidelity
from agent.model_spec import load_model_spec
from agent.offline import open_engine
from agent.vision import VisionTask
from calibrate.histogram import AbsHistogram, merge
from engines.backend import open_backend
from engines.store import read_artefact

CIFAR_TRAIN, CIFAR_TEST = "img_cifar10_train_calib_500.zip", "img_cifar10_test_A_3000.zip"
COCO = "img_coco_train2017_first128_labelled.zip"
FACES = "img_faces_dlib_9_labelled.zip"
ASL = "vid_face_asl_{}_640x480.mkv"
PERSON, STREET = "vid_one_by_one_person_768x432.mp4", "vid_vehicle_surveillance_640x352.mp4"

SPECS: dict[str, dict[str, Any]] = {
    "resnet20": {
        "path": "cls_resnet20_cifar10_fp32.onnx",
        "task": "classify",
        "input": {
            "color": "rgb",
            "resize": "stretch",
            "scale": 1 / 255,
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
        },
        "labels": ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
    },
    "fastestdet": {
        "path": "det_fastestdet_352_coco80_fp32.onnx",
        "task": "detect",
        "decoder": "fastestdet",
        "input": {"color": "bgr", "resize": "stretch", "scale": 1 / 255},
        "labels": "coco.txt",
        "score_threshold": 0.65,
        "iou_threshold": 0.45,
    },
    "ultraface": {
        "path": "face_ultraface_rfb_320_fp32.onnx",
        "task": "detect",
        "decoder": "ssd",
        "input": {"color": "rgb", "resize": "stretch", "mean": [127], "std": [128]},
        "labels": ["face"],
        "score_threshold": 0.6,
        "iou_threshold": 0.3,
    },
    "yolox_nano": {
        "path": "det_yolox_nano_416_coco80_fp32.onnx",
        "task": "detect",
        "decoder": "yolox",
        "input": {"color": "bgr", "resize": "letterbox", "anchor": "top-left", "pad": 114},
        "labels": "coco.txt",
        "score_threshold": 0.3,
        "iou_threshold": 0.5,
    },
}
CALIBRATED_ON = {
    "resnet20": (CIFAR_TRAIN, 500),
    "fastestdet": (COCO, 128),
    "ultraface": (ASL.format("again"), 512),  # all of its 77 frames
    "yolox_nano": (COCO, 32),
}


class Lab:
    """The shared models with their specs; each is calibrated and built into an INT8 artefact on first use."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data = data
        self.folder = folder
        with zipfile.ZipFile(data / COCO) as archive:
            (folder / "coco.txt").write_bytes(archive.read("classes.txt"))

    def spec(self, name: str) -> Path:
        """The MODEL.yaml of the float reference."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**SPECS[name], "path": str(self.data / SPECS[name]["path"])}))
        return path

    def int8(self, name: str) -> Path:
        """The INT8 artefact."""
        artefact, calibration = self.folder / name, self.folder / f"{name}.json"
        if not artefact.exists():
            source, count = CALIBRATED_ON[name]
            frames = ["--frames", self.data / source, "--count", count]
            told = tared("calibrate", self.spec(name), *frames, "-o", calibration)
            assert 32 <= told["frames"] <= count
            told = tared("build", self.spec(name), "--calibration", calibration, "-o", artefact)
            assert told["int8_macs_share"] > 0.99
        return artefact

    def detections(self, target: Path, frames: Path) -> list[list[dict[str, Any]]]:
        """What `tared infer` writes, frame by frame."""
        results = self.folder / "results.jsonl"
        told = tared("infer", target, "--frames", frames, "-o", results)
        lines = [json.loads(line)["detections"] for line in results.read_text().splitlines()]
        assert len(lines) == told["frames"]
        return lines


def tared(*arguments: object) -> dict[str, Any]:
    """A command's JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main([*map(str, arguments), "--json"]) == 0
    told: dict[str, Any] = json.loads(output.getvalue())
    return told


@pytest.fixture(scope="module")
def lab(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(shared_data, tmp_path_factory.mktemp("lab"))


# ---- accuracy


@pytest.mark.slow
def test_resnet20_in_int8_is_within_half_a_point_of_float(lab: Lab) -> None:
    scores = [tared("evaluate", target, "--dataset", lab.data / CIFAR_TEST) for target in targets(lab, "resnet20")]
    assert [score["images"] for score in scores] == [3000, 3000]
    assert scores[0]["top1"] == pytest.approx(0.91, abs=1e-4)
    assert scores[1]["top1"] >= scores[0]["top1"] - 0.005


@pytest.mark.slow
def test_fastestdet_finds_on_coco_what_its_authors_model_finds(lab: Lab) -> None:
    scores = [tared("evaluate", target, "--dataset", lab.data / COCO) for target in targets(lab, "fastestdet")]
    assert [score["images"] for score in scores] == [128, 128]
    assert scores[0]["map50"] == pytest.approx(0.3191, abs=0.01)
    assert scores[1]["map50"] >= scores[0]["map50"] - 0.03


@pytest.mark.slow
def test_fastestdet_sees_the_cars_of_a_street_and_the_person_in_a_room(lab: Lab) -> None:
    for target in targets(lab, "fastestdet"):
        street = lab.detections(target, lab.data / STREET)
        assert len(street) == 265
        assert share(street, "car") > 0.5
    room = first_frames(lab, PERSON, every=10)
    seen = [
        [any(label == "person" for label in labels) for labels in labels_of(target, room)]
        for target in targets(lab, "fastestdet")
    ]
    assert 0.6 < np.mean(seen[0]) < 0.9  # people enter and leave
    assert np.mean(np.equal(seen[0], seen[1])) > 0.95


def test_ultraface_finds_the_43_faces_of_nine_photos(lab: Lab) -> None:
    truth = labelled_faces(lab.data / FACES)
    assert sum(map(len, truth)) == 43
    for target in targets(lab, "ultraface"):
        found = [boxes_of(frame) for frame in lab.detections(target, lab.data / FACES)]
        hits = [int(match(seen, faces, (0.4,)).sum()) for seen, faces in zip(found, truth, strict=True)]
        assert (sum(hits), sum(map(len, found))) == (43, 43)


@pytest.mark.slow
def test_ultraface_in_int8_agrees_with_float_on_clips_it_was_not_calibrated_on(lab: Lab) -> None:
    for clip in ("book", "no", "walk", "yes"):
        agreements = list(fidelities(lab, "ultraface", ASL.format(clip)))
        assert len(agreements) > 60
        assert not any(agreement.is_empty for agreement in agreements)  # a face in every frame
        assert np.mean([agreement.value for agreement in agreements]) >= 0.95


@pytest.mark.slow
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


def share(frames: list[list[dict[str, Any]]], label: str) -> float:
    """In which share of the frames something of this label was found."""
    return float(np.mean([any(found["label"] == label for found in frame) for frame in frames]))


def first_frames(lab: Lab, clip: str, every: int) -> list[np.ndarray]:
    source = parse_source(str(lab.data / clip))
    return [image for _, image in itertools.islice(read_images(source), 0, None, every)]


def labels_of(target: Path, images: list[np.ndarray]) -> list[set[str]]:
    with open_engine(target, open_backend("onnxruntime", 2)) as (engine, spec):
        task = VisionTask(spec, engine.inputs, engine.outputs)
        found = [task.decode(engine.infer(task.preprocess(image)[0])) for image in images]
    return [{spec.label(int(number)) for number in frame.classes} for frame in found if isinstance(frame, Detections)]


def fidelities(lab: Lab, name: str, clip: str) -> Iterator[Fidelity]:
    """Per frame, how far the INT8 artefact says what the float reference says."""
    backend = open_backend("onnxruntime", 2)
    spec_path, artefact = targets(lab, name)
    with open_engine(spec_path, backend) as (reference, spec), open_engine(artefact, backend) as (engine, _):
        task = VisionTask(spec, reference.inputs, reference.outputs)
        for _, image in read_images(parse_source(str(lab.data / clip))):
            tensor, _ = task.preprocess(image)
            yield fidelity(task.decode(engine.infer(tensor)), task.decode(reference.infer(tensor)))


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


# ---- calibration


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_frames(lab: Lab) -> None:
    peaks = {}
    for count in (64, 1024):
        output = lab.folder / "memory.json"
        command = ["calibrate", lab.spec("resnet20"), "--frames", lab.data / PERSON, "--count", count, "-o", output]
        done = subprocess.run(
            [sys.executable, "-m", "agent.cli", *map(str, command), "--json"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        told = json.loads(done.stdout)
        assert told["frames"] == count
        peaks[count] = told["peak_rss_bytes"]
    assert peaks[1024] == pytest.approx(peaks[64], rel=0.05)


def test_the_batch_size_never_changes_a_histogram(lab: Lab) -> None:
    backend = open_backend("onnxruntime", 2)
    model = open_model(load_model_spec(lab.spec("resnet20")), backend)
    with closing(backend.observer(model.master, model.placement.taps)) as observer:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        images = itertools.islice(read_images(parse_source(str(lab.data / CIFAR_TRAIN))), 0, 480, 20)
        batch = np.concatenate([task.preprocess(image)[0] for _, image in images])
        assert len(batch) == 24
        by_size = {}
        for size in (1, 3, 8):
            total: dict[str, AbsHistogram] = {}
            for start in range(0, len(batch), size):
                for name, histogram in observer.observe(batch[start : start + size]).histograms.items():
                    total[name] = merge(total[name], histogram) if name in total else histogram
            by_size[size] = total
    assert len(by_size[1]) == 20
    for size in (3, 8):
        for name, expected in by_size[1].items():
            found = by_size[size][name]
            assert np.array_equal(found.counts, expected.counts)
            assert (found.range_exp, found.amax, found.zeros, found.nonfinite) == (
                expected.range_exp, expected.amax, expected.zeros, expected.nonfinite,
            )  # fmt: skip


# ---- the daemon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "clip", "speed", "frames"), [("fastestdet", PERSON, 5, 400), ("ultraface", ASL.format("book"), 0.6, 109)]
)
def test_the_daemon_serves_a_users_own_model_and_video(
    lab: Lab, tmp_path: Path, name: str, clip: str, speed: float, frames: int
) -> None:
    config = {
        "model": str(lab.spec(name)),
        "state_dir": "state",
        "camera": {"source": str(lab.data / clip), "speed": speed},
        "observe": {"alert_period_s": 0.05, "held_out": 16},
        "calibration": {"frames": 16},
        "mqtt": {"host": "127.0.0.1", "port": free_port()},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = ["run", "-c", str(tmp_path / "config.yaml"), "--frames", str(frames), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "agent.cli", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["frames"], summary["dropped"]) == (frames, {})
    (swap,) = summary["swaps"]
    assert swap["fidelity"] >= 0.9
    artefact = read_artefact(Path(summary["artefact"]))
    assert artefact.id == swap["artefact"]
    assert artefact.manifest["inputs"]["precision"] == "int8"
    assert artefact.manifest["int8_macs_share"] > 0.99
