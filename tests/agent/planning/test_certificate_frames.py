"""A certificate takes the frames it needs and no more: fewer are refused before the work, and a trial ends in time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from trial_bench import DIGITS, USUAL, MakeTrialBench, misread, read_digits

from agent.camera.source import Source, parse_source
from agent.common.errors import AgentError
from agent.planning import frames as frames_module
from agent.planning.certificate import Measurement, Tally, Terms, check_frames
from agent.planning.frames import RandomFrames


def test_too_few_frames_are_refused_before_an_engine_runs(trial_bench: MakeTrialBench, digits_video: Source) -> None:
    terms = Terms(0.02, 0.3)
    with pytest.raises(AgentError) as caught:
        trial_bench(terms, start=600)
    assert str(caught.value) == (
        f"plan.frames: 200 frames to measure on in {digits_video.location}, beside 600 to search with; "
        f"expected at least {terms.fewest_frames} for --max-loss 0.02 with 95 % confidence; "
        "give more frames, or accept --max-loss 0.022, for which 200 frames suffice"
    )
    assert Terms(0.022, 0.3).fewest_frames <= 200 < Terms(0.021, 0.3).fewest_frames
    check_frames(RandomFrames(digits_video, 0), 600, Terms(0.022, 0.3))


def test_a_plan_that_the_frames_leave_open_is_refused(trial_bench: MakeTrialBench) -> None:
    trial, _ = trial_bench(start=600).trial(misread(lambda number, marked: marked or number == 6, 8))
    assert (trial.accepted, trial.frames) == (False, 200)
    assert trial.lower < 0.05 < trial.upper
    assert "and there were no more frames" in trial.reason


def test_twenty_times_the_fewest_frames_are_enough(trial_bench: MakeTrialBench) -> None:
    terms = Terms(0.55, 0.9)
    trial, _ = trial_bench(terms).trial(misread(lambda number, marked: (number % 2 == 1) != marked, 0))
    assert trial.frames == 20 * terms.fewest_frames
    assert not trial.accepted
    assert "and more would take too long" in trial.reason


def test_a_candidate_whose_mean_is_too_high_is_not_measured_to_the_end() -> None:
    tally = Tally(USUAL)
    for number in itertools.count():
        tally.add(Measurement(float(number % 19 == 0), False, [], (1.0, 2.0)))
        if tally.is_decided:
            break
    trial = tally.result(DIGITS, "the frames ended")
    assert trial.frames == max(100, USUAL.fewest_frames) < 20 * USUAL.fewest_frames
    assert (trial.accepted, trial.lower < 0.05) == (False, True)
    assert "and more would hardly lower it" in trial.reason


def test_a_camera_has_frames_enough_and_never_the_same(
    trial_bench: MakeTrialBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live(_: Source) -> Iterator[tuple[float, NDArray[np.uint8]]]:
        for second in range(100_000):
            yield float(second), np.full((16, 16, 3), second % 250, np.uint8)

    monkeypatch.setattr(frames_module, "read_images", live)
    made = trial_bench(source=parse_source("rtsp://10.0.0.1/stream"))
    for name in ("first", "second"):
        assert made.trial(read_digits, name)[0].accepted
    assert made.reference.runs == USUAL.frames_needed(1) + USUAL.frames_needed(2)
