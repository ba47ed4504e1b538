"""Settings that are requested of a camera's driver: granted, refused, or not for this kind of source.

No camera is here: a fake driver answers as V4L2's do; a loopback device of the kernel's, where there is one, answers
itself.
"""

from __future__ import annotations

import logging
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import cv2
import pytest
import yaml
from gstreamer import PYTHON
from worlds import make_world

from agent.camera import gstreamer
from agent.camera.config import CameraConfig
from agent.camera.gstreamer import csi_pipeline, rtsp_pipeline
from agent.camera.opencv import open_capture
from agent.camera.reader import read_images
from agent.camera.source import _KINDS_BY_KEY, CaptureSettings, Source, parse_source
from agent.common.errors import CameraError, ConfigError
from agent.common.schema import validate
from agent.config import load_config
from agent.daemon.run import run_daemon
from agent.doctor.software import examine_software
from agent.monitoring.view import _FROZEN_S

LOOPBACK = sorted(Path("/sys/devices/virtual/video4linux").glob("video*"))


class Driver:
    """One that has 640 x 480 in YUYV at up to 30 fps, and 1280 x 720 in MJPG; `calls` in their order."""

    def __init__(self, *_: object) -> None:
        self.calls: list[int] = []
        self.state = {cv2.CAP_PROP_FOURCC: fourcc("YUYV"), cv2.CAP_PROP_FPS: 30.0}
        self.size = (640, 480)
        self.requested = [640, 480]
        self.released = False

    def set(self, which: int, value: float) -> bool:
        self.calls.append(which)
        if which in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT):
            self.requested[which == cv2.CAP_PROP_FRAME_HEIGHT] = round(value)
            large = self.state[cv2.CAP_PROP_FOURCC] == fourcc("MJPG") and self.requested == [1280, 720]
            self.size = (1280, 720) if large else (640, 480)
        elif which == cv2.CAP_PROP_FPS:
            self.state[which] = min(30.0, value)
        else:
            self.state[which] = value
        return True

    def get(self, which: int) -> float:
        if which in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT):
            return float(self.size[which == cv2.CAP_PROP_FRAME_HEIGHT])
        return self.state[which]

    def isOpened(self) -> bool:
        return True

    def release(self) -> None:
        self.released = True


def fourcc(name: str) -> float:
    return float(cv2.VideoWriter.fourcc(*name))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    only = Driver()
    monkeypatch.setattr("agent.camera.opencv.cv2.VideoCapture", lambda *_: only)
    return only


def v4l2(**requested: object) -> Source:
    settings = CaptureSettings(**requested)  # type: ignore[arg-type]  # its keys are under test
    return Source("v4l2", "/dev/video0", settings)


def test_every_requested_setting_says_for_which_kinds_of_source_it_is() -> None:
    """One that the table lacks would be accepted for every kind, and do nothing for most."""
    assert {setting.name for setting in fields(CaptureSettings)} <= _KINDS_BY_KEY.keys()


def test_the_format_is_requested_before_its_sizes_and_rates(driver: Driver) -> None:
    open_capture(v4l2(pixel_format="mjpg", width=1280, height=720, fps=25.0), 2.0)
    requested = [cv2.CAP_PROP_FOURCC, cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FPS]
    assert driver.calls[:4] == requested
    assert driver.size == (1280, 720)


def test_only_configured_settings_are_requested(driver: Driver) -> None:
    open_capture(v4l2(), 2.0)
    assert driver.calls == [cv2.CAP_PROP_BUFFERSIZE]


def test_a_device_that_cannot_be_opened_is_an_error_by_its_reason(tmp_path: Path) -> None:
    """A directory, which no user may open for writing, stands for a device that the system refuses."""
    (tmp_path / "file").touch()
    for name, reason in (("none", "No such file"), ("file", "gives no pictures"), (".", "Is a directory")):
        with pytest.raises(CameraError, match=rf"camera\.open: .*{reason}.*; expected a V4L2 camera"):
            open_capture(Source("v4l2", str(tmp_path / name), CaptureSettings()), 2.0)


def test_a_size_that_is_not_granted_is_an_error(driver: Driver) -> None:
    with pytest.raises(CameraError, match=r"camera\.mode: /dev/video0 gives 640 x 480; .*1280 x 720") as caught:
        open_capture(v4l2(width=1280, height=720), 2.0)
    assert "--list-formats-ext" in caught.value.remedy
    assert driver.released


def test_a_format_that_is_not_granted_is_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "set", lambda *_: False)
    with pytest.raises(CameraError, match=r"camera\.mode: .*gives pixel format 'yuyv'"):
        open_capture(v4l2(pixel_format="mjpg"), 2.0)


def test_a_rate_that_is_not_granted_is_logged(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    open_capture(v4l2(fps=29.97), 2.0)
    assert not caplog.records
    open_capture(v4l2(fps=60.0), 2.0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "fps=30 asked_fps=60" in caplog.text
    assert driver.state[cv2.CAP_PROP_FPS] == 30.0


def test_ffmpeg_decodes_with_so_many_threads_as_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[int] = []

    def opened(_location: str, _api: int, given: list[int]) -> Driver:
        settings.extend(given)
        return Driver()

    monkeypatch.setattr("agent.camera.opencv.cv2.VideoCapture", opened)
    open_capture(Source("rtsp", "rtsp://a/b", CaptureSettings(decode_threads=3)), 2.0)
    assert settings[settings.index(cv2.CAP_PROP_N_THREADS) + 1] == 3


def test_a_sensors_mode_and_flip_are_in_its_pipeline() -> None:
    plain = csi_pipeline("1", CaptureSettings())
    assert plain.startswith("nvarguscamerasrc sensor-id=1 ! video/x-raw(memory:NVMM),format=NV12 ! nvvidconv ")
    assert "flip-method=0 " in plain
    requested = csi_pipeline("0", CaptureSettings(width=1920, height=1080, fps=29.97, flip="rotate-180"))
    assert "format=NV12,width=1920,height=1080,framerate=2997/100 ! nvvidconv flip-method=2 " in requested
    assert "flip-method=3 " in csi_pipeline("0", CaptureSettings(flip="clockwise"))
    assert "flip-method=6 " in csi_pipeline("0", CaptureSettings(flip="vertical"))


def test_rtsp_for_gstreamer_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    address = """rtsps://us%40er:p'a"s%5Cs@10.0.0.7:322/main?channel=1"""
    pipeline = rtsp_pipeline(address, CaptureSettings(transport="udp"))
    assert pipeline.startswith('rtspsrc location="rtsps://10.0.0.7:322/main?channel=1" protocols="udp" latency="0" ')
    assert """user-id="us@er" user-pw="p'a\\"s\\\\s" """ in pipeline
    assert "nvvidconv" not in pipeline
    monkeypatch.setattr(gstreamer, "is_jetson", lambda: True)  # its decoder leaves frames where no CPU reads
    assert "decodebin ! nvvidconv ! video/x-raw,format=BGRx ! videoconvert ! " in rtsp_pipeline(
        "rtsp://a/b", CaptureSettings()
    )


def test_a_missing_decoder_of_rtsp_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gstreamer, "gstreamer_version", lambda: None)
    source = parse_source("rtsp://a/b")
    assert source.reports_key_frames
    gstreamer.check_gstreamer(source)
    source = replace(source, requested=CaptureSettings(decoder="gstreamer"))
    assert not source.reports_key_frames
    with pytest.raises(ConfigError, match=r"camera\.decoder: gstreamer, and no Python bindings of GStreamer"):
        gstreamer.check_gstreamer(source)


def test_a_turned_sensor_gives_the_other_size() -> None:
    gstreamer._check_mode(Source("csi", "0", CaptureSettings(width=1280, height=720, flip="clockwise")), 720, 1280)
    with pytest.raises(CameraError, match=r"camera\.mode.*720 x 1280"):
        gstreamer._check_mode(Source("csi", "0", CaptureSettings(width=1280, height=720)), 720, 1280)


@pytest.mark.parametrize("source", ["csi:0", "gst:videotestsrc ! appsink"])
def test_a_pipeline_without_gstreamer_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """It is not tried again for ever, as a camera is that may come back."""
    monkeypatch.setattr("agent.camera.gstreamer.gstreamer_version", lambda: None)
    monkeypatch.setattr("agent.doctor.software.gstreamer_version", lambda: None)
    world = make_world(tmp_path, lambda _: 0.5, 1.0, camera={"source": source})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(world.config))
    with pytest.raises(ConfigError, match=r"camera\.gstreamer: .* of kind (csi|gst), .*python3-gst-1.0") as caught:
        run_daemon(load_config(tmp_path / "config.yaml"), frame_limit=1)
    assert not world.state_dir.exists()
    findings = {finding.name: finding for finding in examine_software()}
    assert findings["gstreamer"].remedy.endswith(caught.value.remedy)


@pytest.mark.parametrize(
    ("source", "requested", "said"),
    [
        (
            "rtsp://a/b",
            {"width": 640, "height": 480},
            r"camera\.width: 640 for a source of kind rtsp, rtsp://a/b; .*v4l2 or csi",
        ),
        ("rtsp://a/b", {"decoder": "gstreamer", "decode_threads": 2}, r"camera\.decode_threads: 2 beside camera"),
        ("rtsp://a/b", {"speed": 2.0}, r"camera\.speed: 2\.0 for .*kind rtsp, .*a source of kind video or images"),
        ("csi:0", {"labels": "labels.json"}, r"camera\.labels: .*labels\.json for .*kind csi, 0; .*video or images"),
        ("/", {"transport": "udp"}, r"camera\.transport: udp for .*kind images, /; expected a source of kind rtsp;"),
        ("csi:0", {"loop": True}, r"camera\.loop: True for .*kind csi, 0; .*video or images"),
        ("/", {"silence_s": 3.0}, r"camera\.silence_s: 3\.0 for a source of kind images, /; .*rtsp or http or v4l2"),
        ("/", {"frozen_s": None}, r"camera\.frozen_s: None for .*kind images, /; .*rtsp"),
        ("csi:0", {"width": 640}, r"camera\.width: 640, camera\.height: None; .*both"),
    ],
)
def test_a_key_that_does_not_fit_a_source_is_refused(source: str, requested: dict[str, object], said: str) -> None:
    with pytest.raises(CameraError, match=rf"camera\.option: {said}"):
        CameraConfig.model_validate({"source": source, **requested}).to_source()


def test_a_key_that_has_its_default_fits_every_source() -> None:
    """A config.yaml may have all keys."""
    defaults = CameraConfig(source="csi:0").model_dump()
    for source in ("rtsp://a/b", "http://a/b", "csi:0", "gst:videotestsrc ! appsink", "/"):
        CameraConfig.model_validate({**defaults, "source": source}).to_source()


def test_a_picture_may_repeat_as_long_as_the_kind_of_source_lets_it() -> None:
    def frozen_s(source: str, **keys: object) -> float | None:
        return CameraConfig.model_validate({"source": source, **keys}).to_source().frozen_s

    assert frozen_s("rtsp://a/b") == frozen_s("csi:0") == frozen_s("http://a/b") == 1.5
    assert frozen_s("gst:videotestsrc ! appsink") is None
    assert frozen_s("gst:videotestsrc ! appsink", frozen_s=3) == 3.0
    assert frozen_s("rtsp://a/b", frozen_s=None) is None


def test_a_loss_is_reported_before_the_alert_of_a_view_that_stands_still() -> None:
    """The alert is for cameras whose loss is switched off."""
    for wrong in (_FROZEN_S, float("nan"), True, "never"):
        with pytest.raises(
            ConfigError, match=r"1 error in x:\n  frozen_s: expected auto, null, or seconds from 0\.5 to 9,"
        ):
            validate(CameraConfig, {"source": "csi:0", "frozen_s": wrong}, "x")
    assert CameraConfig(source="csi:0", frozen_s=_FROZEN_S - 1.0).to_source().frozen_s == _FROZEN_S - 1.0


@pytest.mark.skipif(not LOOPBACK, reason="the kernel has no v4l2loopback device")
def test_a_loopback_device_is_read() -> None:
    device = f"/dev/{LOOPBACK[0].name}"
    feeding = (
        "import gi; gi.require_version('Gst', '1.0'); from gi.repository import GLib, Gst; Gst.init(None); "
        "Gst.parse_launch('videotestsrc is-live=true ! video/x-raw,format=YUY2,width=320,height=240,framerate=20/1 ! "
        f"v4l2sink device={device}').set_state(Gst.State.PLAYING); print(flush=True); GLib.MainLoop().run()"
    )
    with subprocess.Popen([PYTHON, "-c", feeding], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            frames = read_images(parse_source(f"v4l2:{device}"))
            assert {next(frames)[1].shape for _ in range(10)} == {(240, 320, 3)}
            frames.close()  # type: ignore[attr-defined]  # it is a generator, which holds the device
        finally:
            process.kill()
