"""Pictures whose headers claim more pixels than are allowed: refused before they are decoded, from any source."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest
from mjpeg_server import MjpegServer
from worlds import write_clip

from agent.camera.images import ImageFiles, decode_image
from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.camera.stream_health import FrameLossCounter, StreamState
from agent.common.errors import CameraError, DatasetError

_SIZE = 32000
_START_OF_FRAME = b"\xff\xc0\x00\x11\x08"
_DECODES = """
import resource, sys
from agent.camera.images import decode_image
content = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert decode_image(content) is None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def small(suffix: str = ".jpg") -> bytes:
    return cv2.imencode(suffix, np.zeros((32, 48, 3), np.uint8))[1].tobytes()


def bomb() -> bytes:
    """A JPEG of a few hundred bytes that claims 32000 x 32000 pixels; to the end of its data libjpeg decodes it."""
    content = small()
    at = content.index(_START_OF_FRAME) + len(_START_OF_FRAME)
    return content[:at] + struct.pack(">HH", _SIZE, _SIZE) + content[at + 4 :]


def test_one_costs_no_memory(tmp_path: Path) -> None:
    """OpenCV alone would allocate 3 GB for it; the limit of 2^30 pixels that it has of its own is above."""
    (tmp_path / "bomb.jpg").write_bytes(bomb())
    command = [sys.executable, "-c", _DECODES, str(tmp_path / "bomb.jpg")]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert int(grown) * 1024 < 16 << 20


@pytest.mark.parametrize("suffix", [".bmp", ".jpg", ".png", ".ppm", ".tif", ".webp"])
def test_every_format_of_a_folder_says_its_size(suffix: str) -> None:
    assert decode_image(small(suffix), 32 * 48) is not None
    assert decode_image(small(suffix), 32 * 48 - 1) is None


@pytest.mark.parametrize("packed", [False, True])
def test_one_in_a_folder_or_zip_is_named(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "pictures"
    if packed:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("bomb.jpg", bomb())
    else:
        path.mkdir()
        (path / "bomb.jpg").write_bytes(bomb())
    with pytest.raises(DatasetError, match=r"bomb\.jpg.*at most 67108864 pixels"):
        ImageFiles(path).read("bomb.jpg")


def test_one_in_a_stream_of_pictures_is_passed_over() -> None:
    dropped: Counter[str] = Counter()
    with MjpegServer() as camera:
        camera.damage = lambda number, content: bomb() if number % 3 == 1 else content
        frames = list(islice(read_images(parse_source(camera.url), reading=StreamState(FrameLossCounter(dropped))), 6))
    assert {image.shape for _, image in frames} == {(48, 64, 3)}
    assert dropped["decode"] >= 2


def test_a_video_of_larger_pictures_is_refused(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.avi", lambda _: 0.5, 3)
    source = parse_source(str(tmp_path / "clip.avi"))
    height, width = next(iter(read_images(source)))[1].shape[:2]
    assert len(list(read_images(replace(source, max_pixels=width * height)))) == 3
    with pytest.raises(CameraError, match=rf"pictures of {width} x {height}") as caught:
        next(iter(read_images(replace(source, max_pixels=width * height - 1))))
    assert (caught.value.code, "camera.max_pixels" in caught.value.remedy) == ("camera.pixels", True)


def test_bytes_that_are_no_picture_have_no_size() -> None:
    rng = np.random.default_rng(0)
    for start in (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"II*\0", b"RIFF", b"BM", b"P6 "):
        assert decode_image(start + rng.bytes(200)) is None
