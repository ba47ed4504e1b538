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
from worlds import SPEC
from zoo import Net


def empty_video(path: Path) -> None:
    cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 48)).release()


def climbing_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../climbs.png", cv2.imencode(".png", picture())[1].tobytes())


FRAMES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone.mp4": (lambda _: None, r"camera\.missing: no .*/gone\.mp4"),
    "nothing.mp4": (lambda path: path.touch(), r"camera\.open: .*/nothing\.mp4 is not readable as video"),
    "text.mp4": (lambda path: path.write_text("no video\n" * 99), r"camera\.open: .*/text\.mp4 is not readable"),
    "header.avi": (empty_video, r"camera\.(open|empty): .*header\.avi"),
    "bare": (lambda path: path.mkdir(), r"images\.none: no image among 0 files in .*/bare"),
    "climbs.zip": (climbing_zip, r"images\.zip: .*/climbs\.zip whose member '\.\./climbs\.png' leads out"),
    "text.zip": (lambda path: path.write_text("no zip"), r"images\.zip: .*/text\.zip does not open"),
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


def test_an_image_that_is_none_is_named_among_good_ones(bench: Bench) -> None:
    (bench.images("mixed", picture(), picture()) / "1.png").write_bytes(b"no image")
    assert bench.refuses(*calibrate(bench, frames="mixed")).startswith("images.unreadable: 1.png in ")


@pytest.mark.parametrize("source", ["csi:front", "v4l2:/dev/video99", "rtsp://127.0.0.1:1/nothing"])
def test_cameras_that_are_not_there_are_named(bench: Bench, source: str) -> None:
    command = ["calibrate", bench / "model.yaml", "--frames", source, "-o", bench / "calibration.json"]
    said = bench.refuses(*command)
    assert said.startswith("camera.")
    assert source.partition(":")[2] in said


def test_a_data_set_whose_folders_are_not_the_models_classes_is_refused(bench: Bench) -> None:
    bench.images("set/a", picture())
    bench.images("set/zebra", picture())
    evaluate = ["evaluate", bench / "artefact", "--dataset", bench / "set"]
    assert bench.refuses(*evaluate).startswith(f"dataset.label: images in folder 'zebra' of {bench.folder}/set")
    unlabelled = bench.write("unlabelled.yaml", {**SPEC, "labels": []})
    said = bench.refuses("evaluate", unlabelled, "--dataset", bench / "set")
    assert said.startswith("dataset.label: 2 folders for 5 classes of the model")
    said = bench.refuses("evaluate", bench / "artefact", "--dataset", bench / "gone")
    assert said.startswith("images.missing: ")


@pytest.mark.parametrize(
    ("labels", "code"),
    [
        (None, "dataset.label"),
        ("7 .5 .5 .1 .1\n", "dataset.label"),
        ("0 .5 .5 .1\n", "dataset.label"),
        ("0 .5 .5 9 .1\n", "dataset.label"),
        ("", "dataset.empty"),
    ],
    ids=["none", "unknown class", "no box", "outside", "no object"],
)
def test_boxes_that_are_none_are_refused(bench: Bench, labels: str | None, code: str) -> None:
    net = Net((1, 3, 8, 8))
    rows = net.node("Reshape", net.conv("image", 3, 6), net.constant(np.array([1, 64, 6])))
    spec = bench.spec("boxes", net.model(rows), task="detect", decoder="end2end", labels=["car"])
    folder = bench.images("set", picture())
    if labels is not None:
        (folder / "0.txt").write_text(labels)
    assert bench.refuses("evaluate", spec, "--dataset", folder).startswith(f"{code}: ")
