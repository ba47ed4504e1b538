"""A thousand simulated boards at a broker that is killed: all are back, one after the other, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fleet_storm import histogram, storm


def test_the_histogram_separates_dials_from_arrivals() -> None:
    assert histogram([0.1, 0.9, 2.0, 5.0], [0.5, 2.2, 2.9]) == [
        ("0", "2", "1", "#" * 30),
        ("1", "0", "0", ""),
        ("2", "1", "2", "#" * 60),
    ]
    assert histogram([0.1], []) == []


@pytest.mark.trial
@pytest.mark.broker
@pytest.mark.timeout(900)
def test_a_thousand_boards_come_back_to_a_broker_that_was_killed(tmp_path: Path) -> None:
    course, made, missing = storm(1000, 10.0, 8.0, tmp_path, steady_s=15.0)
    assert course.connected == 1000
    assert course.back_s is not None
    assert made > 1000
    assert missing == 0
    for times in (course.dials, course.arrivals):
        seconds = Counter(int(at_s) for at_s in times)
        assert max(seconds.values()) < 500, seconds  # at once they would be a thousand; on a quiet machine 150 are
