"""A recording that is too short for a calibration: named before its first frame, with the settings that would do."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import SPEC

from agent.common.schema import validate
from agent.config import Config
from agent.daemon.run import shortage_of_frames


def config_of(**sections: Any) -> Config:
    return validate(Config, {"model": SPEC, "camera": {"source": "clip.avi"}, **sections}, "test")


@pytest.mark.parametrize(("frames", "length_s", "enough"), [(300, 10.0, 29), (40, 400.0, 24)])
def test_the_settings_that_would_do_do(frames: int, length_s: float, enough: int) -> None:
    """Whether the recording is short, or its frames are rare."""
    assert f"set calibration: {{frames: {enough}}}" in shortage_of_frames(config_of(), frames, length_s)
    assert shortage_of_frames(config_of(calibration={"frames": enough}), frames, length_s) == ""


def test_a_recording_too_short_for_any_verdict_needs_a_loop() -> None:
    assert shortage_of_frames(config_of(), 60, 2.0).endswith("; set camera.loop: true")


@pytest.mark.parametrize("sections", [{"start": "engine"}, {"calibration": {"file": "calibration.json"}}])
def test_a_calibration_that_is_there_needs_no_frames(sections: dict[str, Any]) -> None:
    assert shortage_of_frames(config_of(**sections), 300, 10.0) == ""
