"""How long a job waits for frames: as long as any come."""

from __future__ import annotations

import pytest
from agent.jobs.recalibration import CollectionWait
from turned_clock import TurnedClock

from agent.common.errors import AgentError


def test_a_slow_camera_has_its_time() -> None:
    clock = TurnedClock()
    wait = CollectionWait(512, 600.0, clock)
    for collected in range(512):
        clock.turn(2.0)
        assert not wait.has_enough(collected, 4)
    assert wait.has_enough(512, 4)


@pytest.mark.parametrize(
    ("collected", "informative", "later", "found"),
    [
        (100, 4, 100, "100 of 512 frames, and no more for 600 s"),
        (512, 1, 900, "only 1 of the frames that judge show something"),
    ],
)
def test_a_job_without_further_frames_that_count_fails(
    collected: int, informative: int, later: int, found: str
) -> None:
    clock = TurnedClock()
    wait = CollectionWait(512, 600.0, clock)
    assert not wait.has_enough(collected, informative)
    clock.turn(601.0)
    with pytest.raises(AgentError, match=rf"recalibration\.timeout: COLLECTING: {found}"):
        wait.has_enough(later, informative)
