"""A camera's password, by real processes: in no log, no message, no file, and not where `ps` looks."""

from __future__ import annotations

import base64
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from brokers import RealBroker, eventually
from mjpeg_server import MjpegServer
from mqtt_clients import connected
from worlds import make_world

from agent.camera.config import CameraConfig
from agent.camera.source import parse_source
from agent.common.errors import CameraError, ConfigError
from agent.common.redaction import redact, redact_location
from agent.common.schema import read_yaml, validate

USER, PASSWORD = "kestrel", "s3cret-w'0rd"
HELD_BACK = re.compile(rf"{USER}|s3cret|0rd|t0ken")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rtsp://u:p@10.0.0.7:554/a/b", "rtsp://10.0.0.7:554/a/b"),
        ("rtsp://10.0.0.7:554/a/b", "rtsp://10.0.0.7:554/a/b"),
        ("rtsp://u:p@ss@10.0.0.7/a", "rtsp://10.0.0.7/a"),
        ("rtsp://u:p/ss@10.0.0.7/a", "rtsp://10.0.0.7/a"),
        ("rtsp://u:p?ss@10.0.0.7/a", "rtsp://..."),
        ("http://cam/x?user=u&pwd=p", "http://cam/x?..."),
        ("http://cam/x?mail=a@b", "http://..."),
        ("rtsp://cam/user=u_password=p_channel=1.sdp", "rtsp://cam/user=..."),
        ("no 'rtsp://u:p@cam/x' there", "no 'rtsp://cam/x' there"),
        ("no 'rtsp://u:p'p\"p@cam/x' there", "no 'rtsp://cam/x' there"),
        ("'rtsp://u:p@cam/x' and 'http://k/y' of a@b", "'rtsp://cam/x' and 'http://k/y' of a@b"),
        (
            'rtspsrc location="rtsp://u:p@cam/x" user-id=u user-pw="p p" ! a',
            'rtspsrc location="rtsp://cam/x" user-id=... user-pw=... ! a',
        ),
        ("/data/clip@2.mp4", "/data/clip@2.mp4"),
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("rtsp://u:p 'p@cam/x", "rtsp://cam/x"),
        ("rtsp://cam/user=u_password=p_channel=1.sdp", "rtsp://cam/user=..."),
        ("rtsp:/u:p@cam/x", "...@cam/x"),
        ("u:p@cam:554/x", "...@cam:554/x"),
        ("/data/clip@2.mp4", "/data/clip@2.mp4"),
        ("/dev/video0", "/dev/video0"),
    ],
)
def test_a_location_is_shown_without_its_secrets(location: str, shown: str) -> None:
    assert redact_location(location) == shown


LONG = (
    *("rtsp://" * 20_000, "http://" + "x@" * 50_000, "rtsp://a:" + "b" * 200_000, "//a'" * 30_000),
    *("password=" * 20_000, "a" * 200_000, "password = '" * 20_000, "x=" * 100_000, 'pw="' + "a" * 200_000),
)


def test_a_long_text_is_redacted_in_a_time_that_grows_with_its_length() -> None:
    """A pattern whose time grows with the square of the length would need more time than a test has."""
    for text in LONG:
        assert len(redact(text)) <= len(text) + 3


@pytest.mark.parametrize("source", ["http://[::1", "rtsp://[::1:554/x", f"http://{'a' * 300}/x", f"/{'n' * 300}.mp4"])
def test_an_address_that_no_system_takes_is_refused(source: str) -> None:
    with pytest.raises(CameraError, match=r"camera\.(source|missing)"):
        parse_source(source)


@pytest.mark.parametrize("source", ["rtsp:/{}@cam/x", "{}@cam/x", "rtps://{}@cam/x", "csi:{}@cam", "v4l2:{}@cam"])
def test_the_error_of_a_wrong_source_has_no_password(source: str) -> None:
    with pytest.raises(CameraError) as caught:
        parse_source(source.format(f"{USER}:{PASSWORD} 'p"))
    assert not HELD_BACK.search(str(caught.value))


@pytest.mark.parametrize(
    "camera",
    [
        f"rtsp://{USER}:{PASSWORD}@cam/x",
        {"source": [f"rtsp://{USER}:{PASSWORD}@cam/x"]},
        {"source": "csi:0", f"rtsp://{USER}:{PASSWORD}@cam/x": 1},
    ],
)
def test_the_error_of_a_wrong_configuration_has_no_password(camera: object) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(CameraConfig, camera if isinstance(camera, dict) else {"source": {"x": camera}}, "config.yaml")
    assert not HELD_BACK.search(str(caught.value))


def test_the_error_of_a_damaged_yaml_has_no_password(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"camera:\n  source: rtsp://{USER}:{PASSWORD}@cam: [x\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_yaml(tmp_path / "config.yaml")
    assert not HELD_BACK.search(str(caught.value))


def arguments(process: psutil.Process) -> str:
    """Return the command lines of a process and all that it has started, which every user may read."""
    family = [process, *process.children(recursive=True)]
    return "".join(Path(f"/proc/{each.pid}/cmdline").read_bytes().decode(errors="replace") for each in family)


@pytest.fixture
def camera() -> Iterator[MjpegServer]:
    with MjpegServer(fps=20.0) as server:
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        server.accepts = lambda header: header == expected
        yield server


@pytest.mark.slow
@pytest.mark.broker
def test_the_daemon_shows_the_password_nowhere(tmp_path: Path, camera: MjpegServer, mosquitto: RealBroker) -> None:
    """While the camera is there, while it is lost, and while it takes another password."""
    address = camera.url.replace("//", f"//{USER}:{PASSWORD}@") + "?key=t0ken"
    broker = {"host": mosquitto.host, "port": mosquitto.port}
    world = make_world(tmp_path, lambda _: 0.5, 1.0, camera={"source": address, "silence_s": 0.5}, mqtt=broker)
    world.config["log_level"] = "debug"
    messages: list[str] = []
    with connected(mosquitto.endpoint, "#") as client, world.running() as process:

        def has_sent(text: str) -> bool:
            while not client.inbox.empty():
                messages.append(str(client.inbox.get()))
            return any(text in each for each in messages)

        eventually(lambda: has_sent('"fps"') and camera.clients > 0, 60.0)
        assert not HELD_BACK.search(arguments(psutil.Process(process.pid)))
        camera.accepts = lambda _: False
        camera.hang_up_after = 1
        camera.silent = True
        eventually(lambda: has_sent("camera.silent"), 30.0)
        process.terminate()
        stdout, stderr = process.communicate(timeout=30.0)
        has_sent("")
    assert "camera.silent" in stderr
    for text in (*messages, stdout, stderr):
        assert not HELD_BACK.search(text), text
    for path in world.state_dir.rglob("*"):
        assert not path.is_file() or not HELD_BACK.search(path.read_bytes().decode("latin-1")), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", ["rtsp", *(pytest.param(each, marks=pytest.mark.trial) for each in ("http", "rtmp"))]
)
def test_the_password_on_the_command_line_is_overwritten(tmp_path: Path, scheme: str) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 1.0)
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"{scheme}://{USER}:{PASSWORD}@127.0.0.1:{listening.getsockname()[1]}/x?token=t0ken"
        command = [
            sys.executable,
            "-m",
            "fleet.cli",
            "calibrate",
            str(world.folder / "model.yaml"),
            "--frames",
            address,
        ]
        with subprocess.Popen([*command, "-o", str(tmp_path / "c.json")], stderr=subprocess.PIPE, text=True) as process:
            if scheme != "rtmp":  # which is refused at once
                with listening.accept()[0]:  # which answers nothing
                    seen = arguments(psutil.Process(process.pid))
                assert not HELD_BACK.search(seen), seen
                assert f"{scheme}://" in seen
                stack.close()  # else FFmpeg would connect again
            stderr = process.communicate(timeout=60.0)[1]
    assert process.returncode == 2
    assert stderr.startswith("error: camera.")
    assert not HELD_BACK.search(stderr), stderr
