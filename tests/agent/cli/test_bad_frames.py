"""Frames and data sets that cannot be read: named, from the archive down to the image."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from bench import Bench, calibrate, picture
from zoo import Net


def climbing_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../climbs.png", cv2.imencode(".png", picture())[1].tobytes())


FRAMES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone.mp4": (lambda _: None, r"camera\.missing: no .*/gone\.mp4"),
    "climbs.zip": (climbing_zip, r"images\.zip: .*/climbs\.zip whose member '\.\./climbs\.png' leads out"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_that_cannot_be_read_are_named(bench: Bench, name: str) -> None:
    make, pattern = FRAMES[name]
    make(bench / name)
    assert re.match(pattern, bench.refuses(*calibrate(bench, frames=name)))
    infer = ["infer", bench / "artefact", "--frames", bench / name, "-o", bench / "results.jsonl"]
    assert re.match(pattern, bench.refuses(*infer))
    if pattern.startswith("images"):
        assert re.match(pattern, bench.refuses("evaluate", bench / "artefact", "--dataset", bench / name))
    assert not (bench.folder.parent / "climbs.png").exists()


@pytest.mark.parametrize("source", ["csi:front", "v4l2:/dev/video99", "rtsp://127.0.0.1:1/nothing"])
def test_cameras_that_are_not_there_are_named(bench: Bench, source: str) -> None:
    command = ["calibrate", bench / "model.yaml", "--frames", source, "-o", bench / "calibration.json"]
    said = bench.refuses(*command)
    assert said.startswith("camera.")
    assert source.partition(":")[2] in said


def test_a_data_set_that_is_missing_or_without_an_object_is_refused(bench: Bench) -> None:
    net = Net((1, 3, 8, 8))
    rows = net.node("Reshape", net.conv("image", 3, 6), net.constant(np.array([1, 64, 6])))
    spec = bench.spec("boxes", net.model(rows), task="detect", decoder="end2end", labels=["car"])
    (bench.images("set", picture()) / "0.txt").touch()
    assert bench.refuses("evaluate", spec, "--dataset", bench / "set").startswith("dataset.empty: ")
    assert bench.refuses("evaluate", spec, "--dataset", bench / "gone").startswith("images.missing: ")
