"""A state directory of tared 0.2.0 is taken over, whenever the takeover is killed.

`state_of_0_2_0.json` was made at commit 2fc6093f. Each class of that commit wrote its own file, on the helpers of its
tests. The JSON has texts as they were, databases as SQL, and binary files in base64. If a format changes, the new
version needs a migration, and the JSON stays.
"""

from __future__ import annotations

import base64
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from authority_bench import Board
from device import NOW, Device, payload
from drift_bench import regime
from kept import kept_in, open_until
from outbox_bench import numbers, opened, taken
from raising_world import config_in
from turned_clock import TurnedClock
from unexpected import unexpected

from agent.collection.collection import SharedCollection
from agent.commands.authority import Releases
from agent.commands.dispatcher import CommandDispatcher
from agent.commands.log import CommandLog
from agent.commands.settings import Settings
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult
from agent.control.policies import Policies
from agent.core.state import JobState, State
from agent.jobs.job import JobJournal
from agent.jobs.kept_memory import KeptMemory
from agent.labelling.store import LabelStore
from agent.monitoring.audit import AuditEvidence
from agent.monitoring.camera_monitor import CameraMonitor, Spending
from agent.monitoring.drift import Regime
from agent.monitoring.evidence_file import EvidenceFile
from agent.monitoring.gains import GainRecord
from agent.monitoring.regimes import RegimeStore
from agent.state.schema import TABLES
from agent.state.store import StateStore
from calibrate.plan import PrecisionPlan
from engines.calibration import load_calibration
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.store.artefact import Store

WRITTEN_S = 1_749_999_940.0  # Unix time, a minute before that of a TurnedClock


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    content = json.loads(Path(__file__).with_name("state_of_0_2_0.json").read_text(encoding="utf-8"))
    folder = tmp_path / "state"
    files = {name: text.encode() for name, text in content["texts"].items()}
    files |= {name: base64.b64decode(text) for name, text in content["binaries"].items()}
    for name in (*files, *content["databases"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    for name, statements in content["databases"].items():
        with closing(sqlite3.connect(folder / name)) as db:
            db.executescript("\n".join(statements))
    for name, target in content["links"].items():
        (folder / name).symlink_to(target)
    return folder


def test_the_engine_serves_with_its_calibration_and_plan(state_dir: Path) -> None:
    artefact = Store(state_dir).read("current")
    assert artefact is not None
    assert artefact.id == "31c2fbc0dd52626e"
    assert artefact.manifest["inputs"]["calibration"]["method"] == "max"
    assert load_calibration(artefact.path / "calibration.json").scales.keys() == {"image", "t0", "t1", "t5"}
    assert PrecisionPlan.from_json(artefact.read_file("plan.json").decode()).floats == {"Conv_t3": "raised"}
    with closing(OnnxRuntimeBackend().load(artefact.read_engine())) as engine:
        assert [spec.name for spec in engine.inputs] == ["image"]


def test_regimes_attempts_and_limits_hold(state_dir: Path) -> None:
    state = kept_in(state_dir)
    scene = {"x": 0.5, "y": 2.0**-9}, {"x": 3.0, "y": 0.1}, {"x": (0.25, 0.125), "y": (1e-5, 1e-6)}
    known = RegimeStore(state, "one model", 5).known
    assert known == (Regime("day", *scene), Regime("night", *scene))
    clock = TurnedClock()
    memory, now_s = KeptMemory(state, clock).read("the rules"), clock.monotonic_s()
    assert (memory.next_rung("day"), memory.next_rung("night")) == (2, 0)
    restraint = memory.restraint
    assert (len(restraint.starts_s), len(restraint.rollbacks_s)) == (2, 1)
    assert restraint.is_below_cap(now_s, 3)
    assert not restraint.is_below_cap(now_s, 2)
    assert 0.0 < now_s - restraint.failed_s < 600.0
    assert 600.0 < now_s - restraint.switched_s + 600.0 < 1200.0 + 600.0


def test_settings_policies_and_releases_hold(state_dir: Path) -> None:
    config, state = config_in(state_dir.parent), kept_in(state_dir)
    settings = Settings(config, state, "ann".__eq__, lambda _: None)
    assert settings.version == 3
    assert (settings.config.recalibration.max_loss, settings.config.log_level) == (0.25, "debug")
    assert Policies(config, state).document("day") == {"score_threshold": 0.5, "classes": ["b"]}
    releases = Releases(Board(state_dir.parent).authority, state)
    assert (releases.damage, releases._versions) == (None, {"a key": 5})


def test_drift_and_fidelity_go_on(state_dir: Path) -> None:
    """The camera saw 40 s in the light of the calibration, then 29 s in a sixteenth of it; 4 answers were wrong."""
    config = config_in(state_dir.parent)
    monitor = CameraMonitor(config.model, config, SharedCollection(config.model, config))
    monitor.remember(EvidenceFile(state_dir / "evidence.jsonl", "rtsp://camera", unexpected))
    monitor.watch(regime(), [], 100.0, recall=True)
    state = monitor.state("", Spending(0.0, 0.0))
    assert state.drift is not None
    assert (state.drift.state, state.drift.onset_ts) == ("warning", 39.0)
    assert (state.fidelity.n, state.fidelity_since) == (69, 0.0)
    assert state.fidelity.estimate == pytest.approx(65 / 69)


def test_commands_that_were_carried_out_are_answered_and_not_carried_out_again(state_dir: Path) -> None:
    results: list[CommandResult] = []
    device = Device()
    log = CommandLog(kept_in(state_dir))
    dispatcher = CommandDispatcher(device.handlers(), results.append, command_log=log)
    dispatcher.restore([])
    dispatcher.receive(payload(op="cancel"), NOW)
    dispatcher.receive(payload(id="c2", op="restart"), NOW)
    assert {(result.id, result.status) for result in results} == {("c1", "SUCCEEDED"), ("c2", "SUCCEEDED")}
    assert not device.done_with
    dispatcher.receive(payload(id="c3", op="restart"), NOW)
    assert CommandLog(kept_in(state_dir)).find("c3") is not None


def test_jobs_messages_and_labels_are_kept(state_dir: Path) -> None:
    jobs = JobJournal(kept_in(state_dir))
    ends = [(job.id, job.trigger, job.state, job.artefact, job.error and job.error.code) for job in jobs.records()]
    assert ends == [
        ("j1", "first-start", JobState.COMMITTED, "31c2fbc0dd52626e", None),
        ("j2", "command", JobState.FAILED, None, "recalibration.disk"),
    ]
    jobs.start("j3", "alarm", {}, [])
    with opened(state_dir, TurnedClock()) as outbox:
        assert outbox.epoch > WRITTEN_S, "the next epoch is above the last one"
        assert numbers(taken(outbox, 3)) == [1, 2, 3]
    labels = LabelStore(state_dir, "5cbdda3937c38e7479ff0e41125968c31bc720cd2632e7888f89226ce99d905c", "classify")
    assert [(frame.camera, frame.label, frame.skipped) for frame in labels.frames()] == [
        ("gate", 3, False),
        ("gate", None, True),
    ]
    assert labels.picture(1).startswith(b"\xff\xd8")
    assert labels.strata() == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_refusals_gains_audits_and_announcements_are_kept(state_dir: Path) -> None:
    state = kept_in(state_dir)
    refusal = State(KeptMemory(state).read("")).refusal("the settings")
    assert refusal is not None
    assert (refusal.error.code, refusal.attempt.scene.artefact) == ("recalibration.refused", "day")
    gain = GainRecord(state, "one model").expected_gain(12.0, [0.6] * 24)
    unknown = GainRecord().expected_gain(12.0, [0.6] * 24)
    assert gain is not None
    assert unknown is not None
    assert gain.estimate != unknown.estimate
    evidence = AuditEvidence(state, "one model", 300.0)
    assert (evidence.audited, evidence.mismatch) == (2, None)
    assert evidence.detector.e_value > 1e5
    assert state.read("announcements", list) == [("homeassistant/device/tared-default-gate/config",)]
    assert state.read("replay_guard", list) == [(1700000005.0, 0.0, 0.0)]


TAKEN_OVER = (
    *("restraint.json", "attempts.json", "refusal.json", "gains.json", "audit.json", "regimes.json", "policies.json"),
    *("settings.json", "releases.json", "commands.json", "jobs.sqlite", "commands.sqlite", "home_assistant"),
)


def known(state: StateStore) -> dict[str, object]:
    return {table: state.read(table, list) for table in TABLES}


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.trial)])
def test_a_takeover_that_is_killed_at_any_point_is_done_by_the_next_start(
    state_dir: Path, tmp_path: Path, stride: int
) -> None:
    before = {name: (state_dir / name).read_bytes() for name in TAKEN_OVER}
    whole, step, folder = known(StateStore.copy_of(state_dir, [*TABLES])), 0, tmp_path / "killed"
    assert all(whole.values())
    while True:
        folder.mkdir()
        for name, content in before.items():
            (folder / name).write_bytes(content)
        if not open_until(folder, step):
            break
        assert known(kept_in(folder)) == whole, step
        assert {name: (folder / name).read_bytes() for name in TAKEN_OVER} == before, "0.2.0 finds its state again"
        shutil.rmtree(folder)
        step += stride
    assert step > 2 * stride


@pytest.mark.parametrize("name", TAKEN_OVER)
def test_a_file_that_is_damaged_is_lost_alone(state_dir: Path, name: str) -> None:
    whole, errors = known(StateStore.copy_of(state_dir, [*TABLES])), list[AgentError]()
    (state_dir / name).write_bytes(b"\xff no state")
    state = kept_in(state_dir, errors.append)
    lost = {table for table, rows in known(state).items() if rows != whole[table]}
    assert 1 <= len(lost) <= 2
    assert {table for table in TABLES if state.lost_in(table) == state_dir / name} == lost
    assert [error.code for error in errors] == ["state.damaged"]
    (state_dir / name).unlink()
    assert not any(kept_in(state_dir).lost_in(table) for table in TABLES)


@pytest.mark.parametrize("name", ["settings.json", "jobs.sqlite"])
def test_a_file_of_a_newer_tared_is_refused(state_dir: Path, name: str) -> None:
    if name.endswith(".json"):
        (state_dir / name).write_text('{"schema": 99}')
    else:
        with closing(sqlite3.connect(state_dir / name)) as db:
            db.execute("PRAGMA user_version = 99")
    with pytest.raises(AgentError, match=rf"state\.schema: .*{name} of schema 99; expected schema 1"):
        StateStore(state_dir)
    assert not (state_dir / "state.sqlite").exists()
