"""Recordings that cannot be read, or not all of them: alone, and beside others that can."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import cast

import cv2
import numpy as np
import pytest
from warm_start import tared
from worlds import World, make_world

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.camera.stream_health import FrameLossCounter, StreamState
from agent.common.errors import CameraError
from agent.control.summary import Period, Score
from agent.daemon.review import Panel as AnyPanel
from agent.daemon.review import review
from agent.vision.boxes import NO_BOXES, LabelledBoxes

pytestmark = pytest.mark.slow


def folder_of(path: Path, good: int, bad: int) -> Path:
    path.mkdir()
    for number in range(good):
        picture = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        cv2.imwrite(str(path / f"{number:03}.png"), picture)
    for number in range(bad):
        (path / f"{number:03}-bad.jpg").write_bytes(b"\xff\xd8 no picture")
    return path


def world_of(folder: Path, *names: str) -> World:
    """A daemon that has these as its recordings, with a clip.avi of 40 frames."""
    world = make_world(folder, lambda _: 0.5, 4.0, results={"file": "results.jsonl"})
    world.config.pop("camera")
    world.config["cameras"] = [{"name": name.partition(".")[0], "source": name, "speed": 0} for name in names]
    return world


def numbers(world: World) -> list[int]:
    return [json.loads(line)["frame"] for line in (world.folder / "results.jsonl").read_text().splitlines()]


def test_a_bad_picture_among_good_ones_is_passed_over_and_counted(tmp_path: Path) -> None:
    """Good pictures keep their numbers, by which labels are found."""
    folder_of(tmp_path / "pictures", 10, 2)
    world = world_of(tmp_path, "pictures")
    summary, said = world.run()
    assert (summary["frames"], summary["dropped"]) == (10, {"decode": 2})
    assert numbers(world) == [1, 3, *range(4, 12)]
    assert said.count("unreadable=") == 1


def test_a_reader_that_does_not_count_bad_pictures_fails_on_one(tmp_path: Path) -> None:
    source = parse_source(str(folder_of(tmp_path / "pictures", 3, 1)))
    with pytest.raises(CameraError, match=r"images\.unreadable: 000-bad\.jpg"):
        list(read_images(source))
    dropped: Counter[str] = Counter()
    assert len(list(read_images(source, reading=StreamState(FrameLossCounter(dropped))))) == 3
    assert dropped == {"decode": 1}


def test_labels_belong_to_their_pictures_also_behind_a_bad_one(tmp_path: Path) -> None:
    """Engines are scored after the run."""
    folder_of(tmp_path / "pictures", 10, 2)
    source = parse_source(str(tmp_path / "pictures"))
    boxes = [np.zeros((number, 4), np.float32) for number in range(12)]
    labels = {
        number: LabelledBoxes(boxes=each, classes=np.zeros(number, np.int64)) for number, each in enumerate(boxes)
    }
    shown: list[int] = []

    class Panel:
        """Scores no engine; it records the labels of each picture."""

        def score(self, _: object, truth: LabelledBoxes) -> dict[str, Score]:
            shown.append(len(truth.boxes))
            return {}

    review(cast(AnyPanel, Panel()), source, labels, NO_BOXES, [Period("all", 0.0, 10.0)])
    assert shown == [1, 3, *range(4, 12)]


def test_a_recording_that_cannot_be_read_ends_alone_beside_others(tmp_path: Path) -> None:
    world = world_of(tmp_path, "clip.avi", folder_of(tmp_path / "broken", 0, 2).name)
    summary, said = world.run()
    frames = {name: camera["frames"] for name, camera in summary["cameras"].items()}
    assert frames == {"clip": 40, "broken": 0}
    assert re.search("event=error code=images.unreadable .*camera=broken", said), said


@pytest.mark.parametrize("names", [("broken.mp4",), pytest.param(("broken.mp4", "text.mp4"), marks=pytest.mark.trial)])
def test_a_daemon_without_a_readable_recording_ends_with_its_error(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text("neither a zip nor a video\n" * 100)
    done = tared(*world_of(tmp_path, *names).arguments())
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: camera.open: ")
    assert json.loads(done.stdout)["error"]["code"] == "camera.open"
