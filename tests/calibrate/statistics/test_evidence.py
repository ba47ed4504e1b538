"""The guarantees of the e-detector and the confidence sequence, measured."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.errors import CalibrationError
from calibrate.statistics.evidence import ConfidenceSequence, DriftDetector, EDetector

TOLERANCE = 0.25


@given(st.lists(st.floats(0.0, 1.0), max_size=30))
def test_expected_growth_under_the_null_is_at_most_one_per_value(history: list[float]) -> None:
    """For the worst null, values 0 or 1 with mean = tolerance: E[e_n+1 | past] = e_n + 1, exactly."""
    before = EDetector(TOLERANCE, 1e300, 1.0)
    for value in history:
        before.update(value)
    grown = 0.0
    for value, probability in ((1.0, TOLERANCE), (0.0, 1.0 - TOLERANCE)):
        after = EDetector(TOLERANCE, 1e300, 1.0)
        for past in [*history, value]:
            after.update(past)
        grown += probability * after.e_value
    assert grown == pytest.approx(before.e_value + 1.0, rel=1e-9)


def test_an_alarm_holds_until_reset() -> None:
    detector = EDetector(TOLERANCE, 10.0, 1.0)
    for _ in range(10):
        detector.update(1.0)
    risen = detector.e_value
    detector.update(0.0)
    assert detector.drift_detected
    assert detector.e_value == risen


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_values_that_would_void_the_guarantee_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        EDetector(TOLERANCE, 10.0, 1.0).update(value)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        ConfidenceSequence().update(value)


def test_a_gain_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        DriftDetector().update(float("nan"))


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="error"):
        ConfidenceSequence(error=0.0)
    with pytest.raises(ValueError, match="tolerance"):
        EDetector(1.0, 10.0, 1.0)
    with pytest.raises(ValueError, match="warning_threshold"):
        EDetector(0.5, 10.0, 20.0)


@pytest.mark.parametrize(
    "mean", [pytest.param(0.5, marks=pytest.mark.trial), 0.9, pytest.param(0.99, marks=pytest.mark.trial)]
)
def test_intervals_miss_the_mean_at_any_time_in_at_most_five_percent_of_runs(mean: float) -> None:
    """And they are refuted no more often while the mean is what it was."""
    rng = np.random.default_rng(1)
    misses = refuted = 0
    for _ in range(100):
        sequence = ConfidenceSequence(error=0.05)
        for value in rng.random(200) < mean:
            sequence.update(float(value))
        misses += not sequence.interval.low <= mean <= sequence.interval.high  # never wider: at the end is ever
        refuted += sequence.refuted
    assert max(misses, refuted) <= 5


def exact_bounds(values: np.ndarray, error: float, means: np.ndarray) -> tuple[float, float]:
    """The lowest and highest of `means` that no gambler has ruled out at any time, by the process as published."""
    alive = np.ones(means.size, bool)
    for index, mean in enumerate(means):
        up = down = 1.0
        total, squares, variance = 0.5, 0.25, 0.25
        for n, value in enumerate(values, start=1):
            bet = math.sqrt(2.0 * math.log(2.0 / error) / (variance * n * math.log(n + 1)))
            up *= 1.0 + min(bet, 0.5 / mean) * (value - mean)
            down *= 1.0 - min(bet, 0.5 / (1.0 - mean)) * (value - mean)
            alive[index] &= max(0.5 * up, 0.5 * down) < 1.0 / error
            total += value
            squares += (value - total / (n + 1)) ** 2
            variance = squares / (n + 1)
    return float(means[alive].min()), float(means[alive].max())


@pytest.mark.parametrize("mean", [0.3, 0.95])
def test_the_grid_brackets_the_published_interval_from_outside(mean: float) -> None:
    values = (np.random.default_rng(5).random(80) < mean).astype(float)
    sequence = ConfidenceSequence(error=0.1)
    for value in values:
        sequence.update(value)
    low, high = exact_bounds(values, 0.1, np.linspace(1e-9, 1.0 - 1e-9, 3001))
    assert sequence.interval.low <= low <= sequence.interval.low + 1.4e-3  # a step of the grid, and one of the means
    assert sequence.interval.high - 1.4e-3 <= high <= sequence.interval.high


def test_both_go_on_after_a_restart_where_they_were() -> None:
    values = np.random.default_rng(3).random(60)
    sequence, detector = ConfidenceSequence(error=0.1), EDetector(TOLERANCE, 1e9, 1e3)
    for number, value in enumerate(values):
        if number == 30:
            restarted = ConfidenceSequence.from_state(json.loads(json.dumps(sequence.state())))
            revived = EDetector(detector.tolerance, detector.threshold, detector.warning_threshold)
            revived.restore(json.loads(json.dumps(detector.state())))
        sequence.update(float(value))
        detector.update(float(value))
        if number >= 30:
            restarted.update(float(value))
            revived.update(float(value))
    assert restarted.interval == sequence.interval
    assert restarted.state() == sequence.state()
    assert revived.e_value == detector.e_value
    assert revived.state() == detector.state()


@pytest.mark.parametrize(
    "changes",
    [
        *({"wealth": [float("nan")] * 4}, {"wealth": [-1.0] * 4}, {"wealth": [1.0] * 3}, {"tolerance": 2.0}),
        *({"wealth": None}, {"threshold": "x"}),
    ],
)
def test_a_detector_does_not_go_on_from_nonsense(changes: dict[str, object]) -> None:
    state = EDetector(TOLERANCE, 10.0, 1.0).state()
    with pytest.raises(CalibrationError, match=r"evidence\.state"):
        EDetector(TOLERANCE, 10.0, 1.0).restore({**state, **changes})
    with pytest.raises(CalibrationError, match=r"evidence\.state"):
        EDetector(TOLERANCE, 10.0, 1.0).restore({})


@pytest.mark.parametrize(
    "changes",
    [
        {"log_capital": [[0.0] * 1001]},
        {"log_capital": [[float("nan")] * 1001] * 2},
        {"mean": {"n": -1, "total": 0.0, "squares": 0.0}},
        {"mean": {"n": 2, "total": 3.0, "squares": 0.0}},
        {"mean": {"n": 2, "total": 1.0, "squares": -1.0}},
        {"interval": {"estimate": 0.5, "low": 0.9, "high": 0.1, "n": 1}},
        {"interval": {"estimate": 0.5}},
        {"error": 0.0},
    ],
)
def test_a_sequence_does_not_go_on_from_nonsense(changes: dict[str, object]) -> None:
    sequence = ConfidenceSequence()
    sequence.update(0.5)
    with pytest.raises(CalibrationError, match=r"evidence\.state"):
        ConfidenceSequence.from_state({**sequence.state(), **changes})


def test_a_mean_that_moved_refutes_the_sequence() -> None:
    sequence = ConfidenceSequence()
    for _ in range(2000):
        sequence.update(1.0)
    assert not sequence.refuted
    for _ in range(200):
        sequence.update(0.0)
    assert sequence.refuted


def test_gains_are_counted_on_a_scale_that_ends_at_12_db() -> None:
    """The worst null: 12 dB or nothing, 3 dB in the mean."""
    rng = np.random.default_rng(3)
    blocks, count = 80_000, 0
    detector = DriftDetector(false_alarms_per_30d=1000.0, tolerance_db=3.0, block_s=3.0)
    assert detector.threshold == 864.0
    for large in rng.random(blocks) < 0.25:
        detector.update(40.0 if large else -1.0)
        if detector.drift_detected:
            count += 1
            detector.reset()
    assert 0 < count <= blocks / 864.0


def test_a_warning_comes_before_the_alarm_and_both_before_long() -> None:
    detector = DriftDetector(block_s=3.0)
    blocks = {"warning": 0, "alarm": 0}
    while not detector.drift_detected:
        blocks["alarm"] += 1
        blocks["warning"] += not detector.warning_detected
        detector.update(6.0)
    assert blocks["warning"] < blocks["alarm"] <= 40  # 120 s
    detector.reset()
    assert (detector.e_value, detector.warning_detected) == (0.0, False)


@pytest.mark.parametrize("settings", [(0.0, 3.0, 3.0), (1.0, 0.0, 3.0), (1.0, 12.0, 3.0), (1.0, 3.0, 0.0)])
def test_a_detector_that_could_not_keep_its_word_is_refused(settings: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"tolerance|positive"):
        DriftDetector(*settings)


def test_numpy_values_leave_no_trace() -> None:
    sequence, detector = ConfidenceSequence(), EDetector(TOLERANCE, 10.0, 1.0)
    for value in (np.float32(0.5), np.float64(0.7)):
        sequence.update(value)
        detector.update(value)
    json.dumps([sequence.state(), detector.state(), detector.drift_detected])
    assert type(detector.e_value) is float
