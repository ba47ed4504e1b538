"""A rollout in four waves at many boards, with every process its own: a good one, and one whose third wave is bad."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fleet_rollout import bars, rollouts

# In waves so small one board that fails is a share, and fidelity after four seconds is chance; that a bad engine takes
# 1.4 times as long is not.
GATES = "fidelity>=0.2,latency_p99<=1.25x,failures<=5%"


@pytest.mark.trial
@pytest.mark.broker
@pytest.mark.timeout(900)
def test_a_bad_wave_among_many_boards_stops_the_rollout(tmp_path: Path) -> None:
    courses = rollouts(200, 3.0, str(tmp_path / "fleet.sqlite"), tmp_path, job_s=3.0, failures=0.0, gates=GATES)
    lost = [bar for bar in bars(courses, 200) if not bar.passed]
    assert lost == []
