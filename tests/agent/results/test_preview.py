"""The preview shows annotated frames to people, draws only while somebody looks, and costs the video nothing."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import resource
import selectors
import socket
import stat
import threading
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
    next_part,
    parts,
    preview_config,
    previewed,
    size,
    wait_for_viewers,
)
from results_bench import SPEC, detections
from turned_clock import TurnedClock

from agent.common.errors import ConfigError
from agent.common.schema import validate
from agent.config import Config, PreviewConfig
from agent.results.preview import Preview
from agent.vision.answer import Answer
from agent.vision.preprocess import Geometry
from calibrate.errors import TaredError

pytestmark = pytest.mark.usefixtures("no_thread_left")

DARK, BRIGHT = (np.full((90, 160, 3), value, np.uint8) for value in (20, 220))
# Hardly compressible, so that a viewer that does not read has its buffers full soon.
NOISE = np.random.default_rng(0).integers(0, 255, (720, 1280, 3), dtype=np.uint8)


def test_a_stream_shows_each_new_frame_and_every_part_has_its_length(clock: TurnedClock) -> None:
    cameras = Cameras("street")
    with previewed(preview_config(per_s=30.0), cameras, clock=clock) as preview:
        cameras.answer("street", 1, DARK)
        with asked(preview.address, "/stream.mjpeg?camera=street") as response:
            shown = parts(response)
            headers, first = next_part(shown, clock)
            assert headers == {
                "Content-Type": "image/jpeg",
                "Content-Length": str(len(first)),
                "X-Frame": "1",
                "X-Timestamp": "0.100000",
            }
            cameras.answer("street", 2, BRIGHT)
            later, second = next_part(shown, clock, 2)
            assert later["X-Frame"] == "2"
        assert brightness(first) == pytest.approx(20, abs=3)
        assert brightness(second) == pytest.approx(220, abs=3)
        assert response.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in response.headers


def test_ffmpeg_plays_the_stream() -> None:
    cameras = Cameras("street")
    with previewed(preview_config(per_s=30.0), cameras) as preview, cameras.running(BRIGHT):
        video = cv2.VideoCapture(f"{preview.address}/stream.mjpeg")
        good, image = video.read()
        video.release()
    assert good
    assert image.mean() == pytest.approx(220, abs=3)


def test_a_picture_that_stays_is_sent_again_after_a_second_so_that_browsers_show_it(clock: TurnedClock) -> None:
    cameras = Cameras("street")
    cameras.answer("street", 1, DARK)
    with (
        previewed(preview_config(), cameras, clock=clock) as preview,
        asked(preview.address, "/stream.mjpeg") as response,
    ):
        shown, asked_s = parts(response), clock.monotonic_s()
        first, _ = next_part(shown, clock)
        again, _ = next_part(shown, clock)
        assert clock.monotonic_s() >= asked_s + 1.0
    assert (first["X-Frame"], again["X-Frame"]) == ("1", "1")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For each picture that is drawn, the name of the thread that draws it."""
    threads: list[str] = []

    draw = Answer.drawn_into

    def drawing(*arguments: Any) -> object:
        threads.append(threading.current_thread().name)
        return draw(*arguments)

    monkeypatch.setattr(Answer, "drawn_into", drawing)
    return threads


class WatchedClock(TurnedClock):
    """Notes for how long each wait for sockets may last."""

    def __init__(self) -> None:
        super().__init__()
        self.limits_s: list[float | None] = []

    def select(
        self, selector: selectors.BaseSelector, timeout_s: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        self.limits_s.append(timeout_s)
        return super().select(selector, timeout_s)


def test_the_thread_sleeps_without_a_limit_while_no_viewer_looks(
    drawn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cameras, clock = Cameras("street"), WatchedClock()

    def rests() -> None:
        """Answers do not wake the thread, and it waits without a limit."""
        eventually(lambda: clock.limits_s[-1] is None)
        with monkeypatch.context() as patch:
            patch.setattr(preview._waker, "wake", lambda: pytest.fail("an answer wakes the thread"))
            for number in range(100):
                cameras.answer("street", number, DARK)
                clock.turn(1.0)

    with previewed(preview_config(per_s=20.0), cameras, clock=clock) as preview:
        rests()
        assert drawn == []
        with asked(preview.address, "/stream.mjpeg") as response:
            next_part(parts(response), clock)
        wait_for_viewers(preview, 0)
        before = len(drawn)
        assert set(drawn) == {"preview"}
        rests()
        assert len(drawn) == before


def test_pictures_are_drawn_at_the_configured_rate_for_any_number_of_viewers(
    drawn: list[str], clock: TurnedClock
) -> None:
    cameras = Cameras("street")
    with previewed(preview_config(per_s=10.0), cameras, clock=clock) as preview, contextlib.ExitStack() as stack:
        for path in ("/stream.mjpeg", "/stream.mjpeg", "/frame.jpg"):
            viewer = stack.enter_context(contextlib.closing(connect(preview.address)))
            viewer.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_for_viewers(preview, 3)
        began_s, numbers = clock.monotonic_s(), itertools.count()

        def are_drawn() -> bool:
            cameras.answer("street", next(numbers), DARK)
            return len(drawn) >= 21

        clock.turn_until(are_drawn, 0.005)
        assert clock.monotonic_s() >= began_s + 1.9  # twenty tenths, the first of which may be half as long


def test_a_single_picture_is_of_the_latest_answer(clock: TurnedClock) -> None:
    cameras = Cameras("street")
    with previewed(preview_config(width=64), cameras, clock=clock) as preview:
        status, text = get(preview.address, "/frame.jpg", clock)
        assert (status, text) == (503, b"no frame yet, or none that could be drawn\n")
        cameras.answer("street", 7, BRIGHT)
        clock.turn(1.0)  # the next picture is due
        with asked(preview.address, "/frame.jpg", clock=clock) as response:
            assert response.headers["X-Frame"] == "7"
            assert response.headers["Content-Type"] == "image/jpeg"
            assert size(response.read()) == (36, 64)


def test_a_frame_that_is_scaled_down_has_its_boxes_where_they_were() -> None:
    image = np.full((200, 400, 3), 128, np.uint8)
    quartered = Geometry(400, 200, 0.25, 0.25, 0, 25)
    result = detections(0.5)
    result.boxes[0] = [25, 50, 45, 70]  # in the frame from (100, 100) to (180, 180)
    picture = result.drawn_into(image, quartered, SPEC, 0.5)
    found = (picture != 128).any(axis=2)
    assert picture.shape == (100, 200, 3)
    assert found[50:91, 50].all()
    assert found[90, 50:91].all()
    assert not found[52:89, 52:89].any()


def test_a_frame_that_cannot_be_drawn_is_reported_once_and_the_next_is_shown(
    clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    cameras, changes = Cameras("street"), list[TaredError | None]()
    with previewed(preview_config(per_s=30.0), cameras, changes, clock) as preview:
        with asked(preview.address, "/stream.mjpeg") as response:
            for number in (1, 2):
                cameras.answer("street", number, np.zeros((4, 4, 7), np.uint8))
                clock.turn_until(lambda: preview.as_dict()["error"] == "preview.draw")
            cameras.answer("street", 3, BRIGHT)
            headers, _ = next_part(parts(response), clock)
        assert headers["X-Frame"] == "3"
        eventually(lambda: preview.as_dict()["error"] is None)
    codes = [change.code if change is not None else None for change in changes]
    assert codes == [None, "preview.draw", None]
    assert caplog.text.count("Traceback") == 1


NAMES = ("gate", "<script>alert(1)</script>", "a b&camera=gate", "Hof ü 門", "x\r\nSet-Cookie: a=b", "%2e/../\x00", "")


def test_every_camera_is_found_by_its_name_however_odd(clock: TurnedClock) -> None:
    cameras = Cameras(*NAMES)
    with previewed(preview_config(names=NAMES, per_s=30.0), cameras, clock=clock) as preview:
        for number, name in enumerate(NAMES):
            cameras.answer(name, number, DARK)
        for number, name in enumerate(NAMES):
            with asked(preview.address, f"/frame.jpg?camera={quote(name, safe='')}", clock=clock) as response:
                assert (response.status, response.headers["X-Frame"]) == (200, str(number))
                assert response.headers["Set-Cookie"] is None
        with asked(preview.address, "/frame.jpg", clock=clock) as response:
            assert response.headers["X-Frame"] == "0"
        status, text = get(preview.address, "/frame.jpg?camera=other")
        assert status == 404
        assert b"<script>" not in text
        assert [line for line in text.decode().splitlines() if "frame.jpg" in line] == [
            f"/frame.jpg?camera={quote(name, safe='')}" for name in NAMES
        ]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 404),
        ("GET", "//stream.mjpeg", {}, 404),
        ("POST", "/frame.jpg", {}, 405),
        ("HEAD", "/stream.mjpeg", {}, 405),
        ("GET", "/frame.jpg", {"Host": "rebound.example.com"}, 403),
        ("GET", "/frame.jpg", {"Host": "127.0.0.1.example.com:80"}, 403),
        ("GET", "/frame.jpg", {"Host": "[::1"}, 403),
        ("GET", "/frame.jpg", {"Host": ""}, 403),
        ("GET", "/frame.jpg", {"Host": "LOCALHOST:1"}, 200),
        ("GET", "/frame.jpg", {"Host": "127.0.0.1"}, 200),
        ("GET", "/frame.jpg", {"Host": "[::1]:8090"}, 200),
        ("GET", "http://127.0.0.1/frame.jpg", {}, 200),
        ("GET", "/frame.jpg?" + "a&" * 100, {}, 400),
    ],
)
def test_a_request_gets_the_status_that_its_method_host_and_path_deserve(
    clock: TurnedClock, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    cameras = Cameras("street")
    cameras.answer("street", 1, DARK)
    with (
        previewed(preview_config(), cameras, clock=clock) as preview,
        asked(preview.address, path, method, clock, **headers) as response,
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
def test_bytes_that_are_no_request_are_refused_and_the_next_viewer_is_served(
    clock: TurnedClock, content: bytes
) -> None:
    cameras = Cameras("street")
    cameras.answer("street", 1, DARK)
    with previewed(preview_config(), cameras, clock=clock) as preview:
        with contextlib.closing(connect(preview.address)) as connection:
            connection.sendall(content)
            answer = b""
            while read := connection.recv(65536):
                answer += read
        assert answer.split(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"HTTP/1.1 403 Forbidden")
        with contextlib.closing(connect(preview.address)) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /" + b"a" * 100_000)
            assert gone(connection)
        assert get(preview.address, "/frame.jpg", clock)[0] == 200


def test_the_number_of_viewers_is_limited_and_one_that_goes_makes_room() -> None:
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


def test_a_viewer_that_does_not_read_is_ended_and_costs_the_others_nothing(clock: TurnedClock) -> None:
    cameras = Cameras("street")
    with (
        previewed(preview_config(per_s=30.0, width=1280), cameras, clock=clock) as preview,
        cameras.running(NOISE),
        contextlib.closing(connect(preview.address)) as stuck,
        asked(preview.address, "/stream.mjpeg") as response,
    ):
        stuck.sendall(b"GET /stream.mjpeg HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for_viewers(preview, 2)
        shown = parts(response)
        numbers = []
        for _ in range(12):
            clock.turn(0.05)
            numbers.append(int(next(shown)[0]["X-Frame"]))
        assert numbers == sorted(set(numbers))  # none is repeated, and none is late
        clock.turn(30.0)
        wait_for_viewers(preview, 1)
        assert gone(stuck)


def test_a_slow_viewer_gets_fewer_frames_and_then_the_newest(clock: TurnedClock) -> None:
    cameras = Cameras("street")
    with (
        previewed(preview_config(per_s=30.0, width=1280), cameras, clock=clock) as preview,
        asked(preview.address, "/stream.mjpeg") as slow,
        asked(preview.address, "/stream.mjpeg") as quick,
    ):
        pictures, seen = parts(quick), list[str]()
        with cameras.running(NOISE):
            for _ in range(12):
                clock.turn(0.05)
                seen.append(next(pictures)[0]["X-Frame"])
        shown, numbers = parts(slow), list[int]()
        while numbers[-1:] != [int(seen[-1])]:
            numbers.append(int(next(shown)[0]["X-Frame"]))
    assert numbers == sorted(set(numbers))
    assert len(numbers) < 12, "the kernels' buffers hold fewer"


def test_requests_that_never_end_take_no_threads_and_few_descriptors() -> None:
    cameras, count = Cameras("street"), 200
    with contextlib.ExitStack() as stack:
        preview = stack.enter_context(previewed(preview_config(), cameras))
        stack.enter_context(cameras.running(DARK))
        threads = threading.active_count()
        with asked(preview.address, "/stream.mjpeg") as response:
            shown = parts(response)
            next(shown)
            before = descriptors()
            for number in range(count):
                connection = stack.enter_context(contextlib.closing(connect(preview.address)))
                if number % 2:
                    with contextlib.suppress(ConnectionError):
                        connection.sendall(b"GET /stream.mjpeg HTTP/1.1\r\nHo")
            assert threading.active_count() == threads
            assert get(preview.address, "/frame.jpg")[0] == 200
            for _ in range(5):
                next(shown)
            eventually(lambda: descriptors() - before - count <= 16)


def test_a_request_that_is_not_complete_in_time_is_given_up(clock: TurnedClock) -> None:
    with (
        previewed(preview_config(), Cameras("street"), clock=clock) as preview,
        contextlib.closing(connect(preview.address)) as idle,
    ):
        clock.until_waiting()
        for _ in range(4):  # each byte is progress, and does not put off the end
            clock.turn(1.0)
            idle.sendall(b"G")
        idle.settimeout(0.05)
        with pytest.raises(TimeoutError):
            idle.recv(1)
        idle.settimeout(10.0)
        clock.turn(1.0)
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


def test_a_preview_without_permission_does_not_listen_and_ends_when_the_permission_is_withdrawn() -> None:
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


def parts_left(response: http.client.HTTPResponse) -> list[bytes]:
    """The rest of the response, up to the end of the connection."""
    left: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        while content := response.read1(1 << 20):
            left.append(content)
    return left


def test_an_address_in_use_is_reported_and_taken_once_it_is_free(clock: TurnedClock) -> None:
    cameras, changes = Cameras("street"), list[TaredError | None]()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with Preview(preview_config(address), clock) as preview:
            preview.show(cameras.newest, changes.append)
            preview.permit(True)
            eventually(lambda: preview.as_dict()["error"] == "preview.address")
            other.close()
            clock.turn_until(lambda: preview.address == f"http://{address}")
    codes = [change.code if change is not None else None for change in changes]
    assert codes == ["preview.address", None]
    with contextlib.closing(socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))):
        pass  # it is free again


def test_a_unix_socket_is_for_its_user_alone_and_goes_with_the_preview(tmp_path: Path, clock: TurnedClock) -> None:
    path = tmp_path / "run" / "preview.sock"
    path.parent.mkdir()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as killed:
        killed.bind(str(path))
    cameras, changes = Cameras("street"), list[TaredError | None]()
    cameras.answer("street", 1, DARK)
    with previewed(preview_config(str(path)), cameras, clock=clock) as preview:
        assert preview.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert get(preview.address, "/frame.jpg", clock, Host="board.example.com")[0] == 200  # no browser gets here
        with Preview(preview_config(str(path))) as second:
            second.show(cameras.newest, changes.append)
            second.permit(True)
            eventually(lambda: second.as_dict()["error"] == "preview.address")
        assert get(preview.address, "/frame.jpg", clock)[0] == 200
    assert not path.exists()
    assert "in use" in str(changes[0])


def test_a_fault_of_the_preview_ends_only_its_viewers_and_its_traceback_is_logged(
    monkeypatch: pytest.MonkeyPatch, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    changes = list[TaredError | None]()
    cameras = Cameras("street")
    with previewed(preview_config(), cameras, changes, clock) as preview:
        with monkeypatch.context() as faulty:
            faulty.setattr(cameras, "newest", lambda _camera: 1 / 0)
            preview.show(cameras.newest, changes.append)
            with contextlib.suppress(OSError):
                get(preview.address, "/frame.jpg", clock)
            eventually(lambda: len(changes) >= 2)
        preview.show(cameras.newest, changes.append)
        cameras.answer("street", 1, DARK)
        clock.turn_until(lambda: bool(preview.address))
        assert get(preview.address, "/frame.jpg", clock)[0] == 200
    codes = [change.code if change is not None else None for change in changes]
    assert codes == [None, "preview.failed", None]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    "address", ["0.0.0.0:8090", "[::]:8090", "192.168.1.5:80", "board.local:8090", ":8090", "127.0.0.1.evil:80"]
)
def test_an_address_that_others_reach_is_refused_with_the_remedy(address: str) -> None:
    with pytest.raises(ConfigError, match=r"preview\.address|address: expected a loopback address.*ssh -L"):
        validate(PreviewConfig, {"address": address}, "config.yaml")


@pytest.mark.parametrize("address", ["preview.sock", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", "localhost:http"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"address: expected a loopback address such as"):
        validate(PreviewConfig, {"address": address}, "config.yaml")


def test_an_address_is_a_loopback_port_or_a_path(tmp_path: Path) -> None:
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
