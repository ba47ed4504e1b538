"""The daemon as a process on a recording that is too short for a calibration: played once, and in a loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import FIRST_COMMIT, World, make_world

from engines.store.artefact import Store

pytestmark = pytest.mark.slow
SECONDS = 16.0


@pytest.fixture
def short(tmp_path: Path) -> World:
    """A recording with a third of the frames that a calibration takes here; eight seconds long at its speed."""
    return make_world(
        tmp_path, lambda _: 0.5, SECONDS, camera={"speed": 2}, calibration={"frames": 512, "within_s": 300.0}
    )


def test_a_recording_that_ends_while_a_job_collects_leaves_an_engine(short: World) -> None:
    summary, said = short.run()
    assert "a calibration needs 512 frames over 300 s, this recording has 16 s" in said
    assert said.index("a calibration needs 512 frames") < said.index("step=COLLECTING")
    assert "the recording has ended: the job continues with" in said
    assert summary["jobs"] == [{"trigger": "first-start", "state": "COMMITTED", "reason": ""}]
    assert summary["degraded"] is None
    current = Store(short.state_dir).read("current")
    assert current is not None
    assert summary["artefact"] == str(current.path)


@pytest.mark.trial
def test_a_recording_in_a_loop_is_served_by_what_its_plays_have_calibrated(short: World) -> None:
    short.change(camera={"loop": True, "speed": 10}, calibration={"frames": 48, "within_s": 2.0})
    summary, said = short.run(until=FIRST_COMMIT)
    assert "a calibration needs" not in said
    (swap,) = summary["swaps"]
    assert swap["ts"] > SECONDS
    assert summary["degraded"] is None
