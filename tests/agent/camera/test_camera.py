"""Sources and the hand-over of frames, with real video files through the real capture path."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from camera_pictures import picture, write_video
from turned_clock import TurnedClock

from agent.camera.capture import CaptureThread, Frame
from agent.camera.reader import read_images, source_length, source_seconds
from agent.camera.source import Source, is_live, parse_source
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import CameraError, ConfigError
from agent.serving.inference import RoundRobinScheduler

COUNT = 12


@pytest.fixture
def video(tmp_path: Path) -> Path:
    path = tmp_path / "clip.avi"
    write_video(path, map(picture, range(COUNT)))
    return path


def frame(number: int) -> Frame:
    return Frame(number, number / 10, 0, picture(number))


def test_a_video_yields_its_frames_in_media_time(video: Path) -> None:
    source = parse_source(str(video))
    assert source == Source("video", str(video))
    stamped = list(read_images(source))
    assert [round(ts, 3) for ts, _ in stamped] == [number / 10 for number in range(COUNT)]
    assert [round(float(image.mean()) / 20) for _, image in stamped] == list(range(COUNT))
    assert source_length(source) == COUNT
    assert source_seconds(source) == pytest.approx(COUNT / 10)


def test_a_folder_and_a_zip_of_images_are_sources(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in (2, 0, 1):
        cv2.imwrite(str(folder / f"{number}.png"), picture(number))
    packed = tmp_path / "images.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, path.name)
    for place in (folder, packed):
        source = parse_source(str(place))
        assert [int(image[0, 0, 0]) for _, image in read_images(source)] == [0, 20, 40]
        assert source_length(source) == 3
        assert source_seconds(source) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("text", "kind", "location"),
    [
        ("rtsps://x", "rtsp", "rtsps://x"),
        ("https://x/y", "http", "https://x/y"),
        ("v4l2:/dev/null", "v4l2", "/dev/null"),
    ],
)
def test_cameras_differ_from_files_by_their_names(text: str, kind: str, location: str) -> None:
    source = parse_source(text)
    assert source == Source(kind, location)
    assert source.live
    assert is_live(text)
    assert source_seconds(source) is None
    assert not is_live("clip.mp4")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("csi:front", "camera.source"),
        ("rtsp:/cam/x", "camera.source"),
        ("nowhere.mp4", "camera.missing"),
        ("v4l2:/dev/video99", "camera.missing"),
        ("", "camera.missing"),
        ("gst:rtspsrc location=rtsp://a:secret@b ! fakesink", "camera.source"),
    ],
)
def test_sources_that_cannot_be_are_refused(text: str, code: str) -> None:
    with pytest.raises(CameraError) as caught:
        parse_source(text)
    assert caught.value.code == code


def test_bad_files_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.mp4"
    text.write_text("this is no video\n" * 100)
    with pytest.raises(CameraError, match=r"camera\.open.*text\.mp4"):
        list(read_images(parse_source(str(text))))
    header_only = tmp_path / "empty.avi"
    cv2.VideoWriter(str(header_only), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 48)).release()
    with pytest.raises(CameraError, match=r"camera\.(open|empty).*empty\.avi"):
        list(read_images(parse_source(str(header_only))))
    (tmp_path / "bare").mkdir()
    with pytest.raises(CameraError, match=r"images\.none"):
        list(read_images(parse_source(str(tmp_path / "bare"))))
    assert capfd.readouterr().err == ""  # FFmpeg's messages are in the error, not on the terminal


def test_csi_without_gstreamer_says_where_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"camera\.gstreamer.*python3-gst-1\.0"):
        list(read_images(parse_source("csi:0")))


def test_the_freshest_frame_overwrites_and_is_counted() -> None:
    turns = RoundRobinScheduler([False])
    (slot,) = turns.slots
    for number in range(5):
        slot.put(frame(number))
    taken = turns.next_frame()
    assert taken is not None
    assert taken.id == 4
    assert slot.dropped == {"stale": 4}


def test_a_closed_slot_is_emptied_and_then_ends() -> None:
    turns = RoundRobinScheduler([True])
    (slot,) = turns.slots
    slot.put(frame(0))
    waiting = threading.Thread(target=lambda: slot.put(frame(1)))
    waiting.start()
    slot.close()
    waiting.join(60.0)
    assert not waiting.is_alive()
    last = turns.next_frame()
    assert last is not None
    assert last.id == 0
    assert turns.next_frame() is None
    assert not slot.dropped


def capture(
    source: Source, limit: int = 0, speed: float = 0.0, clock: Clock = SYSTEM_CLOCK
) -> tuple[list[Frame], CaptureThread]:
    """Return the frames of a source that waits, and its thread, which has ended."""
    turns = RoundRobinScheduler([True])
    (slot,) = turns.slots
    thread = CaptureThread(source, slot, speed, limit, lambda _: None, clock=clock)
    thread.start()
    frames = []
    while (taken := turns.next_frame()) is not None:
        frames.append(taken)
    thread.join(60.0)
    assert not slot.dropped
    return frames, thread


def test_capture_numbers_frames_and_stops_at_the_limit(video: Path) -> None:
    frames, thread = capture(parse_source(str(video)), limit=7)
    assert [taken.id for taken in frames] == list(range(7))
    assert thread.error is None


def test_any_error_that_ends_a_stream_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[tuple[float, np.ndarray]]:
        raise cv2.error("out of memory")

    monkeypatch.setattr("agent.camera.capture.read_images", broken)
    frames, thread = capture(Source("rtsp", "rtsp://127.0.0.1:1/x"))
    assert frames == []
    assert isinstance(thread.error, cv2.error)


def test_capture_can_be_stopped_while_it_waits_for_a_reader(video: Path) -> None:
    turns = RoundRobinScheduler([True])
    (slot,) = turns.slots
    thread = CaptureThread(parse_source(str(video)), slot, 0.0, 0, lambda _: None)
    thread.start()
    assert turns.next_frame() is not None
    thread.stop()
    thread.join(60.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["video", "images"])
def test_a_recording_in_a_loop_goes_on_with_rising_times_and_numbers(video: Path, tmp_path: Path, kind: str) -> None:
    place = video
    if kind == "images":
        place = tmp_path / "images"
        place.mkdir()
        for number in range(COUNT):
            cv2.imwrite(str(place / f"{number:02}.png"), picture(number))
    source = replace(parse_source(str(place)), loop=True)
    assert source_length(source) is source_seconds(source) is None
    frames, _ = capture(source, 3 * COUNT - 1)
    seen = [(each.id, round(each.ts, 3), round(float(each.image.mean()) / 20)) for each in frames]
    assert seen == [(number, number / 10, number % COUNT) for number in range(3 * COUNT - 1)]


def test_a_single_picture_in_a_loop_is_a_stream(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "one.png"), picture(1))
    pictures = read_images(replace(parse_source(str(tmp_path)), loop=True))
    assert [round(next(pictures)[0], 3) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]


def test_speed_paces_a_file(video: Path) -> None:
    class PassingClock(TurnedClock):
        """Each wait passes at once."""

        def wait(self, event: threading.Event, timeout_s: float | None = None) -> bool:
            self.turn(timeout_s or 0.0)
            return event.is_set()

    clock = PassingClock()
    frames, _ = capture(parse_source(str(video)), speed=4.0, clock=clock)
    came_s = [frame.captured_ns / 1e9 - TurnedClock().monotonic_s() for frame in frames]
    assert came_s == pytest.approx([number / 10 / 4.0 for number in range(COUNT)])


def test_an_opencv_of_jetpack_loads() -> None:
    """OpenCV 4.8 sets its log level elsewhere than OpenCV 5 does."""
    older = "import cv2; cv2.utils.__dict__.pop('logging', None); cv2.setLogLevel = print; import agent.camera.reader"
    done = subprocess.run([sys.executable, "-c", older], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
