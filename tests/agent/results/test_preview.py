"""The preview: annotated frames for people, made only while somebody looks, and never at the video's cost."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import cv2
import numpy as np
import pytest
from brokers import eventually, free_port
from preview_bench import (
    Cameras,
    asked,
    brightness,
    connect,
    descriptors,
    get,
    gone,
    parts,
    preview_config,
    previewed,
    size,
    wait_for_viewers,
)
from results_bench import SPEC, detections

from agent.common.errors import ConfigError
from agent.common.schema import validate
from agent.config import Config, PreviewConfig
from agent.results.preview import Preview
from agent.vision.drawing import draw_prediction
from agent.vision.preprocess import Geometry
from calibrate.errors import TaredError

pytestmark = pytest.mark.usefixtures("no_thread_left")

DARK, BRIGHT = (np.full((90, 160, 3), value, np.uint8) for value in (20, 220))
# Hardly compressible, so that a viewer that does not read has its buffers full soon.
NOISE = np.random.default_rng(0).integers(0, 255, (720, 1280, 3), dtype=np.uint8)


def test_a_stream_shows_each_new_frame_and_every_part_has_its_length() -> None:
    cameras = Cameras("street")
    with previewed(preview_config(per_s=30.0), cameras) as preview:
        cameras.answer("street", 1, DARK)
        with asked(preview.address, "/stream.mjpeg?camera=street") as response:
            shown = parts(response)
            headers, first = next(shown)
            assert headers == {
                "Content-Type": "image/jpeg",
                "Content-Length": str(len(first)),
                "X-Frame": "1",
                "X-Timestamp": "0.100000",
            }
            cameras.answer("street", 2, BRIGHT)
            later, second = next(shown)
            assert later["X-Frame"] == "2"
        assert brightness(first) == pytest.approx(20, abs=3)
        assert brightness(second) == pytest.approx(220, abs=3)
        assert response.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in response.headers


def test_ffmpeg_plays_it() -> None:
    cameras = Cameras("street")
    with previewed(preview_config(per_s=30.0), cameras) as preview, cameras.running(BRIGHT):
        video = cv2.VideoCapture(f"{preview.address}/stream.mjpeg")
        good, image = video.read()
        video.release()
    assert good
    assert image.mean() == pytest.approx(220, abs=3)


def test_a_picture_that_stays_is_sent_again_so_that_browsers_show_it() -> None:
    cameras = Cameras("street")
    cameras.answer("street", 1, DARK)
    with previewed(preview_config(), cameras) as preview, asked(preview.address, "/stream.mjpeg") as response:
        numbers = [headers["X-Frame"] for headers, _ in islice(parts(response), 2)]
    assert numbers == ["1", "1"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For each picture that is drawn, the name of the thread that draws it."""
    threads: list[str] = []

    def drawing(*arguments: Any) -> object:
        threads.append(threading.current_thread().name)
        return draw_prediction(*arguments)

    monkeypatch.setattr("agent.results.preview.draw_prediction", drawing)
    return threads


def test_nothing_is_drawn_while_nobody_looks(drawn: list[str]) -> None:
    cameras = Cameras("street")
    with previewed(preview_config(per_s=20.0), cameras) as preview, cameras.running(DARK):
        assert preview.native_id is not None
        woken = wakes(preview.native_id)
        time.sleep(0.5)
        assert (drawn, wakes(preview.native_id)) == ([], woken)
        with asked(preview.address, "/stream.mjpeg") as response:
            next(parts(response))
        wait_for_viewers(preview, 0)
        time.sleep(0.1)  # what it was about is done
        assert set(drawn) == {"preview"}
        before = len(drawn), wakes(preview.native_id)
        time.sleep(0.5)
        assert (len(drawn), wakes(preview.native_id)) == before


def wakes(thread: int) -> int:
    """How often a thread of this process has given the processor away of its own accord."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_so_many_pictures_a_second_at_most_however_they_are_asked_for(drawn: list[str]) -> None:
    cameras = Cameras("street")
    with previewed(preview_config(per_s=10.0), cameras) as preview, cameras.running(DARK, 200.0):
        began_s = time.monotonic()
        with asked(preview.address, "/stream.mjpeg") as one, asked(preview.address, "/stream.mjpeg") as other:
            streams = parts(one), parts(other)
            seen: set[str] = set()
            while time.monotonic() < began_s + 1.0:
                seen |= {next(stream)[0]["X-Frame"] for stream in streams}
                for _ in range(3):
                    get(preview.address, "/frame.jpg")
        lasted_s = time.monotonic() - began_s
    assert 5 <= len(drawn) <= 10.0 * lasted_s + 2.0
    assert len(seen) <= len(drawn)


def test_one_picture() -> None:
    cameras = Cameras("street")
    with previewed(preview_config(width=64), cameras) as preview:
        status, text = get(preview.address, "/frame.jpg")
        assert (status, text) == (503, b"no frame yet, or none that could be drawn\n")
        cameras.answer("street", 7, BRIGHT)
        eventually(lambda: get(preview.address, "/frame.jpg")[0] == 200)
        with asked(preview.address, "/frame.jpg") as response:
            assert response.headers["X-Frame"] == "7"
            assert response.headers["Content-Type"] == "image/jpeg"
            assert size(response.read()) == (36, 64)


def test_a_frame_that_is_scaled_down_has_its_boxes_where_they_were() -> None:
    image = np.full((200, 400, 3), 128, np.uint8)
    quartered = Geometry(400, 200, 0.25, 0.25, 0, 25)
    result = detections(0.5)
    result.boxes[0] = [25, 50, 45, 70]  # in the frame from (100, 100) to (180, 180)
    picture = draw_prediction(image, result, quartered, SPEC, 0.5)
    found = (picture != 128).any(axis=2)
    assert picture.shape == (100, 200, 3)
    assert found[50:91, 50].all()
    assert found[90, 50:91].all()
    assert not found[52:89, 52:89].any()


@pytest.mark.parametrize("far", [1e30, -1e30, np.inf, np.nan])
def test_a_box_from_beyond_is_no_trouble(far: float) -> None:
    result = detections(0.5)
    result.boxes[0, 2:] = far
    cameras = Cameras("street")
    cameras.answer("street", 1, DARK, result)
    with previewed(preview_config(), cameras) as preview:
        assert get(preview.address, "/frame.jpg")[0] == 200


def test_a_frame_that_cannot_be_drawn_is_reported_once_and_the_next_is_shown() -> None:
    cameras, changes = Cameras("street"), list[TaredError | None]()
    with previewed(preview_config(per_s=30.0), cameras, changes) as preview:
        with asked(preview.address, "/stream.mjpeg") as response:
            for number in (1, 2):
                cameras.answer("street", number, np.zeros((4, 4, 7), np.uint8))
                eventually(lambda: preview.as_dict()["error"] == "preview.draw")
            cameras.answer("street", 3, BRIGHT)
            headers, _ = next(parts(response))
        assert headers["X-Frame"] == "3"
        eventually(lambda: preview.as_dict()["error"] is None)
    codes = [change.code if change is not None else None for change in changes]
    assert codes == [None, "preview.draw", None]


NAMES = ("gate", "<script>alert(1)</script>", "a b&camera=gate", "Hof ü 門", "x\r\nSet-Cookie: a=b", "%2e/../\x00", "")


def test_every_camera_is_found_by_its_name_however_odd() -> None:
    cameras = Cameras(*NAMES)
    with previewed(preview_config(names=NAMES, per_s=30.0), cameras) as preview:
        for number, name in enumerate(NAMES):
            cameras.answer(name, number, DARK)
        for number, name in enumerate(NAMES):
            with asked(preview.address, f"/frame.jpg?camera={quote(name, safe='')}") as response:
                assert (response.status, response.headers["X-Frame"]) == (200, str(number))
                assert response.headers["Set-Cookie"] is None
        with asked(preview.address, "/frame.jpg") as response:
            assert response.headers["X-Frame"] == "0"
        status, text = get(preview.address, "/frame.jpg?camera=other")
        assert status == 404
        assert b"<script>" not in text
        assert [line for line in text.decode().splitlines() if "frame.jpg" in line] == [
            f"/frame.jpg?camera={quote(name, safe='')}" for name in NAMES
        ]


def test_a_viewer_may_switch_cameras() -> None:
    cameras = Cameras("dark", "bright")
    cameras.answer("dark", 1, DARK)
    cameras.answer("bright", 1, BRIGHT)
    with previewed(preview_config(names=cameras.names, viewers=1), cameras) as preview:
        for name, light in (("dark", 20), ("bright", 220), ("dark", 20)):
            with asked(preview.address, f"/stream.mjpeg?camera={name}") as response:
                assert brightness(next(parts(response))[1]) == pytest.approx(light, abs=3)
            wait_for_viewers(preview, 0)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 404),
        ("GET", "/../stream.mjpeg", {}, 404),
        ("GET", "//stream.mjpeg", {}, 404),
        ("POST", "/frame.jpg", {}, 405),
        ("HEAD", "/frame.jpg", {}, 405),
        ("OPTIONS", "/stream.mjpeg", {}, 405),
        ("GET", "/frame.jpg", {"Host": "rebound.example.com"}, 403),
        ("GET", "/frame.jpg", {"Host": "127.0.0.1.example.com:80"}, 403),
        ("GET", "/frame.jpg", {"Host": "[::1"}, 403),
        ("GET", "/frame.jpg", {"Host": "192.168.1.2"}, 403),
        ("GET", "/frame.jpg", {"Host": ""}, 403),
        ("GET", "/frame.jpg", {"Host": "LOCALHOST:1"}, 200),
        ("GET", "/frame.jpg", {"Host": "127.0.0.1"}, 200),
        ("GET", "/frame.jpg", {"Host": "[::1]:8090"}, 200),
        ("GET", "http://127.0.0.1/frame.jpg", {}, 200),
        ("GET", "/frame.jpg?" + "a&" * 100, {}, 400),
    ],
)
def test_what_is_answered(method: str, path: str, headers: dict[str, str], status: int) -> None:
    cameras = Cameras("street")
    cameras.answer("street", 1, DARK)
    with (
        previewed(preview_config(), cameras) as preview,
        asked(preview.address, path, method, **headers) as response,
    ):
        assert response.status == status
        assert response.headers["Connection"] == "close"
        assert (response.headers["Allow"] == "GET") == (status == 405)


@pytest.mark.parametrize(
    "content",
    [
        b"\r\n\r\n",
        b"GET /frame.jpg\r\n\r\n",
        b"GET /frame.jpg HTTP/2\r\nHost: localhost\r\n\r\n",
        b"GET http://[::1/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /frame.jpg HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"\xff\x00 \xff HTTP/1.1\r\nHost: \xff\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_and_the_next_viewer_served(content: bytes) -> None:
    cameras = Cameras("street")
    cameras.answer("street", 1, DARK)
    with previewed(preview_config(), cameras) as preview:
        with contextlib.closing(connect(preview.address)) as connection:
            connection.sendall(content)
            answer = b""
            while read := connection.recv(65536):
                answer += read
        assert answer.split(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"HTTP/1.1 403 Forbidden")
        with contextlib.closing(connect(preview.address)) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /" + b"a" * 100_000)
            assert gone(connection)
        assert get(preview.address, "/frame.jpg")[0] == 200


def test_only_so_many_viewers_and_one_that_goes_makes_room() -> None:
    cameras = Cameras("street")
    with (
        previewed(preview_config(viewers=2), cameras) as preview,
        cameras.running(DARK),
        asked(preview.address, "/stream.mjpeg"),
    ):
        with asked(preview.address, "/stream.mjpeg"):
            status, text = get(preview.address, "/stream.mjpeg")
            assert status == 503
            assert b"2 viewers look already" in text
        wait_for_viewers(preview, 1)
        with asked(preview.address, "/stream.mjpeg") as response:
            next(parts(response))


def test_a_viewer_that_does_not_read_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.common.http.reception._STALLED_S", 1.0)
    cameras = Cameras("street")
    with (
        previewed(preview_config(per_s=30.0, width=1280), cameras) as preview,
        cameras.running(NOISE),
        contextlib.closing(connect(preview.address)) as stuck,
        asked(preview.address, "/stream.mjpeg") as response,
    ):
        stuck.sendall(b"GET /stream.mjpeg HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for_viewers(preview, 2)
        shown = parts(response)
        numbers = [int(next(shown)[0]["X-Frame"]) for _ in range(40)]
        assert numbers == sorted(set(numbers))  # none is repeated, and none is late
        eventually(lambda: bool(next(shown)) and preview.as_dict()["viewers"] == 1)
        assert gone(stuck)


def test_a_slow_viewer_gets_fewer_frames_and_soon_a_new_one() -> None:
    cameras = Cameras("street")
    with (
        previewed(preview_config(per_s=30.0, width=1280), cameras) as preview,
        cameras.running(NOISE, 30.0),
        asked(preview.address, "/stream.mjpeg") as response,
    ):
        shown = parts(response)
        next(shown)
        began_s, numbers = time.monotonic(), list[int]()
        while time.monotonic() < began_s + 3.0:
            numbers.append(int(next(shown)[0]["X-Frame"]))
            time.sleep(0.3)
        newest = cameras.newest("street")
        assert newest is not None
        gaps = np.diff(numbers)
        assert gaps.max() > 1  # frames are left out
        assert newest.frame.id - numbers[-1] < 150  # no more wait than the kernels' buffers hold


def test_a_thousand_requests_that_never_end_take_no_threads_and_few_descriptors() -> None:
    cameras = Cameras("street")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        preview = stack.enter_context(previewed(preview_config(), cameras))
        stack.enter_context(cameras.running(DARK))
        threads = threading.active_count()
        with asked(preview.address, "/stream.mjpeg") as response:
            shown = parts(response)
            next(shown)
            before = descriptors()
            idle = [stack.enter_context(contextlib.closing(connect(preview.address))) for _ in range(1000)]
            for number, connection in enumerate(idle):
                if number % 2:
                    with contextlib.suppress(ConnectionError):
                        connection.sendall(b"GET /stream.mjpeg HTTP/1.1\r\nHo")
            assert threading.active_count() == threads
            began_s = time.monotonic()
            assert get(preview.address, "/frame.jpg")[0] == 200
            assert time.monotonic() - began_s < 5.0
            for _ in range(5):
                next(shown)
            eventually(lambda: descriptors() - before - len(idle) <= 16)


def test_a_request_that_does_not_come_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.common.http.reception._REQUEST_S", 0.2)
    with (
        previewed(preview_config(), Cameras("street")) as preview,
        contextlib.closing(connect(preview.address)) as idle,
    ):
        with contextlib.suppress(ConnectionError):
            for _ in range(100):  # each byte is progress, and does not put off the end
                idle.sendall(b"G")
                time.sleep(0.01)
        assert gone(idle)


def test_without_descriptors_it_reports_once_and_serves_on_when_there_are_some() -> None:
    cameras, changes = Cameras("street"), list[TaredError | None]()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        previewed(preview_config(per_s=30.0), cameras, changes) as preview,
        cameras.running(DARK),
        asked(preview.address, "/stream.mjpeg") as response,
        contextlib.closing(socket.socket()) as another,
    ):
        shown = parts(response)
        another.settimeout(10.0)
        port, taken = int(preview.address.rpartition(":")[2]), list[int]()
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            another.connect(("127.0.0.1", port))
            eventually(lambda: preview.as_dict()["error"] == "preview.accept")
            for _ in range(5):
                next(shown)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in taken:
                os.close(descriptor)
        another.sendall(b"GET /frame.jpg HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert another.recv(12) == b"HTTP/1.1 200"
        eventually(lambda: preview.as_dict()["error"] is None)
    assert [change.code if change is not None else None for change in changes] == [None, "preview.accept", None]


def test_a_viewer_that_resets_its_connection_is_forgotten() -> None:
    cameras = Cameras("street")
    cameras.answer("street", 0, NOISE)
    with previewed(preview_config(per_s=30.0), cameras) as preview, cameras.running(NOISE):
        for _ in range(5):
            connection = connect(preview.address)
            connection.sendall(b"GET /stream.mjpeg HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.recv(1000)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        wait_for_viewers(preview, 0)
        assert get(preview.address, "/frame.jpg")[0] == 200


def test_without_leave_it_does_not_listen_and_a_leave_withdrawn_ends_it_at_once() -> None:
    cameras, changes = Cameras("street"), list[TaredError | None]()
    port = free_port()
    with Preview(preview_config(f"127.0.0.1:{port}")) as preview, cameras.running(DARK):
        preview.show(cameras.newest, changes.append)
        preview.permit(False)
        eventually(lambda: preview.as_dict()["error"] == "preview.privacy")
        with pytest.raises(ConnectionRefusedError):
            connect(f"http://127.0.0.1:{port}")
        preview.permit(True)
        eventually(lambda: bool(preview.address))
        with asked(preview.address, "/stream.mjpeg") as response:
            next(parts(response))
            preview.permit(False)
            assert len(list(parts_left(response))) < 3
        with pytest.raises(ConnectionRefusedError):
            connect(f"http://127.0.0.1:{port}")
        eventually(lambda: len(changes) == 3)
    assert [change.code if change is not None else None for change in changes] == [
        "preview.privacy",
        None,
        "preview.privacy",
    ]
    assert "privacy.preview is false" in str(changes[0])


def parts_left(response: object) -> list[bytes]:
    """What still comes, up to the end of the connection."""
    left: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        while content := response.read1(1 << 20):  # type: ignore[attr-defined]
            left.append(content)
    return left


def test_an_address_in_use_is_reported_and_taken_once_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.results.preview._RETRY_S", (0.05, 0.1))
    cameras, changes = Cameras("street"), list[TaredError | None]()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with Preview(preview_config(address)) as preview:
            preview.show(cameras.newest, changes.append)
            preview.permit(True)
            eventually(lambda: preview.as_dict()["error"] == "preview.address")
            other.close()
            eventually(lambda: preview.address == f"http://{address}")
    codes = [change.code if change is not None else None for change in changes]
    assert codes == ["preview.address", None]
    with contextlib.closing(socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))):
        pass  # it is free again


def test_a_unix_socket_is_for_its_user_alone_and_goes_with_the_preview(tmp_path: Path) -> None:
    path = tmp_path / "run" / "preview.sock"
    path.parent.mkdir()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as killed:
        killed.bind(str(path))
    cameras, changes = Cameras("street"), list[TaredError | None]()
    cameras.answer("street", 1, DARK)
    with previewed(preview_config(str(path)), cameras) as preview:
        assert preview.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert get(preview.address, "/frame.jpg", Host="board.example.com")[0] == 200  # no browser gets here
        with Preview(preview_config(str(path))) as second:
            second.show(cameras.newest, changes.append)
            second.permit(True)
            eventually(lambda: second.as_dict()["error"] == "preview.address")
        assert get(preview.address, "/frame.jpg")[0] == 200
    assert not path.exists()
    assert "in use" in str(changes[0])


def test_a_fault_of_its_own_ends_no_more_than_its_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.results.preview._RETRY_S", (0.05, 0.1))
    changes = list[TaredError | None]()
    cameras = Cameras("street")
    with previewed(preview_config(), cameras, changes) as preview:
        with monkeypatch.context() as faulty:
            faulty.setattr(cameras, "newest", lambda _camera: 1 / 0)
            preview.show(cameras.newest, changes.append)
            with contextlib.suppress(OSError):
                get(preview.address, "/frame.jpg")
            eventually(lambda: len(changes) >= 2)
        preview.show(cameras.newest, changes.append)
        cameras.answer("street", 1, DARK)
        eventually(lambda: bool(preview.address) and get(preview.address, "/frame.jpg")[0] == 200)
    codes = [change.code if change is not None else None for change in changes]
    assert codes == [None, "preview.failed", None]


@pytest.mark.parametrize(
    "address", ["0.0.0.0:8090", "[::]:8090", "192.168.1.5:80", "board.local:8090", ":8090", "127.0.0.1.evil:80"]
)
def test_an_address_that_others_reach_is_refused_with_the_remedy(address: str) -> None:
    with pytest.raises(ConfigError, match=r"preview\.address|address: expected a loopback address.*ssh -L"):
        validate(PreviewConfig, {"address": address}, "config.yaml")


@pytest.mark.parametrize("address", ["preview.sock", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", "localhost:http"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"address: expected a loopback address such as"):
        validate(PreviewConfig, {"address": address}, "config.yaml")


def test_where_an_address_is(tmp_path: Path) -> None:
    places = {
        "127.0.0.1:0": ("127.0.0.1", 0),
        "localhost:8090": ("127.0.0.1", 8090),
        "[::1]:8090": ("::1", 8090),
        "./p.sock": tmp_path / "p.sock",
        "/run/tared/p.sock": Path("/run/tared/p.sock"),
        "run/p:80": tmp_path / "run/p:80",
    }
    for address, place in places.items():
        assert validate(PreviewConfig, {"address": address}, "", tmp_path).place == place
    assert Config.model_fields["preview"].default.place is None
