"""State directories of commit c148992, when all of a board's modules lay in one folder, are read as they are.

`state_of_c148992.json` holds the files as that commit's own classes wrote them: text as it is, databases as SQL, an
artefact's files in base64. A file format that changes needs a migration, and this test, not a new file here.
"""

from __future__ import annotations

import base64
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from device import NOW, Device, payload
from outbox_bench import numbers, opened, taken

from agent.commands.authority import Releases
from agent.commands.dispatcher import CommandDispatcher
from agent.commands.log import CommandLog
from agent.commands.settings import Settings
from agent.config import Config
from agent.contract.commands import CommandResult
from agent.jobs.job import JobJournal, JobState
from agent.jobs.limits import AutomationLimits, PrecisionAttempts
from agent.monitoring.drift import Regime
from agent.monitoring.estimates import FidelityRecord
from agent.monitoring.evidence_file import EvidenceFile, RecalledEvidence
from agent.monitoring.regimes import RegimeStore
from agent.vision.spec import ModelSpec
from engines.calibration import load_calibration
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.store.artefact import Store

WRITTEN_AT = 1795391115.0  # Unix time of the files


def refuse(error: Exception) -> None:
    raise error


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory, a minute after it was written."""
    document = json.loads(Path(__file__).with_name("state_of_c148992.json").read_text(encoding="utf-8"))
    state_dir = tmp_path / "state"
    artefact = state_dir / "artefacts" / document["artefact"]["id"]
    artefact.mkdir(parents=True)
    for name, content in document["artefact"]["files"].items():
        (artefact / name).write_bytes(base64.b64decode(content))
    (state_dir / "current").symlink_to(artefact.relative_to(state_dir))
    for name, text in document["files"].items():
        (state_dir / name).write_text(text, encoding="utf-8")
    for name, database in document["databases"].items():
        with closing(sqlite3.connect(state_dir / name)) as connection:
            connection.executescript("\n".join(database["sql"]))
            connection.execute(f"PRAGMA user_version = {int(database['user_version'])}")
            connection.commit()
    ahead_s = WRITTEN_AT + 60.0 - time.time()
    unix_s = time.time
    monkeypatch.setattr(time, "time", lambda: unix_s() + ahead_s)
    return state_dir


def test_the_engine_serves(state_dir: Path) -> None:
    artefact = Store(state_dir).read("current")
    assert artefact is not None
    assert artefact.id == "982d0fa2a29e54a2"
    calibration = load_calibration(artefact.path / "calibration.json")
    assert calibration.histograms.keys() == {"image", "t1", "t4"}
    with closing(OnnxRuntimeBackend().load(artefact.read_engine())) as engine:
        assert [spec.name for spec in engine.inputs] == ["image"]


def test_regimes_attempts_and_limits_hold(state_dir: Path) -> None:
    scene = {"x": 0.5, "y": 2.0**-9}, {"x": 3.0, "y": 0.1}, {"x": (0.25, 0.125), "y": (1e-5, 1e-6)}
    assert RegimeStore(state_dir / "regimes.json", "one model", 5).known == (
        Regime("day", *scene),
        Regime("night", *scene),
    )
    attempts = PrecisionAttempts(state_dir / "attempts.json", "the rules", refuse)
    assert (attempts.next_rung("day"), attempts.next_rung("night")) == (2, 0)
    limits = AutomationLimits(state_dir / "restraint.json", 3, 3600.0, 3600.0, 2, refuse)
    assert not limits.may_start
    assert not limits.may_switch
    assert [limits.count_job(), limits.count_job()] == [True, False], "two of three jobs were counted before"


def test_settings_and_releases_hold(state_dir: Path) -> None:
    config = Config(
        model=ModelSpec(path=state_dir / "model.onnx", task="raw"),
        camera={"source": "v4l2:/dev/video0"},
        state_dir=state_dir,
    )
    settings = Settings(config, state_dir / "settings.json", lambda _: True, lambda _: None, refuse)
    assert settings.version == 3
    assert (settings.config.recalibration.max_loss, settings.config.log_level) == (0.25, "debug")
    assert Releases(None, state_dir / "releases.json")._versions == {"a key": 5}


def test_drift_and_means_go_on(state_dir: Path) -> None:
    record = FidelityRecord()
    evidence = EvidenceFile(state_dir / "evidence.jsonl", "rtsp://camera", refuse)
    assert evidence.start("day", 0.0, True, record) == RecalledEvidence({"e": 1}, 0.0)
    since_start = record.since_start.estimate
    assert (since_start.interval.n, since_start.empty) == (2, 1)


def test_a_command_that_was_carried_out_is_not_carried_out_again(state_dir: Path) -> None:
    results: list[CommandResult] = []
    device = Device()
    log = CommandLog(state_dir / "commands.sqlite", refuse)
    dispatcher = CommandDispatcher(device.handlers(), results.append, command_log=log)
    dispatcher.restore([])
    dispatcher.receive(payload(op="cancel"), NOW)
    assert {result.status for result in results} == {"SUCCEEDED"}
    assert not device.done_with


def test_jobs_and_rows_are_there(state_dir: Path) -> None:
    records: list[Any] = JobJournal(state_dir / "jobs.sqlite", refuse).records()
    assert [record.state for record in records] == [JobState.COMMITTED, JobState.COMMITTED]
    with opened(state_dir) as outbox:
        assert numbers(taken(outbox, 3)) == [1, 2, 3]
        assert outbox.last[0] > WRITTEN_AT - 1.0, "the next epoch is above the last one's"
