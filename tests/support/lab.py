"""The shared models with their specs, and the command line in this process: what tests of real models share."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from runtime_under_test import RUNTIME

from fleet.cli.main import main

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
        """The detections that `tared infer` writes, by frame."""
        results = self.folder / "results.jsonl"
        told = tared("infer", target, "--frames", frames, "-o", results)
        lines = [json.loads(line)["detections"] for line in results.read_text().splitlines()]
        assert len(lines) == told["frames"]
        return lines


def tared(*arguments: object) -> dict[str, Any]:
    """A command's JSON, on the runtime under test."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main([*map(str, arguments), "--backend", RUNTIME, "--json"]) == 0
    told: dict[str, Any] = json.loads(output.getvalue())
    return told


@pytest.fixture(scope="module", name="lab")
def lab_fixture(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(shared_data, tmp_path_factory.mktemp("lab"))
