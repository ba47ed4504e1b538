"""The daemon as a process with a model that no plan suits in one light: one job, one refusal, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml
from daemon_life import LiveCamera
from raising_world import collapsing_net
from worlds import FIRST_COMMIT, FPS, SPEC, World, make_world, run_until, write_clip

BRIGHT, DIM = 0.5, 0.15
SETTINGS: dict[str, Any] = {"calibration": {"method": "max"}, "recalibration": {"max_loss": 0.02, "cooldown_s": 0.0}}


def unsuited(world: World, clip: Path, light: float) -> None:
    """The layer that INT8 destroys has to be INT8. In dim light its answer is always the same, so nothing is lost."""
    onnx.save(collapsing_net(), world.folder / "model.onnx")
    (world.folder / "model.yaml").write_text(yaml.safe_dump({**SPEC, "precision": {"force_int8": ["*"]}}))
    write_clip(clip, lambda ts: (1.0 if round(ts * FPS) % 4 else 0.1) * light, 120 * FPS)


@pytest.mark.trial
def test_as_long_as_the_light_stays_there_is_one_job_and_the_summary_says_why(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: BRIGHT, 1.0, observe={"period_s": 0.2}, **SETTINGS)
    unsuited(world, tmp_path / "clip.avi", BRIGHT)
    summary, said = world.run()
    (job,) = summary["jobs"]
    assert (job["trigger"], job["state"]) == ("first-start", "FAILED")
    assert "no plan of 1 was accepted" in summary["degraded"]
    assert said.count("code=recalibration.refused") == 1


@pytest.mark.trial
def test_another_light_is_tried_and_gets_its_engine(tmp_path: Path) -> None:
    camera = LiveCamera(tmp_path, **SETTINGS)
    for name, light in (("night", BRIGHT), ("day", DIM)):
        unsuited(camera.world, tmp_path / name / "clip.avi", light)

    def follow(line: str) -> None:
        if "code=recalibration.refused" in line:
            camera.show("day")

    summary, _ = run_until(camera.process(), FIRST_COMMIT, follow=follow)
    assert [job["state"] for job in summary["jobs"]] == ["FAILED", "COMMITTED"]
    assert summary["degraded"] is None
