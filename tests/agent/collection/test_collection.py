"""Frames are observed at random intervals, held out in stretches, and kept in a calibration set."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from agent.collection.collection import CalibrationSet, hold_out
from agent.collection.selection import HELD_OUT_EVERY
from agent.common.timing import RandomInterval
from agent.monitoring.drift import Blocks
from agent.monitoring.observation_budget import CameraRota
from calibrate.histogram import abs_histogram
from calibrate.repair import Extremes
from engines.interface import Observation

NOTHING = Observation({}, {})


def extremes_of(x: np.ndarray) -> Extremes:
    """Return the extremes of one channel."""
    return np.array([[x.min()], [x.max()]], np.float32)


def taken(clock: RandomInterval, times: np.ndarray) -> np.ndarray:
    return np.array([ts for ts in times if clock.due(float(ts))])


def test_random_intervals_have_the_period_as_their_mean() -> None:
    times = taken(RandomInterval(1.0), np.arange(0.0, 1000.0, 0.04))
    gaps = np.diff(times)
    assert times.size == pytest.approx(1000, rel=0.05)
    assert gaps.min() >= 0.5
    assert gaps.max() <= 1.6
    assert gaps.std() > 0.2


def test_a_clock_set_back_does_not_stop_the_observer() -> None:
    clock = RandomInterval(1.0)
    assert clock.due(1000.0)
    assert not clock.due(1000.1)
    assert clock.due(3.0)


def test_a_changed_clock_is_due_at_once() -> None:
    clock = RandomInterval(100.0)
    assert clock.due(0.0)
    clock.set_period(0.2)
    assert clock.due(0.1)
    assert taken(clock, np.arange(0.1, 10.1, 0.01)).size == pytest.approx(50, rel=0.2)


def stretches(frames: int) -> set[int]:
    """The frames, from 1, that are held out of so many."""
    return {number for number, held in enumerate(islice(hold_out(), frames), 1) if held}


def test_held_out_frames_never_enter_the_histograms() -> None:
    collection = CalibrationSet(held_out_size=8)
    for number in range(192):
        x = np.full((1, 1, 2, 2), number + 1, np.float32)
        collection.add(x, Observation({}, {"t": abs_histogram(x)}, {"layer": extremes_of(x)}))
    held_out = {int(x[0, 0, 0, 0]) - 1 for x in collection.held_out}
    assert collection.frames == 145
    assert collection.histograms["t"].total == 4 * 145
    calibrating = sorted(set(range(1, 193)) - stretches(192))
    assert collection.extremes["layer"].tolist() == [[calibrating[0]], [calibrating[-1]]]
    assert len(held_out) == collection.informative == 6  # a quarter is kept for frames that show nothing


def test_a_quarter_of_the_frames_is_held_out_in_stretches_and_the_first_ones_soon() -> None:
    held_out = list(islice(hold_out(), 4000))
    assert held_out.index(True) == 12
    assert held_out[:16].count(True) == 4  # as many as a verdict needs
    assert held_out.count(True) / len(held_out) == pytest.approx(1 / HELD_OUT_EVERY, abs=0.01)
    ends = [n for n in range(3999) if held_out[n] and not held_out[n + 1]]
    begins = [n for n in range(3999) if not held_out[n] and held_out[n + 1]]
    lengths = [end - begin for begin, end in zip(begins, ends, strict=False)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (4, 16)


def test_held_out_frames_are_spread_over_the_whole_stretch() -> None:
    thirds = np.zeros(3)
    collection = CalibrationSet(held_out_size=30)
    for number in range(3000):
        collection.add(np.full((1, 1, 1, 1), number, np.float32), NOTHING)
    for x in collection.held_out:
        thirds[int(x[0, 0, 0, 0].real) // 1000] += 1
    assert thirds.min() >= 4


def test_rare_informative_frames_are_not_crowded_out() -> None:
    collection = CalibrationSet(held_out_size=32)
    for number in range(2000):
        collection.add(np.zeros((1, 1, 1, 1), np.float32), NOTHING, informative=number % 50 == 0)
    assert collection.informative == 8  # of the 40
    assert len(collection.held_out) == 8 + 8


def test_a_held_out_frame_is_a_copy() -> None:
    collection = CalibrationSet(held_out_size=4)
    buffer = np.zeros((1, 1, 1, 1), np.float32)
    number = 0
    while not collection.held_out:
        buffer[:] = number
        collection.add(buffer, NOTHING)
        number += 1
    buffer[:] = 99
    assert collection.held_out[0][0, 0, 0, 0] == number - 1


def test_without_a_held_out_set_every_frame_counts() -> None:
    collection = CalibrationSet(held_out_size=0)
    for _ in range(10):
        collection.add(np.zeros((1, 1, 1, 1), np.float32), NOTHING)
    assert collection.frames == 10


def test_blocks_end_with_an_observation_and_are_no_shorter_than_asked() -> None:
    blocks = Blocks(3.0)
    placed = [blocks.place(float(second)) for second in range(8)]
    assert [first for first, _ in placed] == [True, False, False, False, True, False, False, True]
    assert [last for _, last in placed] == [False, False, False, True, False, False, True, False]
    assert blocks.started_ts == 6.0


def test_rare_observations_are_blocks_of_their_own() -> None:
    blocks = Blocks(3.0)
    assert [blocks.place(7.0 * number) for number in range(3)] == [(True, False), (False, True), (True, True)]


def test_a_clock_that_jumps_back_starts_a_block_anew() -> None:
    blocks = Blocks(3.0)
    blocks.place(100.0)
    assert blocks.place(1.0) == (True, False)
    assert blocks.place(4.0) == (False, True)
    assert blocks.started_ts == 1.0


def test_cameras_are_observed_in_turn_and_a_silent_one_is_passed_over() -> None:
    rota, observed = CameraRota(["a", "b", "c"]), list[str]()
    for tick in range(600):  # tenths of a second
        for camera in "abc":
            if camera == "b" and tick >= 300:
                continue
            if rota.is_turn(camera, 1000.0 + tick / 10, tick / 10) and len(observed) < tick:
                rota.end_turn()
                observed.append(camera)
    both, without = observed[:200], observed[350:]
    assert [both.count(camera) for camera in "abc"] == pytest.approx([67, 67, 67], abs=3)
    assert [without.count(camera) for camera in "abc"] == pytest.approx([len(without) / 2, 0, len(without) / 2], abs=2)


def test_cameras_have_a_time_in_common_that_goes_as_theirs_do() -> None:
    """One recording of 10 frames a second, one of 5, and a clock that jumps back."""
    rota = CameraRota(["a", "b"])
    for tick in range(200):
        rota.is_turn("a", tick / 10 - (15.0 if tick > 150 else 0.0), tick / 100)
        if tick % 2 == 0:
            rota.is_turn("b", 500.0 + tick / 10, tick / 100)
    assert rota.now_ts == pytest.approx(20.0, abs=0.3)


def test_a_slow_camera_has_its_turn_beside_a_fast_one() -> None:
    """One frame in three seconds is no silence, where it is what the camera gives."""
    rota, observed = CameraRota(["fast", "slow"]), list[str]()
    for tick in range(6000):  # tenths of a second
        cameras = ["fast", "slow"] if tick % 30 == 0 else ["fast"]
        for camera in cameras:
            if rota.is_turn(camera, tick / 10, tick / 10):
                rota.end_turn()
                observed.append(camera)
    assert observed.count("slow") > 150
