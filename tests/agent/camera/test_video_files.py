"""Video files as they are: of every codec, cut off, damaged, of uneven times, turned, of sizes that change."""

from __future__ import annotations

import logging
import struct
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from gstreamer import FOLLOWS_SIZES, make_video, require_gstreamer

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.camera.stream_health import FrameLossCounter, StreamState

FRAMES = 30
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _maker() -> None:
    require_gstreamer("Gst")


def read(path: Path) -> tuple[list[float], list[np.ndarray]]:
    stamped = list(read_images(parse_source(str(path))))
    return [round(ts, 3) for ts, _ in stamped], [image for _, image in stamped]


def cut(path: Path, share: float) -> Path:
    """The first part of the file, and no more."""
    content = path.read_bytes()
    shorter = path.with_name(f"cut-{path.name}")
    shorter.write_bytes(content[: int(share * len(content))])
    return shorter


def balls(images: list[np.ndarray]) -> list[int]:
    """Return the number of pixels that the ball covers in each."""
    return [int((image[..., 1] > 128).sum()) for image in images]


@pytest.mark.parametrize("name", ["h264.mp4", "h264.ts", "h265.mkv", "mjpeg.mov"])
def test_every_codec_is_read_whole(tmp_path: Path, name: str) -> None:
    stamps, images = read(make_video(name.partition(".")[0], tmp_path / name))
    assert stamps == [round(0.1 * number, 3) for number in range(FRAMES)]
    assert {image.shape for image in images} == {(240, 320, 3)}
    assert min(balls(images)) > 1000


@pytest.mark.parametrize("name", ["h264.mp4", "h264.ts", "mjpeg.mkv"])
def test_a_file_that_was_cut_off_ends_with_its_last_picture(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_video(name.partition(".")[0], tmp_path / name)
    assert read(whole)[0][-1] == 2.9
    assert not caplog.records
    stamps, images = read(cut(whole, 0.6))
    assert 8 <= len(stamps) < 25
    assert stamps == sorted(stamps)
    assert min(balls(images)) > 1000
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    if not name.endswith(".ts"):  # which says nowhere how long it is
        assert len(said) == 1
        assert f"cut-{name}' truncated_s={stamps[-1]:.2f}" in said[0]


@pytest.mark.parametrize("name", ["mjpeg.mkv", "h264.mkv"])
def test_damaged_pictures_are_counted_and_no_more_is_lost(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenCV reports a damaged picture as it does the end; a picture that only the times miss does not show at all."""
    path = make_video(name.partition(".")[0], tmp_path / name)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if name == "mjpeg.mkv":
        middle = content.index(b"\xff\xd8", middle)  # what its header misses FFmpeg cannot mend
    content[middle : middle + 300] = bytes(300)
    path.write_bytes(content)
    dropped: Counter[str] = Counter()
    stamps = [ts for ts, _ in read_images(parse_source(str(path)), reading=StreamState(FrameLossCounter(dropped)))]
    assert stamps[-1] == pytest.approx(2.9)
    assert len(stamps) < FRAMES
    assert dropped == {"decode": FRAMES - len(stamps)}
    assert not caplog.records


@pytest.mark.parametrize("name", ["h264.mkv", "mjpeg.mov"])
def test_times_are_the_files_own(tmp_path: Path, name: str) -> None:
    path = make_video(f"uneven-{name.partition('.')[0]}", tmp_path / name)
    dropped: Counter[str] = Counter()
    stamps = [ts for ts, _ in read_images(parse_source(str(path)), reading=StreamState(FrameLossCounter(dropped)))]
    assert not dropped
    expected = [0.0]
    for number in range(FRAMES - 1):
        expected.append(expected[-1] + (0.1, 0.2, 0.1, 0.4)[number % 4])
    assert stamps == pytest.approx(expected, abs=0.002)


@pytest.mark.parametrize("degrees", [90, 180])
def test_a_video_is_turned_as_its_container_says(tmp_path: Path, degrees: int) -> None:
    """Telephones write the matrix of a track's header (ISO/IEC 14496-12, 8.3.2), clockwise."""
    path = make_video("h264", tmp_path / "turned.mp4")
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40
    cosine, sine = round(np.cos(np.radians(degrees))), round(np.sin(np.radians(degrees)))
    turned = [cosine, sine, 0, -sine, cosine, 0, 0, 0]
    content[matrix : matrix + 36] = struct.pack(">8iI", *(value << 16 for value in turned), 1 << 30)
    path.write_bytes(content)
    image = read(path)[1][-1]
    upright = read(make_video("h264", tmp_path / "upright.mp4"))[1][-1]
    assert (image == np.rot90(upright, -degrees // 90)).mean() > 0.99


@FOLLOWS_SIZES
def test_a_size_that_changes_is_scaled_to_the_first(tmp_path: Path) -> None:
    """By OpenCV from 4.13 on; until 4.12 it repeats the last picture of the size before."""
    parts = [make_video(kind, tmp_path / f"{kind}.ts").read_bytes() for kind in ("h264", "large-h264", "h264")]
    path = tmp_path / "changing.ts"
    path.write_bytes(b"".join(parts))
    stamps, images = read(path)
    assert len(images) == 3 * FRAMES
    assert stamps == sorted(set(stamps))
    assert {image.shape for image in images} == {(240, 320, 3)}
    small, large = balls(images[:FRAMES]), balls(images[FRAMES : 2 * FRAMES])
    assert np.median(large) == pytest.approx(np.median(small) / 4, rel=0.1)  # the ball is as many pixels as before
    assert cv2.absdiff(images[FRAMES], images[FRAMES + 5]).any()
