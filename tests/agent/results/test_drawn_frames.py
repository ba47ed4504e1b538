"""`tared infer --save`: frames with their results drawn into them, as a video or as pictures."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from bench import CLIP_FRAMES, Bench, contents
from places import ROOT
from results_bench import SPEC
from warm_start import tared

from agent.camera.reader import read_images, source_fps, source_length
from agent.camera.source import parse_source
from agent.common.errors import AgentError
from agent.results import drawn_frames
from agent.results.drawn_frames import open_drawn_frames
from agent.vision.spec import ModelSpec
from examples.street.render import render_video

STREET = ROOT / "examples/street/model.yaml"


def frames_of(path: Path) -> list[np.ndarray]:
    return [image.copy() for _, image in read_images(parse_source(str(path)))]


def changes(frame: np.ndarray, saved: np.ndarray, box: tuple[float, float, float, float]) -> tuple[float, float]:
    """By how many levels the foot of a box has changed, and what is inside the box."""
    left, top, right, bottom = (round(side) for side in box)
    difference = np.abs(saved.astype(int) - frame.astype(int)).max(axis=2)
    border = np.median(difference[min(bottom, len(frame) - 1), left : right + 1])
    return float(border), float(np.median(difference[top + 4 : bottom - 3, left + 4 : right - 3]))


def test_a_video_keeps_size_and_rate_and_shows_the_boxes_that_were_found(bench: Bench) -> None:
    clip, saved, results = render_video(bench / "in.avi", 12), bench / "new/out.mp4", bench / "boxes.jsonl"
    told = bench.json("infer", STREET, "--frames", clip, "-o", results, "--save", saved)
    assert told["frames"] == 12
    assert [path.name for path in saved.parent.iterdir()] == ["out.mp4"]
    source = parse_source(str(saved))
    assert (source_length(source), source_fps(source)) == (12, 10.0)
    found = [json.loads(line)["detections"] for line in results.read_text().splitlines()]
    assert any(found)
    levels = []
    for frame, picture, detections in zip(frames_of(clip), frames_of(saved), found, strict=True):
        assert frame.shape == picture.shape
        boxes = [one["box"] for one in detections]
        levels += [
            changes(frame, picture, (left, top, right, bottom))
            for left, top, right, bottom in boxes
            if right - left > 20 and bottom - top > 20
        ]
    border, inside = np.median(levels, axis=0)  # of all: boxes lie over each other, and the codec smooths
    assert border > 40
    assert border > 3 * inside


def test_a_folder_gets_a_picture_for_each_frame(bench: Bench) -> None:
    bench.json("infer", bench / "artefact", "--frames", bench / "clip.avi", "--save", bench / "drawn")
    names = sorted(path.name for path in (bench / "drawn").iterdir())
    assert names == [f"{number:06}.jpg" for number in range(CLIP_FRAMES)]
    before = contents(bench.folder)
    said = bench.refuses("infer", bench / "artefact", "--frames", bench / "clip.avi", "--save", bench / "drawn")
    assert said.startswith("save.exists: ")
    assert contents(bench.folder) == before


@pytest.mark.parametrize(
    ("name", "code"), [("out.gif", "save.format"), ("model.yaml/out.mp4", "save.write"), ("model.yaml/x", "save.write")]
)
def test_a_place_that_cannot_be_written_is_refused(bench: Bench, name: str, code: str) -> None:
    said = bench.refuses("infer", bench / "artefact", "--frames", bench / "clip.avi", "--save", bench / name)
    assert said.startswith(f"{code}: ")


def test_a_raw_model_has_nothing_to_draw(bench: Bench) -> None:
    raw = bench.write("raw.yaml", {"path": "model.onnx", "task": "raw"})
    said = bench.refuses("infer", raw, "--frames", bench / "clip.avi", "--save", bench / "out.mp4")
    assert said.startswith("save.nothing: ")


def save_all(path: Path, fps: float | None, spec: ModelSpec, *frames: np.ndarray) -> None:
    with open_drawn_frames(path, fps, spec) as save:
        for frame in frames:
            save(frame)


def refusal(path: Path, fps: float | None, *frames: np.ndarray) -> str:
    with pytest.raises(AgentError) as refused:
        save_all(path, fps, SPEC, *frames)
    assert not path.exists()
    assert not path.parent.exists() or list(path.parent.iterdir()) == []
    return refused.value.code


def test_a_video_has_one_size_a_known_rate_and_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = np.zeros((32, 32, 3), np.uint8), np.zeros((64, 32, 3), np.uint8)
    assert refusal(tmp_path / "a.mp4", 10.0, small, large) == "save.size"
    assert refusal(tmp_path / "a.mp4", None, small) == "save.rate"
    monkeypatch.setattr(drawn_frames, "_CODECS", {".mp4": "ZZZZ"})
    assert refusal(tmp_path / "a.mp4", 10.0, small) == "save.writer"


def test_a_video_that_lost_frames_to_a_full_disk_is_none(bench: Bench) -> None:
    """OpenCV writes on without a word: so the frames are counted."""
    clip, saved = render_video(bench / "in.avi", 12), bench / "new/out.mp4"
    ended = tared("infer", STREET, "--frames", clip, "--save", saved, file_bytes=20_000)
    assert ended.returncode == 2
    assert "error: save.write: " in ended.stderr
    assert list(saved.parent.iterdir()) == []


def test_nothing_is_left_of_what_was_interrupted(tmp_path: Path) -> None:
    def interrupted() -> None:
        with open_drawn_frames(tmp_path / "a.mp4", 10.0, SPEC) as save:
            save(np.zeros((32, 32, 3), np.uint8))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_source_without_a_rate_is_a_camera(bench: Bench) -> None:
    assert source_fps(parse_source("rtsp://127.0.0.1/a")) is None
    assert source_fps(parse_source(str(bench / "clip.avi"))) == 10.0
    assert source_fps(parse_source(str(bench.images("pictures", np.zeros((8, 8, 3), np.uint8))))) == 10.0
    assert cv2.imread(str(bench / "pictures/0.png")) is not None
