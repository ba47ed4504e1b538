"""The bundled sample end to end, with the config.yaml that `make run` uses: the story must tell itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml
from places import ROOT

NIGHT_ENDS_S, MORNING_SURE_S = 100.0, 140.0  # dawn lies between; see examples/street


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Render the video, run the daemon on it as `make run` does; what `tared run --json` printed."""
    folder = tmp_path_factory.mktemp("sample")
    render = [sys.executable, "-m", "examples.street.render", "-o", str(folder)]
    subprocess.run(render, cwd=ROOT, check=True, capture_output=True, timeout=120)
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["model"] = str(ROOT / config["model"])
    config["state_dir"] = str(folder / "state")
    config["camera"]["source"] = str(folder / Path(config["camera"]["source"]).name)
    config["camera"]["labels"] = str(folder / Path(config["camera"]["labels"]).name)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run = [sys.executable, "-m", "fleet.cli", "run", "--json", "-c", str(folder / "config.yaml")]
    done = subprocess.run(run, cwd=ROOT, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.trial
def test_no_frame_is_lost_and_the_swaps_happen_between_frames(summary: dict[str, Any]) -> None:
    assert summary["frames"] >= 2700
    assert summary["dropped"] == {}
    assert [swap["trigger"] for swap in summary["swaps"]] == ["first-start", "alarm"]


@pytest.mark.trial
def test_the_alarm_rises_by_itself_after_the_light_has_changed(summary: dict[str, Any]) -> None:
    (alarm,) = summary["alarms"]
    assert NIGHT_ENDS_S < alarm["onset_ts"] < MORNING_SURE_S
    assert alarm["onset_ts"] < alarm["ts"] < alarm["onset_ts"] + 120.0
    assert summary["swaps"][0]["ts"] < NIGHT_ENDS_S
    assert summary["swaps"][1]["ts"] > alarm["ts"]


@pytest.mark.trial
def test_stale_scales_collapse_and_recalibration_restores(summary: dict[str, Any]) -> None:
    night, morning = summary["accuracy"]["first light"], summary["accuracy"]["last light"]
    first, second = (swap["artefact"] for swap in summary["swaps"])
    assert night["reference"]["f1"] > 0.8
    assert night[first]["f1"] > night["reference"]["f1"] - 0.02
    assert morning["reference"]["f1"] > 0.8
    assert morning[first]["f1"] < morning["reference"]["f1"] - 0.2
    assert morning[second]["f1"] > morning["reference"]["f1"] - 0.02
    assert summary["swaps"][1]["fidelity"] > summary["swaps"][1]["fidelity_before"] + 0.1
    assert summary["fidelity"]["estimate"] > 0.9


def test_the_committed_detector_has_something_to_bite_on() -> None:
    path = ROOT / "examples" / "street" / "street.onnx"
    model = onnx.load(path)
    operators = [node.op_type for node in model.graph.node]
    groups = [a.i for n in model.graph.node if n.op_type == "Conv" for a in n.attribute if a.name == "group"]
    assert path.stat().st_size <= 1_000_000
    assert operators.count("Conv") >= 12
    assert any(group > 1 for group in groups)
    assert {"Add", "Sigmoid", "Mul"} <= set(operators)
