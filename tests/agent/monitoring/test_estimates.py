"""Means and their intervals: since a start, by the second, and over the last hour."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.monitoring.estimates import FidelityRecord, LastHour, SinceStart, SinceStartBySecond, mean_interval
from calibrate.errors import CalibrationError
from calibrate.statistics.evidence import ConfidenceSequence


def test_a_mean_since_a_start_is_that_of_a_confidence_sequence() -> None:
    mean, sequence = SinceStart(), ConfidenceSequence()
    mean.start(7.0)
    for number, value in enumerate(np.random.default_rng(0).random(50)):
        mean.add(float(number), float(value))
        sequence.update(float(value))
    mean.add(50.0, None)
    estimate = mean.estimate
    assert (estimate.interval, estimate.empty, estimate.since) == (sequence.interval, 1, 7.0)


@pytest.mark.parametrize("kind", [SinceStart, SinceStartBySecond])
def test_a_mean_that_has_moved_starts_anew(kind: type[SinceStart]) -> None:
    mean = kind()
    for ts in range(400):
        mean.add(float(ts), 1.0 if ts < 200 else 0.0)
    estimate = mean.estimate
    assert 200.0 < estimate.since < 300.0
    assert estimate.interval.estimate == 0.0
    assert estimate.interval.high < 0.2


# ---- by the second


def test_frames_of_one_second_are_one_value_and_are_all_counted() -> None:
    mean, sequence = SinceStartBySecond(), ConfidenceSequence()
    values = np.random.default_rng(1).random((20, 10))
    for second, row in enumerate(values):
        for place, value in enumerate(row):
            mean.add(second + place / 10, float(value))
        if second < 19:
            sequence.update(float(row.mean()))
    interval = mean.estimate.interval
    assert interval.n == 200
    assert interval.estimate == pytest.approx(values.mean())
    assert (interval.low, interval.high) == (sequence.interval.low, sequence.interval.high)


def test_the_first_frame_counts_at_once() -> None:
    mean = SinceStartBySecond()
    assert (mean.estimate.interval.n, mean.estimate.interval.low, mean.estimate.interval.high) == (0, 0.0, 1.0)
    mean.add(3.0, 0.25)
    interval = mean.estimate.interval
    assert (interval.estimate, interval.low, interval.high, interval.n) == (0.25, 0.0, 1.0, 1)


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.one_of(st.none(), st.floats(0.0, 1.0))), max_size=60))
def test_frames_in_any_order_leave_a_sound_interval(frames: list[tuple[float, float | None]]) -> None:
    mean, hour = SinceStartBySecond(), LastHour()
    for ts, value in frames:
        mean.add(ts, value)
        hour.add(ts, value)
        for estimate in (mean.estimate, hour.estimate):
            interval = estimate.interval
            assert 0.0 <= interval.low <= interval.high <= 1.0
            assert interval.n == 0 or interval.low <= interval.estimate <= interval.high


# ---- the hour


def test_values_older_than_an_hour_leave() -> None:
    hour = LastHour()
    for second in range(7200):
        hour.add(1000.0 + second, float(second >= 3600))
    estimate = hour.estimate
    assert estimate.interval.estimate == 1.0
    assert 3590 <= estimate.interval.n <= 3600
    assert len(hour._slices) <= 361, "at any frame rate"
    assert estimate.since == pytest.approx(1000.0 + 7200.0 - estimate.interval.n)
    hour.add(1000.0 + 7200.0 + 3600.0, None)
    assert (hour.estimate.interval.n, hour.estimate.empty) == (0, 1)


def test_a_clock_that_is_set_back_loses_nothing_and_old_values_still_leave() -> None:
    hour = LastHour()
    for ts in range(1000):
        hour.add(1e9 + ts, 0.0)
    for ts in range(3580):
        hour.add(float(ts), 1.0)
    assert hour.estimate.interval.n == pytest.approx(3600, abs=10)
    for ts in range(3580, 3700):
        hour.add(float(ts), 1.0)
    assert hour.estimate.interval.estimate == 1.0


def test_the_record_keeps_the_hour_when_the_swap_starts_anew() -> None:
    record = FidelityRecord()
    for ts in range(10):
        record.add(float(ts), 0.0)
    record.start(10.0)
    for ts in range(10, 20):
        record.add(float(ts), None if ts % 2 == 0 else 1.0)
    assert (record.since_start.estimate.interval.n, record.since_start.estimate.interval.estimate) == (5, 1.0)
    assert (record.since_start.estimate.empty, record.since_start.estimate.since) == (5, 10.0)
    assert (record.hour.estimate.interval.n, record.hour.estimate.empty) == (15, 5)
    assert record.hour.estimate.interval.estimate == pytest.approx(1 / 3)
    assert record.newest() == [(float(ts), float(ts >= 10)) for ts in [*range(10), 11, 13, 15, 17, 19]]


# ---- going on in another process

KINDS = [SinceStart, SinceStartBySecond, LastHour, FidelityRecord]


def fed(kind: type, frames: range) -> Any:
    """Three frames a second, of which some are empty, whose mean moves in the middle."""
    made = kind()
    feed(made, frames)
    return made


def feed(mean: Any, frames: range) -> None:
    rng = np.random.default_rng(frames.start)
    for number in frames:
        value = float(rng.random() < (0.9 if number < 500 else 0.1))
        mean.add(1e9 + number / 3, None if number % 7 == 0 else value)


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restarts", [(0,), (1, 2, 300), (700,)])
def test_another_process_goes_on_as_if_it_were_one(kind: type, restarts: tuple[int, ...]) -> None:
    """Frames of one second lie on both sides of a restart, and a mean that has moved starts anew after it."""
    whole, first = kind(), 0
    parts = kind()
    for restart in (*restarts, 900):
        feed(whole, range(first, restart))
        feed(parts, range(first, restart))
        kept, parts, first = through_json(parts.state()), kind(), restart
        parts.restore(kept)
        assert parts.state() == whole.state()
    if kind is FidelityRecord:
        assert (parts.since_start.estimate, parts.hour.estimate) == (whole.since_start.estimate, whole.hour.estimate)
    else:
        assert parts.estimate == whole.estimate


def changed(state: Any) -> list[Any]:
    """The state without one value or another, or with one that no frames lead to."""
    made: list[Any] = [{}, None, [], "state"]
    for key, value in state.items():
        nested = isinstance(value, dict) and key != "sequence"  # whose own tests are in test_evidence
        made += [{**state, key: each} for each in (changed(value) if nested else ["x", math.nan, [[1.0]]])]
        made.append({each: kept for each, kept in state.items() if each != key})
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_goes_on_from_nonsense(kind: type) -> None:
    mean = fed(kind, range(40))
    before = mean.state()
    for state in changed(through_json(before)):
        with pytest.raises((CalibrationError, KeyError, TypeError, ValueError)):
            mean.restore(state)
        assert mean.state() == before


@pytest.mark.parametrize("row", [[0.0], [0.0, 0.0, 1, 2.0, 0], [0.0, 0.0, -1, 0.0, 0], [0.0, 0.0, 1, 10**400, 0]])
def test_an_hour_of_nonsense_is_refused(row: list[float]) -> None:
    with pytest.raises(ValueError, match=r"in place of|lead|unpack"):
        LastHour().restore({"now": 1.0, "ts": 1.0, "slices": [row]})


# ---- its interval


def test_the_interval_is_the_published_one() -> None:
    """Hoeffding's bound for a mean that is 1 is m^n, and for 1/2 it is (4 m (1 - m))^(n / 2)."""
    interval = mean_interval(40.0, 40)
    assert (interval.low, interval.high) == pytest.approx(((0.05 / 2) ** (1 / 40), 1.0))
    half = mean_interval(20.0, 40)
    assert half.high == pytest.approx(0.5 + math.sqrt(1.0 - (0.05 / 2) ** (2 / 40)) / 2)
    assert half.low == pytest.approx(1.0 - half.high)
    assert mean_interval(0.0, 0).n == 0


def test_the_history_is_of_the_newest_frames() -> None:
    record = FidelityRecord()
    for ts in range(10_003):
        record.add(float(ts), 0.5)
    assert (len(record.newest()), record.newest()[0], record.newest()[-1]) == (10_000, (3.0, 0.5), (10_002.0, 0.5))
