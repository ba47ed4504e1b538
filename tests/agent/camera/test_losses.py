"""Frames that a stream lost, distinguished from rates that vary, clocks that jump and cameras kept waiting."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agent.camera.stream_health import FrameLossCounter

PERIOD_S = 0.04


def counting(silence_s: float = 10.0) -> tuple[Counter[str], FrameLossCounter]:
    dropped: Counter[str] = Counter()
    losses = FrameLossCounter(dropped)
    losses.start_stream(silence_s)
    return dropped, losses


def counted(stamps: list[float], kept_s: float = 0.0) -> Counter[str]:
    dropped, losses = counting()
    for stamp_s in stamps:
        losses.frame_arrived(stamp_s, kept_s)
    return +dropped


def times(numbers: list[int]) -> list[float]:
    return [number * PERIOD_S for number in numbers]


@given(st.sets(st.integers(40, 390), max_size=30), st.floats(-0.05, 0.05), st.floats(0.0, 1e9))
def test_frames_missing_from_a_steady_stream_are_counted(lost: set[int], jitter: float, since_s: float) -> None:
    """The clock may begin anywhere; there are up to four gaps in a row."""
    for number in range(40, 390, 8):  # no more gaps in a row than that
        lost -= {number, number + 1}
    stamps = [since_s + (number + jitter * (number % 2)) * PERIOD_S for number in range(401) if number not in lost]
    assert counted(stamps) == (Counter(decode=len(lost)) if lost else Counter())


def test_a_rate_that_changes_is_no_loss() -> None:
    halved = [*range(100), *range(100, 300, 2)]
    assert counted(times(halved)) == {}
    assert counted(times(halved + list(range(300, 400)))) == {}


def test_a_rate_that_varies_proves_no_loss() -> None:
    numbers = [0]
    for step in [1, 2, 3, 1, 3] * 50:
        numbers.append(numbers[-1] + step)
    assert counted(times(numbers)).total() <= 6  # until enough of it was seen


def test_a_clock_that_is_set_is_no_loss() -> None:
    assert counted(times([*range(100), *range(10**6, 10**6 + 100), *range(100)])) == {}
    assert counted(times([*range(50), 52, *range(10**6, 10**6 + 100)])) == {}, "the gap before may be the clock's, too"


def test_streams_without_times_have_none() -> None:
    assert counted([0.0] * 100) == {}
    assert counted([float("nan"), -3.7e17, float("nan")] * 30) == {}


def test_frames_that_a_slow_reader_missed_are_not_counted() -> None:
    """It may have been too slow from the beginning, or only for a while."""
    assert counted(times(list(range(0, 300, 3))), kept_s=0.1) == {}
    dropped, losses = counting()
    for number in [*range(40), *range(42, 90, 3), *range(90, 120)]:
        losses.frame_arrived(number * PERIOD_S, kept_s=0.1 if 42 <= number <= 90 else 0.0)
    assert not dropped


def test_damaged_frames_do_not_count_as_missing_besides() -> None:
    dropped, losses = counting()
    for number in [*range(20), *range(23, 40)]:  # of the three between two could be read, and were none
        losses.frame_arrived(number * PERIOD_S, damaged=2 if number == 23 else 0)
    assert dropped == {"decode": 3}


def test_a_gap_as_long_as_silence_is_no_loss_of_frames() -> None:
    dropped, losses = counting(silence_s=1.5)
    for number in [*range(50), *range(100, 150)]:
        losses.frame_arrived(number * PERIOD_S)
    assert not dropped
