"""Pictures whose headers claim more pixels than are allowed: refused before they are decoded, from any source."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from attack.pictures import STARTS, SUFFIXES, jpeg_claiming, small
from mjpeg_server import MjpegServer
from worlds import write_clip

from agent.camera.images import ImageFiles, decode_image
from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.camera.stream_health import FrameLossCounter, StreamState
from agent.common.errors import CameraError, DatasetError

_SIZE = 32000
_DECODES = """
import resource, sys
from agent.camera.images import decode_image
content = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert decode_image(content) is None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def bomb() -> bytes:
    return jpeg_claiming(_SIZE, _SIZE)


@pytest.mark.parametrize("kind", ["pixels", "chunk"])
def test_a_picture_of_too_many_pixels_costs_no_memory(tmp_path: Path, kind: str) -> None:
    """OpenCV alone would take 3 GB for the JPEG, whose pixels its own limit allows, and 2 GB for the PNG's chunk."""
    whole = small(".png")
    content = bomb() if kind == "pixels" else whole[:33] + b"\x7f\xff\xff\xff" + whole[37:]
    (tmp_path / "bomb.jpg").write_bytes(content)
    command = [sys.executable, "-c", _DECODES, str(tmp_path / "bomb.jpg")]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert int(grown) * 1024 < 16 << 20


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_of_a_folder_says_its_size(suffix: str) -> None:
    assert decode_image(small(suffix), 32 * 48) is not None
    assert decode_image(small(suffix), 32 * 48 - 1) is None


@pytest.mark.parametrize("packed", [False, True])
def test_a_large_picture_in_a_folder_or_zip_is_named(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "pictures"
    if packed:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("bomb.jpg", bomb())
    else:
        path.mkdir()
        (path / "bomb.jpg").write_bytes(bomb())
    with pytest.raises(DatasetError, match=r"bomb\.jpg.*at most 67108864 pixels"):
        ImageFiles(path).read("bomb.jpg")


def test_a_large_picture_in_a_stream_is_passed_over() -> None:
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
    for start in STARTS:
        assert decode_image(start + rng.bytes(200)) is None
