"""How long a job waits for frames: as long as any come."""

from __future__ import annotations

import pytest
from raising_world import config_of, observer_state

from agent.common.errors import AgentError
from agent.jobs import recalibration as collecting
from agent.jobs.recalibration import CollectionWait

STATE = observer_state(config_of())


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(collecting, "time", clock)
    return clock


def test_a_slow_camera_has_its_time(clock: Clock) -> None:
    job = CollectionWait(512, 600.0)
    for collected in range(512):
        clock.now_s += 2.0
        assert not job.has_enough(collected, 4)
    assert clock.now_s > 600.0
    assert job.has_enough(512, 4)


def test_frames_that_stop_coming_are_told(clock: Clock) -> None:
    job = CollectionWait(512, 600.0)
    assert not job.has_enough(100, 4)
    clock.now_s += 601.0
    with pytest.raises(
        AgentError, match=r"recalibration\.timeout: COLLECTING: 100 of 512 frames, and no more for 600 s"
    ):
        job.has_enough(100, 4)


def test_frames_on_which_nothing_is_seen_are_told(clock: Clock) -> None:
    """More and more of them do not put it off."""
    job = CollectionWait(512, 600.0)
    assert not job.has_enough(512, 1)
    clock.now_s += 601.0
    with pytest.raises(
        AgentError, match=r"recalibration\.timeout: COLLECTING: only 1 of the frames that judge show something"
    ):
        job.has_enough(900, 1)
