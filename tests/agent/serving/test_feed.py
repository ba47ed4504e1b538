"""One camera of several: a thread that hangs, and a camera that is only away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from turned_clock import TurnedClock

from agent.camera.capture import FrameSlot
from agent.camera.config import CameraConfig
from agent.camera.source import Source
from agent.common.errors import CameraError
from agent.serving.pipeline import Feed, total_frames
from agent.vision.tasks.classify import Classify


class Reading(threading.Thread):
    """Stands in the place of a capture thread, until it is let go."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.beat = 0, 0
        self.let_go = threading.Event()

    def run(self) -> None:
        self.let_go.wait(30.0)

    def check_silence(self) -> None: ...


def watched(
    clock: TurnedClock, live: bool = True, on_change: Callable[[CameraError | None], None] = lambda _: None
) -> tuple[Feed, Any]:
    source = Source("rtsp", "rtsp://127.0.0.1:1/x") if live else Source("video", "clip.avi")
    feed = Feed(CameraConfig(source=source.location), source, FrameSlot(not live), Classify.labels, 0, on_change, clock)
    reading: Any = Reading()
    feed.capture = reading
    reading.start()
    return feed, reading


def pass_time(feed: Feed, clock: TurnedClock, seconds: float, each: Callable[[], None] = lambda: None) -> None:
    for _ in range(round(seconds)):
        clock.turn(1.0)
        each()
        feed.poll()


def test_a_thread_that_does_nothing_at_all_hangs_and_one_that_tries_does_not(clock: TurnedClock) -> None:
    feed, reading = watched(clock)

    def tries() -> None:
        reading.beat = reading.beat[0], reading.beat[1] + 1

    pass_time(feed, clock, 300.0, tries)
    assert not feed.is_hung
    pass_time(feed, clock, 59.0)
    assert not feed.is_hung
    pass_time(feed, clock, 5.0)
    assert feed.is_hung
    tries()
    feed.poll()
    assert not feed.is_hung
    reading.let_go.set()


def test_a_driver_that_hangs_is_reported_as_a_silent_camera(
    clock: TurnedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, let_go, changes = threading.Event(), threading.Event(), list[CameraError | None]()

    def read(*_: object) -> Iterator[Any]:
        hangs.set()
        let_go.wait(30.0)
        yield from ()

    monkeypatch.setattr("agent.camera.capture.read_images", read)
    source = Source("v4l2", "/dev/video0")
    feed = Feed(
        CameraConfig(source="v4l2:/dev/video0"), source, FrameSlot(False), Classify.labels, 0, changes.append, clock
    )
    feed.capture.start()
    assert hangs.wait(30.0)
    feed.poll()
    assert not changes
    clock.turn(60.0)
    feed.poll()
    assert (feed.lost, [error and error.code for error in changes]) == ("camera.silent", ["camera.silent"])
    feed.capture.stop()
    let_go.set()
    feed.capture.join(30.0)


def test_a_camera_that_has_ended_and_a_recording_that_waits_do_not_hang(clock: TurnedClock) -> None:
    feed, reading = watched(clock)
    recording, waiting = watched(clock, live=False)
    reading.let_go.set()
    reading.join(30.0)
    for each in (feed, recording):
        pass_time(each, clock, 300.0)
        assert not each.is_hung
    waiting.let_go.set()


def test_a_camera_is_up_from_its_first_frame_until_it_is_lost_or_over(clock: TurnedClock) -> None:
    changes: list[CameraError | None] = []
    feed, reading = watched(clock, on_change=changes.append)
    assert (feed.is_up, feed.lost) == (False, "")
    error = CameraError("camera.silent", "nothing", "frames", "check it")
    feed._changed(error)
    assert (feed.is_up, feed.lost) == (False, "camera.silent")
    reading.beat = 1, 1
    assert not feed.is_up, "not before it is reported as back"
    feed._changed(None)
    assert (feed.is_up, feed.lost) == (True, "")
    assert changes == [error, None]
    reading.let_go.set()
    reading.join(30.0)
    assert not feed.is_up


def test_frames_to_come_are_those_of_all_sources_or_unknown() -> None:
    live = Source("rtsp", "rtsp://127.0.0.1:1/x")
    assert total_frames([live, live], 0) is None
    assert total_frames([live, live], 7) == 14
