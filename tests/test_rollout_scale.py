"""A rollout in four waves at many boards, with every process its own: a good one, and one whose third wave is bad."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fleet_rollout import bars, rollouts


@pytest.mark.trial
@pytest.mark.broker
@pytest.mark.timeout(900)
def test_a_bad_wave_among_many_boards_is_stopped_and_no_board_beyond_it_is_told(tmp_path: Path) -> None:
    courses = rollouts(200, 3.0, str(tmp_path / "fleet.sqlite"), tmp_path, job_s=3.0)
    lost = [bar for bar in bars(courses, 200) if not bar.passed]
    assert lost == []
