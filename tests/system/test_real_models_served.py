"""Real models in the daemon, on a user's own video."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from brokers import free_port
from lab import ASL, PERSON, Lab
from runtime_under_test import RUNTIME
from warm_start import TalkingProcess
from worlds import FIRST_COMMIT, run_until

from engines.store.artefact import read_artefact

JOB_S = 400.0  # a search for a plan and a build, beside other tests


@pytest.mark.trial
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("name", "clip", "speed"),
    [("fastestdet", PERSON, 1.0), ("ultraface", ASL.format("book"), 0.1)],
)
def test_the_daemon_serves_a_users_own_model_and_video(
    lab: Lab, tmp_path: Path, name: str, clip: str, speed: float
) -> None:
    config = {
        "model": str(lab.spec(name)),
        "state_dir": "state",
        "backend": RUNTIME,
        "camera": {"source": str(lab.data / clip), "speed": speed},
        "observe": {"alert_period_s": 0.05, "held_out": 16, "budget": None},
        "calibration": {"frames": 16},
        "recalibration": {"nice": 0},
        "probation": {"frames": 1, "seconds": 0.0},
        "mqtt": {"host": "127.0.0.1", "port": free_port()},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    tared = TalkingProcess(["run", "-c", str(tmp_path / "config.yaml"), "--json"])
    summary, _ = run_until(tared, FIRST_COMMIT, JOB_S)
    assert summary["dropped"] == {}
    (swap,) = summary["swaps"]
    assert swap["fidelity"] >= 0.9
    artefact = read_artefact(Path(summary["artefact"]))
    assert artefact.id == swap["artefact"]
    assert artefact.manifest["inputs"]["precision"] == "int8"
    assert artefact.manifest["int8_macs_share"] >= 0.97  # the loudest layers that hardly work stay float
