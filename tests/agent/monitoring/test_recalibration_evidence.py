"""Gains count as evidence for a recalibration on frames that come after those it would be made of."""

from __future__ import annotations

import numpy as np
import pytest

from agent.monitoring.drift import RecalibrationEvidence, RecentScales
from calibrate.statistics.evidence import DriftDetector

TOLERANCE_DB = 3.0


def evidence() -> RecalibrationEvidence[float, float]:
    """Frames are levels here; they add up, and their scales do not matter."""
    return RecalibrationEvidence(
        DriftDetector(1.0, TOLERANCE_DB, 3.0), TOLERANCE_DB, lambda a, b: a + b, lambda seen: seen
    )


def feed(
    judge: RecalibrationEvidence[float, float], blocks: int, own_db: float, gain_db: float, frames: int = 1
) -> int:
    """Blocks of one second; how many of them counted."""
    counted = 0
    for _ in range(blocks):
        known = judge.recent.scales is not None
        judge.update(1.0, frames, 1.0, own_db, gain_db if known else None)
        counted += known
    return counted


def test_the_newest_frames_are_those_before_and_never_more_than_two_dozen() -> None:
    recent: RecentScales[list[int], list[int]] = RecentScales(lambda a, b: a + b, list)
    known: list[list[int] | None] = []
    for number in range(40):
        known.append(recent.scales)
        recent.add([number], 1)
    assert known[:8] == [None] * 8
    assert known[8] == list(range(8))
    assert known[16] == list(range(16))
    assert known[23] == list(range(16))  # until eight newer ones are together
    assert known[24] == list(range(16, 24))
    assert all(number - seen[0] <= 24 for number, seen in enumerate(known) if seen is not None)


def test_nothing_counts_until_there_is_something_to_compare_with() -> None:
    judge = evidence()
    assert feed(judge, 8, 12.0, 12.0) == 0
    assert judge.detector.e_value == 0.0
    assert feed(judge, 1, 12.0, 12.0) == 1
    assert judge.detector.e_value > 0.0


def test_blocks_of_several_frames_are_soon_enough() -> None:
    assert feed(evidence(), 6, 0.0, 0.0, frames=4) == 4


def test_gains_over_own_scales_are_no_evidence() -> None:
    """Every block would gain 5 dB under scales of its own, and 2 under those of its neighbours."""
    judge = evidence()
    feed(judge, 20_000, 5.0, 2.0)
    assert not judge.warns
    assert judge.detector.e_value < 10.0


def test_when_the_scene_changes_what_was_seen_before_is_dropped() -> None:
    judge = evidence()
    feed(judge, 20, 0.0, 0.0)
    feed(judge, 1, 6.0, 0.0)
    recent = [judge.recent.scales]  # one block alone may be a passing car
    feed(judge, 1, 6.0, 0.0)
    recent.append(judge.recent.scales)
    assert [scales is None for scales in recent] == [False, True]
    assert judge.recent.merged == 1.0
    assert feed(judge, 20, 6.0, 6.0) == 13


def test_newest_frames_that_know_the_scene_are_kept() -> None:
    judge = evidence()
    feed(judge, 20, 0.0, 0.0)
    assert feed(judge, 30, 6.0, 5.0) == 30


def test_a_suspicion_is_looked_at_closely_for_a_minute_and_then_more_and_more_rarely() -> None:
    judge = evidence()
    looks = []
    for _ in range(4000):
        feed(judge, 1, 4.0, 2.0)
        looks.append(judge.wants_more_frames)
    began = [second for second, (before, now) in enumerate(zip([False, *looks], looks, strict=False)) if now > before]
    assert np.diff(began).tolist() == pytest.approx([120, 240, 480, 960, 1920], abs=3)
    assert sum(looks) == pytest.approx(60 * len(began), abs=5)


def test_a_suspicion_gets_frames_again_after_a_calm_while() -> None:
    judge = evidence()
    for _ in range(3):
        feed(judge, 10, 4.0, 2.0)
        assert judge.wants_more_frames
        feed(judge, 700, 0.0, 0.0)
        assert not judge.wants_more_frames


def test_a_warning_that_lasts_does_not_use_up_the_credit() -> None:
    judge = evidence()
    feed(judge, 20, 3.2, 3.2)
    while not judge.warns:
        feed(judge, 1, 3.4, 3.4)
    closely = []
    for _ in range(2000):
        feed(judge, 1, 3.0, 3.0)
        closely.append(judge.wants_more_frames)
    assert judge.warns
    assert not judge.detector.drift_detected
    assert all(closely[:500])
    assert np.mean(closely[700:]) < 0.15


def test_a_warning_ends_well_below_where_it_began() -> None:
    rng, judge, changes, before = np.random.default_rng(0), evidence(), 0, False
    feed(judge, 20, 0.0, 0.0)
    for gain_db in rng.normal(2.95, 0.6, 20_000).tolist():
        feed(judge, 1, gain_db, gain_db)
        changes += judge.warns != before
        before = judge.warns
        if judge.detector.drift_detected:
            judge.detector.reset()
    assert 0 < changes < 60


def test_time_without_observations_is_no_rest() -> None:
    judge = evidence()
    feed(judge, 10, 4.0, 2.0)
    judge.update(1.0, 1, 1e6, 4.0, 2.0)
    assert judge.wants_more_frames
