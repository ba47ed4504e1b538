"""Cameras that share one engine: all get their share, and a slow camera loses no frame."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest

from agent.camera.capture import Frame
from agent.serving.inference import RoundRobinScheduler

IMAGE = np.zeros((2, 2, 3), np.uint8)


def frame(number: int, camera: str = "camera") -> Frame:
    return Frame(number, number / 10, 0, IMAGE, camera)


def answered(rates_hz: list[float], capacity_hz: float, seconds: float = 100.0) -> list[float]:
    """Frames per second of each camera that an engine of this capacity answers, by a clock of the test's own."""
    turns = RoundRobinScheduler([False] * len(rates_hz))
    due_s = [number / (7.0 * rate) for number, rate in enumerate(rates_hz)]  # not all at once
    counts: Counter[str] = Counter()
    for step in range(round(seconds * capacity_hz)):
        now_s = step / capacity_hz
        for number, rate in enumerate(rates_hz):
            while due_s[number] <= now_s:
                turns.slots[number].put(frame(0, str(number)))
                due_s[number] += 1.0 / rate
        taken = turns.next_frame(0.0)
        if taken is not None:
            counts[taken.camera] += 1
    return [counts[str(number)] / seconds for number in range(len(rates_hz))]


@pytest.mark.parametrize(
    ("rates_hz", "capacity_hz", "shares_hz"),
    [
        ([10.0, 10.0, 10.0, 10.0], 50.0, [10.0, 10.0, 10.0, 10.0]),
        ([10.0, 10.0, 10.0, 10.0], 20.0, [5.0, 5.0, 5.0, 5.0]),
        ([100.0, 30.0, 25.0, 2.0], 32.0, [10.0, 10.0, 10.0, 2.0]),
        ([60.0, 3.0], 30.0, [27.0, 3.0]),
    ],
)
def test_shares_are_max_min_fair(rates_hz: list[float], capacity_hz: float, shares_hz: list[float]) -> None:
    assert answered(rates_hz, capacity_hz) == pytest.approx(shares_hz, rel=0.1)


def test_frames_in_the_slots_are_given_out_after_the_end() -> None:
    turns = RoundRobinScheduler([True, True, False])
    for number, slot in enumerate(turns.slots):
        slot.put(frame(number))
    turns.close()
    assert not turns.is_finished
    assert [taken.id for taken in (turns.next_frame(), turns.next_frame(), turns.next_frame()) if taken] == [0, 1, 2]
    assert turns.is_finished
    assert turns.next_frame() is None


def test_a_wake_lets_a_waiting_thread_look_again() -> None:
    turns, done, found = RoundRobinScheduler([False]), threading.Event(), list[Frame | None]()
    waiting = threading.Thread(target=lambda: found.append(turns.next_frame(None, done.is_set)))
    waiting.start()
    turns.wake()
    assert found == []
    done.set()
    turns.wake()
    waiting.join(10.0)
    assert found == [None]


def test_frames_age_where_one_camera_does_not_wait() -> None:
    assert not RoundRobinScheduler([True, True]).may_overwrite
    assert RoundRobinScheduler([True, False]).may_overwrite
