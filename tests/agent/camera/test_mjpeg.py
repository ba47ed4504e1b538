"""MJPEG cameras over HTTP: pictures of other sizes, damaged ones, other boundaries, passwords."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest
from camera_pictures import write_video
from hypothesis import given
from hypothesis import strategies as st
from mjpeg_server import MjpegServer, answering, grey

from agent.camera.mjpeg import JpegSplitter
from agent.camera.reader import read_images
from agent.camera.source import CaptureSettings, parse_source
from agent.camera.stream_health import FrameLossCounter, StreamState
from agent.common.errors import CameraError

JPEGS = [
    cv2.imencode(".jpg", np.random.default_rng(number).integers(0, 255, (40 + number, 64, 3), np.uint8))[1].tobytes()
    for number in range(3)
]


@pytest.fixture
def camera() -> Iterator[MjpegServer]:
    with MjpegServer() as server:
        yield server


def split(wire: bytes, sizes: list[int]) -> list[bytes | None]:
    splitter = JpegSplitter()
    found: list[bytes | None] = []
    for size in (*sizes, len(wire)):
        found.extend(splitter.feed(wire[:size]))
        wire = wire[size:]
    return found


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1.0, 1.0, 0.8, 0.04])), max_size=5),
    st.sampled_from([b"\r\n--frame\r\nContent-Type: image/jpeg\r\n\r\n", b"", b"\r\n--a\r\nContent-Length: 5\r\n\r\n"]),
    st.lists(st.integers(1, 5000), max_size=8),
)
def test_pictures_are_found_however_they_arrive(
    sent: list[tuple[int, float]], between: bytes, sizes: list[int]
) -> None:
    """Whole ones come as they were sent; of the others as many are missed as were cut off."""
    whole = [share == 1.0 for _, share in sent] + [True]
    parts = [JPEGS[number][: int(share * len(JPEGS[number]))] for number, share in sent] + [JPEGS[0]]
    found = split(between.join([b"", *parts]), sizes)
    assert [part for part, kept in zip(parts, whole, strict=True) if kept] == [each for each in found if each]
    assert len(found) == len(sent) + 1


def test_a_picture_is_there_with_its_last_byte() -> None:
    assert list(JpegSplitter().feed(JPEGS[0])) == [JPEGS[0]]
    splitter = JpegSplitter()
    assert list(splitter.feed(JPEGS[0][:-1])) == []
    assert list(splitter.feed(JPEGS[0][-1:])) == [JPEGS[0]]


def test_a_thumbnail_in_a_header_is_no_picture() -> None:
    thumbnail = b"\xff\xe1" + (len(JPEGS[1]) + 2).to_bytes(2, "big") + JPEGS[1]
    assert len(thumbnail) < 65536
    picture = JPEGS[0][:2] + thumbnail + JPEGS[0][2:]
    assert split(picture + picture, [700, 900]) == [picture, picture]


def test_a_picture_that_never_ends_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.camera.mjpeg._MOST_BYTES", 10_000)
    splitter = JpegSplitter()
    endless = JPEGS[0][:2000]
    assert list(splitter.feed(endless)) == []
    assert list(splitter.feed(bytes(10_000))) == [None]
    assert list(splitter.feed(JPEGS[1])) == [JPEGS[1]]


def test_a_resolution_that_changes_is_followed(camera: MjpegServer) -> None:
    """OpenCV's own reader keeps the first."""
    camera.picture = lambda number: np.full((96, 128, 3) if 5 <= number < 10 else (48, 64, 3), 100, np.uint8)
    shapes = [image.shape[:2] for _, image in islice(read_images(parse_source(camera.url)), 15)]
    assert shapes == [(48, 64)] * 5 + [(96, 128)] * 5 + [(48, 64)] * 5


@pytest.mark.parametrize("lengths", [True, False])
def test_damaged_pictures_are_counted_and_the_stream_goes_on(camera: MjpegServer, lengths: bool) -> None:
    camera.lengths = lengths
    camera.damage = lambda number, content: content[: len(content) // 2] if number % 3 == 1 else content
    dropped: Counter[str] = Counter()
    frames = list(islice(read_images(parse_source(camera.url), reading=StreamState(FrameLossCounter(dropped))), 7))
    assert [round(float(image.mean())) for _, image in frames] == [0, 20, 30, 50, 60, 80, 90]
    assert dropped == {"decode": 3}


def test_threads_of_a_decoder_are_refused_where_there_is_none(camera: MjpegServer) -> None:
    """FFmpeg decodes all other streams over HTTP."""
    source = replace(parse_source(camera.url), requested=CaptureSettings(decode_threads=2))
    with pytest.raises(
        CameraError, match=r"camera\.option: camera\.decode_threads: 2 for .*, which sends MJPEG; .*FFmpeg"
    ):
        next(read_images(source))


def test_a_camera_that_wants_a_password_gets_it(camera: MjpegServer) -> None:
    expected = "Basic " + base64.b64encode(b"ad min:p@ss/w").decode()
    camera.accepts = lambda header: header == expected
    url = camera.url.replace("//", "//ad%20min:p%40ss%2Fw@")
    assert next(read_images(parse_source(url)))[1].shape == grey(0).shape


def test_a_password_is_not_sent_where_the_camera_wants_a_digest(camera: MjpegServer) -> None:
    """Digest authentication as in RFC 2617, section 3.2.2."""

    def md5(*parts: str) -> str:
        return hashlib.md5(":".join(parts).encode(), usedforsecurity=False).hexdigest()

    headers: list[str] = []

    def digest(header: str) -> bool:
        headers.append(header)
        given = dict(re.findall(r'(\w+)="?([^",]*)"?', header))
        return "response" in given and given["response"] == md5(
            md5("admin", "camera", "secret"), "abc", given["nc"], given["cnonce"], "auth", md5("GET", given["uri"])
        )

    camera.challenge, camera.accepts = 'Digest realm="camera", nonce="abc", qop="auth"', digest
    assert next(read_images(parse_source(camera.url.replace("//", "//admin:secret@"))))[1].shape == grey(0).shape
    assert len(headers) == 2
    assert "secret" not in "".join(headers)


def test_a_refused_password_is_reported_without_it(camera: MjpegServer) -> None:
    camera.accepts = lambda _: False
    with pytest.raises(CameraError, match=r"camera\.open: .*answers 401.*password in its address") as caught:
        next(read_images(parse_source(camera.url.replace("//", "//admin:secret@"))))
    assert "secret" not in str(caught.value)


def test_a_camera_that_does_not_answer_is_reported() -> None:
    with pytest.raises(CameraError, match=r"camera\.open: http://127\.0\.0\.1:9/x does not answer") as caught:
        next(read_images(parse_source("http://a:secret@127.0.0.1:9/x")))
    assert "secret" not in repr(caught.value.__context__)


def test_a_stream_other_than_mjpeg_is_left_to_ffmpeg(tmp_path: Path) -> None:
    path = tmp_path / "clip.avi"
    write_video(path, map(grey, range(12)))

    with answering("video/x-msvideo", path.read_bytes()) as address:
        frames = read_images(parse_source(address))
        assert [image.shape for _, image in islice(frames, 12)] == [(48, 64, 3)] * 12
        frames.close()  # type: ignore[attr-defined]  # it is a generator, which holds the connection
