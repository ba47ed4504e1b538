"""The daemon as a process with a model that no plan suits in one light: one job, one refusal, and why."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import yaml
from raising_world import collapsing_net
from worlds import FIRST_COMMIT, FPS, OUTLASTS_S, SPEC, World, make_world

DIMS_S = 120.0


def unsuited_world(folder: Path, seconds: float) -> World:
    """The layer that INT8 destroys has to be INT8. In dim light its answer is always the same, so nothing is lost."""

    def light(ts: float) -> float:
        return (1.0 if round(ts * FPS) % 4 else 0.1) * (0.5 if ts < DIMS_S else 0.15)

    world = make_world(folder, light, seconds, observe={"period_s": 0.2}, calibration={"method": "max"})
    onnx.save(collapsing_net(), folder / "model.onnx")
    (folder / "model.yaml").write_text(yaml.safe_dump({**SPEC, "precision": {"force_int8": ["*"]}}))
    world.change(recalibration={"max_loss": 0.02, "cooldown_s": 0.0})
    return world


@pytest.mark.trial
def test_as_long_as_the_light_stays_there_is_one_job_and_the_summary_says_why(tmp_path: Path) -> None:
    summary, said = unsuited_world(tmp_path, DIMS_S).run()
    (job,) = summary["jobs"]
    assert (job["trigger"], job["state"]) == ("first-start", "FAILED")
    assert "no plan of 1 was accepted" in summary["degraded"]
    assert said.count("code=recalibration.refused") == 1


@pytest.mark.trial
def test_another_light_is_tried_and_gets_its_engine(tmp_path: Path) -> None:
    summary, _ = unsuited_world(tmp_path, OUTLASTS_S).run(until=FIRST_COMMIT)
    assert [job["state"] for job in summary["jobs"]] == ["FAILED", "COMMITTED"]
    assert summary["swaps"][0]["ts"] > DIMS_S
    assert summary["degraded"] is None
