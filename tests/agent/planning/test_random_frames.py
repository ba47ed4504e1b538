"""Random order: every frame once, the same again, and as the source has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from agent.camera.reader import Image, read_images, source_length
from agent.camera.source import Source, parse_source
from agent.common.errors import CameraError
from agent.planning import frames as frames_module
from agent.planning.frames import RandomFrames

COUNT = 23


def picture(number: int) -> Image:
    return np.full((16, 24, 3), 10 * number, np.uint8)


@pytest.fixture
def video(tmp_path: Path) -> Source:
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (24, 16))
    for number in range(COUNT):
        writer.write(picture(number))
    writer.release()
    return parse_source(str(path))


@pytest.fixture
def folder(tmp_path: Path) -> Source:
    path = tmp_path / "images"
    path.mkdir()
    for number in range(COUNT):
        cv2.imwrite(str(path / f"{number:02}.png"), picture(number))
    return parse_source(str(path))


@pytest.fixture(params=["video", "folder"])
def source(request: pytest.FixtureRequest) -> Source:
    found: Source = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("round_size", [1, 5, 64])
def test_every_frame_comes_once_and_is_the_source_s(source: Source, round_size: int) -> None:
    frames = RandomFrames(source, 3, round_size)
    drawn = dict(frames.draw())
    assert frames.count == COUNT == len(drawn)
    assert list(drawn) != sorted(drawn)
    for index, (_, image) in enumerate(read_images(source)):
        np.testing.assert_array_equal(drawn[index], image)


def test_the_order_is_fixed_by_the_seed_alone(video: Source, folder: Source) -> None:
    def order(source: Source, seed: int, round_size: int = 64, start: int = 0) -> list[int]:
        return [index for index, _ in RandomFrames(source, seed, round_size).draw(start)]

    whole = order(video, 0)
    assert order(folder, 0) == order(video, 0, round_size=4) == whole
    assert order(video, 1) != whole
    for start in (1, 7, COUNT - 1, COUNT, COUNT + 5):
        assert order(video, 0, 4, start) == order(folder, 0, 4, start) == whole[start:]


def test_a_container_that_overstates_its_frames_is_counted(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.avi", tmp_path / "cut.avi"
    writer = cv2.VideoWriter(str(whole), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (320, 240))
    rng = np.random.default_rng(0)
    for _ in range(COUNT):
        writer.write(rng.integers(0, 255, (240, 320, 3), np.uint8))
    writer.release()
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 6 // 10])
    source = parse_source(str(cut))
    frames = RandomFrames(source, 0)
    assert frames.count == sum(1 for _ in read_images(source)) < (source_length(source) or 0)
    assert sorted(index for index, _ in frames.draw()) == list(range(frames.count))


def test_sources_without_frames_are_named(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(CameraError, match=r"images\.none.*bare"):
        _ = RandomFrames(parse_source(str(tmp_path / "bare")), 0).count
    header_only = tmp_path / "empty.avi"
    cv2.VideoWriter(str(header_only), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 48)).release()
    with pytest.raises(CameraError, match=r"camera\.(open|empty).*empty\.avi"):
        list(RandomFrames(parse_source(str(header_only)), 0).draw())


def test_a_camera_gives_a_frame_about_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(_: Source) -> Iterator[tuple[float, Image]]:
        for number in range(10_000):
            yield number / 30, np.full((1, 1, 3), number // 30, np.uint8)

    monkeypatch.setattr(frames_module, "read_images", live)
    frames = RandomFrames(parse_source("rtsp://10.0.0.1/stream"), 0)
    assert frames.count is None
    for begin in (0, 50):
        drawn = list(itertools.islice(frames.draw(start=100), 50))
        assert [index for index, _ in drawn] == list(range(begin, begin + 50))  # none twice: they are other images
        seconds = np.array([image[0, 0, 0] for _, image in drawn], int)
        assert 40 < seconds[-1] < 60
        assert set(np.diff(seconds).tolist()) >= {0, 1}  # at random gaps, so that no rhythm of the scene is met
