"""The certificate: a candidate passes only where its loss and its confusions are shown to be small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from trial_bench import (
    CLASSES,
    DIGITS,
    INPUT,
    TIMED,
    USUAL,
    WARM_UP,
    MakeTrialBench,
    digit,
    misread,
    read_digits,
)

from agent.planning.certificate import ERROR, MAX_CANDIDATES, Measurement, Tally, Terms
from agent.vision.spec import ModelSpec
from calibrate.statistics.loss_bound import frames_needed
from engines.interface import Array


def test_a_perfect_candidate_is_accepted_on_the_fewest_frames(trial_bench: MakeTrialBench) -> None:
    terms = Terms(0.05, 0.3)
    assert terms.fewest_frames == frames_needed(0.05, 0.05 / 2)
    made = trial_bench(terms)
    trial, runs = made.trial(read_digits)
    assert (trial.accepted, trial.frames, trial.empty_frames) == (True, terms.fewest_frames, 0)
    assert (trial.loss, trial.lower, trial.confused) == (0.0, 0.0, ())
    assert trial.upper <= 0.05
    assert trial.reason == f"loss at most 0.05 on {terms.fewest_frames} frames, 0 others empty; at most 0.05 is asked"
    assert runs == terms.fewest_frames + WARM_UP
    assert made.reference.runs == terms.fewest_frames
    assert made.float_engine.runs == TIMED + WARM_UP


def test_the_next_candidate_has_the_same_frames_and_no_reference(trial_bench: MakeTrialBench) -> None:
    made = trial_bench()
    for number, name in enumerate(("first", "second"), start=1):
        trial, _ = made.trial(read_digits, name)
        assert (trial.accepted, trial.loss, trial.frames) == (True, 0.0, USUAL.frames_needed(number))
        assert made.reference.runs == trial.frames


def test_a_bad_candidate_is_refused_long_before_a_good_one_passes(trial_bench: MakeTrialBench) -> None:
    made = trial_bench()
    trial, _ = made.trial(misread(lambda number, _: number % 2 == 1, 0))
    assert not trial.accepted
    assert trial.lower >= 0.05
    assert trial.frames < USUAL.fewest_frames / 4
    assert trial.reason.startswith("loss at least 0.0")


def test_a_small_loss_passes_on_more_frames(trial_bench: MakeTrialBench) -> None:
    made = trial_bench()
    trial, _ = made.trial(misread(lambda _, marked: marked, 0))
    assert trial.accepted
    assert 0.0 < trial.loss < 0.03
    assert USUAL.fewest_frames < trial.frames < 800


def test_sixes_read_as_eights_are_refused_behind_a_small_loss(trial_bench: MakeTrialBench) -> None:
    terms = Terms(0.1, 0.3)
    trial, _ = trial_bench(terms).trial(misread(lambda number, _: number == 6, 8))
    assert trial.upper <= 0.1
    (pair,) = trial.confused
    assert (pair.reference, pair.candidate, pair.count) == ("6", "8", pair.of)
    assert pair.low > 0.3
    assert not trial.accepted
    assert trial.reason == (
        f"'6' served as '8' on {pair.of} of {pair.of} frames, at least {pair.low:.3g} of all; at most 0.3 is asked"
    )


def test_a_plan_that_is_good_at_first_and_then_bad_is_refused() -> None:
    """Its loss was kept, but a confusion had to be looked at for longer; meanwhile the scene changed."""
    tally = Tally(Terms(0.2, 0.01))  # the pair's share is between the two limits
    good, confused = Measurement(0.0, False, [(6, 6)], None), Measurement(0.0, False, [(6, 8)], None)
    for measurement in (Measurement(0.0, False, [], (1.0, 2.0)), *[good] * 37, confused, confused):
        tally.add(measurement)
    assert tally.bound.upper <= 0.2
    while not tally.is_decided:
        tally.add(Measurement(1.0, False, [], None))
    trial = tally.result(DIGITS, "the frames ended")
    assert (trial.accepted, trial.lower >= 0.2 or trial.loss >= 0.2) == (False, True)
    assert trial.reason.startswith("loss ")


def test_pixels_of_all_frames_count_together_and_come_back_from_a_journal() -> None:
    tally = Tally(Terms(0.6, 0.3))
    for overlaps in ([(6, 90, 100)], [[6, 0, 20], [8, 5, 5]]):
        tally.add(Measurement(0.1, False, [], (1.0, 2.0), overlaps))  # type: ignore[arg-type]  # as JSON has them
    assert tally.result(DIGITS, "the frames ended").ious == {"6": 0.75, "8": 1.0}


def test_a_class_of_pixels_that_is_lost_is_refused_behind_a_small_loss() -> None:
    def tried(*small: int) -> Tally:
        tally = Tally(Terms(0.25, 0.3))
        for number in range(4000):
            overlaps = [(6, 900, 1000), (8, small[number % len(small)], 100)]
            tally.add(Measurement(0.1, False, [], (1.0, 2.0), overlaps))
            if tally.is_decided:
                break
        return tally

    refused = tried(10, 20).result(DIGITS, "the frames ended")
    assert (refused.upper <= 0.25, refused.accepted) == (True, False)
    assert refused.reason.startswith("'8' has an IoU of 0.15 with float on")
    assert tried(0, 0, 95, 95, 95).result(DIGITS, "").accepted, "it has more than half of all pixels"


def test_confusions_can_be_limited_below_the_loss() -> None:
    """A third of the ones is misread; a loss of 0.6 would be allowed, and a share of 0.05 is."""
    tally = Tally(Terms(0.6, 0.05))
    for number in range(90):
        misread = number % 3 == 0
        tally.add(Measurement(float(misread), False, [(1, 0 if misread else 1)], (1.0, 2.0)))
    trial = tally.result(DIGITS, "the frames ended")
    (pair,) = trial.confused
    assert (trial.upper <= 0.6, 0.05 < pair.low < 0.6, trial.accepted) == (True, True, False)
    assert trial.reason.startswith("'1' served as '0' on 30 of 90 frames")


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_outputs_that_are_not_finite_are_a_loss(trial_bench: MakeTrialBench, broken: float) -> None:
    def compute(batch: NDArray[np.float32]) -> Array:
        logits = read_digits(batch)
        logits[0, (digit(batch) + 1) % CLASSES] = broken  # the reference's class may well be the top one still
        return logits

    made = trial_bench()
    trial, _ = made.trial(compute)
    assert (trial.accepted, trial.loss) == (False, 1.0)
    known: Any = [made.journal.get(f"trial int8 {number}") for number in range(trial.frames)]
    assert {served for measured in known for _, served in measured["answers"]} == {None}  # a loss, and no confusion


def test_values_that_are_not_finite_in_float_either_are_no_loss(trial_bench: MakeTrialBench) -> None:
    """The sky of a map of depths may be infinitely far."""

    def compute(batch: NDArray[np.float32], rows: int = 3) -> Array:
        distances = 1.0 + batch[:, 0]
        distances[:, :rows] = np.inf
        return distances

    made = trial_bench(spec=ModelSpec(path=Path("depth.onnx"), task="depth", input=INPUT), compute=compute)
    assert made.trial(compute, "same")[0].loss == 0.0
    assert made.trial(lambda batch: compute(batch, 4), "more")[0].loss == 1.0


def test_a_candidate_too_many_is_refused(trial_bench: MakeTrialBench) -> None:
    made = trial_bench(Terms(0.3, 0.5))
    for name in ("a", "b", "c", "d", "e", "a"):
        assert made.trial(read_digits, name)[0].accepted
    assert made.certifier.number_of("f") is None
    with pytest.raises(ValueError, match="'f' is one more"):
        made.trial(read_digits, "f")


def test_the_error_of_all_candidates_and_sources_is_one() -> None:
    """Five candidates, each in three sources; the first takes the fewest frames."""
    terms = Terms(0.05, 0.3, 3)
    assert sum(3 * terms.error(number) for number in range(1, MAX_CANDIDATES + 1)) <= ERROR
    needed = [terms.frames_needed(number) for number in range(1, MAX_CANDIDATES + 1)]
    assert needed == sorted(set(needed))
    assert Terms(0.05, 0.3).fewest_frames < needed[0]


def test_raw_outputs_are_measured_and_not_kept(trial_bench: MakeTrialBench) -> None:
    raw = ModelSpec(path=Path("raw.onnx"), task="raw", input=INPUT)
    made = trial_bench(spec=raw)
    assert made.trial(lambda batch: read_digits(batch) * 1.05, "close")[0].accepted  # 26 dB
    once = made.reference.runs
    far, _ = made.trial(lambda batch: read_digits(batch) * 1.2, "far")  # 14 dB
    assert (far.accepted, far.loss) == (False, 1.0)
    assert made.reference.runs == once + far.frames
