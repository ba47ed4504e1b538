"""The daemon when something around it is wrong: as a process, with real files."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import yaml
from bench import classifier
from brokers import eventually
from warm_start import tared
from worlds import OUTLASTS_S, SPEC, World, make_world


def steady(folder: Path, seconds: float = OUTLASTS_S, **changes: object) -> World:
    return make_world(folder, lambda _: 0.5, seconds, **changes)


def test_a_second_daemon_on_the_same_state_is_refused(tmp_path: Path) -> None:
    world = steady(tmp_path)
    with world.running():
        eventually(lambda: (world.state_dir / "outbox.sqlite").exists(), 20.0)
        second = tared(*world.arguments())
    assert second.returncode == 2
    assert json.loads(second.stdout)["error"]["code"] == "state.locked"
    assert "Traceback" not in second.stderr
    summary, _ = world.run("--frames", "10")  # the lock went with its process
    assert summary["frames"] == 10


def test_other_preprocessing_does_not_serve_with_the_old_scales(calibrated_world: World) -> None:
    before = (calibrated_world.state_dir / "current").resolve()
    changed = {**SPEC, "input": {"color": "rgb", "resize": "stretch", "scale": 1 / 255}}
    (calibrated_world.folder / "model.yaml").write_text(yaml.safe_dump(changed))
    again, errors = calibrated_world.run("--frames", "20")
    assert "calibration.input" in errors
    assert again["artefact"] != str(before)


@pytest.mark.parametrize(("tls", "warned"), [(None, 1), ({}, 0)])
def test_a_password_that_crosses_the_network_as_it_is_is_warned_of(
    tmp_path: Path, tls: dict[str, str] | None, warned: int
) -> None:
    (tmp_path / "password").write_text("hush-hush\n")
    broker = {"host": "broker.invalid", "username": "me", "password_file": "password", "tls": tls}
    _, errors = steady(tmp_path, 4.0, mqtt=broker).run("--frames", "5")
    assert errors.count("warning: the broker's password") == warned
    assert "hush-hush" not in errors


def test_activations_that_are_no_numbers_cost_the_job_and_not_the_video(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda ts: 0.02 if ts > 2.0 else 0.5, OUTLASTS_S)
    onnx.save(classifier(lambda net: net.node("Log", "image")), tmp_path / "model.onnx")
    summary, errors = world.run(until="code=calibration.nonfinite")
    assert summary["dropped"] == {}
    assert summary["swaps"] == []
    assert "code=observer.nonfinite camera=camera message=\"NaN or infinite values in ['t0']\"" in errors
