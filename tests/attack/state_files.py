"""The files of a state directory, each with anything in the place of some of it, and what opens each of them."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from device import TOPICS
from merge_bench import calibration_of, counted, frames_of
from places import ROOT

from agent.commands.authority import Authority, Releases
from agent.commands.dispatcher import Authorisation
from agent.commands.log import CommandLog
from agent.commands.settings import Settings
from agent.common.errors import AgentError, CommandError
from agent.config import CommandsConfig, Config
from agent.contract.commands import Release
from agent.contract.messages import Birth
from agent.control.policies import Policies
from agent.core.actions import Remember
from agent.core.causes import REFUSED
from agent.core.state import Attempt, Refusal
from agent.jobs.job import JobJournal
from agent.jobs.kept_memory import KeptMemory
from agent.monitoring.audit import AuditEvidence, Mismatch
from agent.monitoring.estimates import FidelityRecord
from agent.monitoring.evidence_file import EvidenceFile
from agent.monitoring.gains import GainRecord
from agent.monitoring.history import History, HistoryRow, read_history
from agent.monitoring.regimes import RegimeStore, parse_regime
from agent.mqtt.config import HomeAssistantConfig, OutboxConfig
from agent.state.schema import TABLES
from agent.state.store import FILE, StateStore
from agent.uplink.home_assistant import Discovery
from agent.uplink.outbox import Outbox
from agent.vision.spec import ModelSpec
from attack.case import Case, Outcome, damaged, drawn
from attack.spoilt import spoilt
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from calibrate.statistics.fidelity_gain import Recalibrated
from engines.calibration import load_calibration, save_calibration
from engines.store.artefact import read_artefact, write_artefact

Opening = Callable[[Path], object]
REGIME = {"artefact": "a", "scales": {"x": 0.5}, "weights": {"x": 1.0}, "own": {"x": [0.25, 0.125]}}
_ROW = HistoryRow(5.0, "gate", "a", True, (0.9, 0.8, 1.0), (), "calm", 0.5, (0.02, 0.0, 0.05))


def _unreported(_error: TaredError) -> None:
    """An error that the daemon logs."""


def _memory(state: StateStore) -> None:
    """Limits, raises of precision and the latest refusal."""
    kept = KeptMemory(state)
    memory = kept.read("origin")
    assert memory.next_rung("b") >= 0
    refusal = Refusal(Attempt("now", parse_regime(REGIME)), AgentError(min(REFUSED), "found", "expected", "remedy"))
    changed = replace(memory.with_raised("a", None), restraint=memory.restraint.rolled_back(5.0), refusal=refusal)
    kept.remember(Remember(changed))


def _releases(state: StateStore) -> None:
    """A release is no way back, and what cannot be read accepts none."""
    releases = Releases(Authority(CommandsConfig(), TOPICS, False, lambda: True), state)
    releases.record(Release(kind="release", sha256="ab" * 32, size=5, version=3, issued=1.0, expires=2.0), "ab" * 8)


def _config(state: StateStore) -> Config:
    model = ModelSpec(path=state.path.with_name("model.onnx"), task="raw")
    document = {"model": model, "camera": {"source": "v4l2:/dev/video0"}, "state_dir": state.path.parent}
    return Config.model_validate(document)


def _settings(state: StateStore) -> None:
    settings = Settings(_config(state), state, lambda _: True, lambda _: None)
    with suppress(CommandError):  # a version that somebody has set as high as it goes
        settings.set({"recalibration.max_loss": 0.2}, Authorisation(settings.version + 1))
    assert 0.0 < settings.config.max_loss < 1.0


def _regimes(state: StateStore) -> None:
    store = RegimeStore(state, "one model", 5)
    store.learn(parse_regime(REGIME))
    assert len(store.known) <= 5


def _policies(state: StateStore) -> None:
    Policies(_config(state), state).keep_only(set())
    state.replace({"policies": [("a", json.dumps({"score_threshold": 0.5}))]})


def _home_assistant(state: StateStore) -> None:
    config = HomeAssistantConfig(enabled=True)
    Discovery(TOPICS, ["gate"], Birth(agent_version="1", engine="e"), state, config, False)


def _gains(state: StateStore) -> None:
    GainRecord(state, "one model").note(Recalibrated(12.0, 0.4, 0.0, 64))


def _audit(state: StateStore) -> None:
    AuditEvidence(state, "one model", 300.0).add(Mismatch(0.5, "out", -3.0, 50.0, "front", 1))


def _journal(state: StateStore) -> None:
    journal = JobJournal(state)
    assert len(journal.records()) <= 40
    journal.start(f"job {len(journal.records())} {state.repairs}", "alarm", {}, [])


def _command_log(state: StateStore) -> None:
    log, now = CommandLog(state), time.time()
    log.accept(f"c{len(log.unfinished())}", "digest", now + 60.0, now, now + 5.0)
    assert len(log.unfinished()) <= 40


_STORES = (
    _memory,
    _releases,
    _settings,
    _regimes,
    _policies,
    _home_assistant,
    _gains,
    _audit,
    _journal,
    _command_log,
)


def _state(path: Path) -> None:
    """Every store opens, and keeps something anew; a disk that was damaged costs one attempt of those in between."""
    state = StateStore(path.parent)
    state.report_to(_unreported)
    for store in _STORES:
        store(state)
    assert not state.repairs or list(path.parent.glob("*.damaged.*"))


def _evidence(path: Path) -> None:
    evidence = EvidenceFile(path, "rtsp://camera", _unreported)
    record = FidelityRecord()
    evidence.start("day", 10.0, recall=True, mean=record)
    evidence.note_frame(12.0, 1.0)
    assert 0.0 <= record.since_start.estimate.interval.low <= 1.0


def _history(path: Path) -> None:
    History(path.parent, _unreported, True).add(7.0, [_ROW])
    assert read_history(path.parent)[-1].ts == _ROW.ts


def _outbox(path: Path) -> None:
    with Outbox(path, TOPICS, OutboxConfig()):
        pass


def _calibration(path: Path) -> None:
    assert all(scale > 0.0 for scale in load_calibration(path).scales.values())


def _artefact(path: Path) -> None:
    read_artefact(path.parent).read_engine()


def _plan(path: Path) -> None:
    PrecisionPlan.from_json(path.read_text(encoding="utf-8", errors="replace"))


# Each file as the product writes it, by the call that also opens it again.
_WRITTEN: dict[str, Opening] = {"history.jsonl": _history, "evidence.jsonl": _evidence}
_DATABASES: dict[str, Opening] = {"outbox.sqlite": _outbox, "state.sqlite": _state}


def _open(opening: Opening, path: Path, content: bytes) -> Outcome:
    shutil.rmtree(path.parent)  # a journal that an earlier case left is another database's
    path.parent.mkdir()
    path.write_bytes(content)
    opening(path)
    return None


def _database(opening: Opening, path: Path) -> bytes:
    opening(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.read_bytes()


def cases(rng: Random, folder: Path) -> Iterator[Case]:
    """Each file of the state directory with a damage, and each document with anything for a value."""
    alone, made = folder / "alone", folder / "made"
    for each in (alone, made):
        each.mkdir(exist_ok=True)
    for name, opening in _WRITTEN.items():
        (made / name).unlink(missing_ok=True)
        opening(made / name)
        yield from _damages(rng, opening, alone / name, (made / name).read_bytes())
    plan = json.loads(PrecisionPlan().to_json())
    yield from _damages(rng, _plan, alone / "plan.json", json.dumps(plan).encode())
    yield from _anything(rng, _plan, alone / "plan.json", plan)
    for name, opening in _DATABASES.items():
        (made / name).unlink(missing_ok=True)
        content = _database(opening, made / name)
        yield from _damages(rng, opening, alone / name, content)
    yield from _values(rng, alone / "state.sqlite", content)
    yield from _former(rng, alone)
    yield from _artefacts(rng, made)


def _damages(rng: Random, opening: Opening, path: Path, content: bytes) -> Iterator[Case]:
    fault, damage = damaged(rng, content)
    yield Case(f"{path.name}, {fault}", partial(_open, opening, path, damage))


def _anything(rng: Random, opening: Opening, path: Path, document: object) -> Iterator[Case]:
    for spoilt_one in drawn(spoilt(document), rng, 3):
        yield Case(f"{path.name}, anything for a value", partial(_open, opening, path, json.dumps(spoilt_one).encode()))


def _values(rng: Random, path: Path, content: bytes) -> Iterator[Case]:
    """A table of the board's state with anything for a value in a column, as far as the table takes it."""
    for table in rng.sample([*TABLES], 3):
        spoilt_one = rng.choice(["", "7", "{", "[]", '{"a": NaN}', -1, 2**62, -1e308, 9e999, None, b"\xff", "\udcff"])
        yield Case(
            f"{table}, {spoilt_one!r} for a value", partial(_spoil, rng.random(), path, content, table, spoilt_one)
        )


def _spoil(which: float, path: Path, content: bytes, table: str, value: object) -> Outcome:
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    path.write_bytes(content)
    with closing(sqlite3.connect(path)) as db, db, suppress(sqlite3.Error, UnicodeError):
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        db.execute(f"UPDATE {table} SET {columns[int(which * len(columns))]} = ?", (value,))
    _state(path)
    return None


def _former(rng: Random, alone: Path) -> Iterator[Case]:
    """A file of 0.2.0 with anything in its place, before it is taken over."""
    documents = json.loads((ROOT / "tests/system/state_of_0_2_0.json").read_text())["texts"]
    names = sorted(name for name in documents if name.endswith(".json") and "/" not in name)
    name = rng.choice(names)
    _, damage = damaged(rng, documents[name].encode())
    anything = [json.dumps(each).encode() for each in drawn(spoilt(json.loads(documents[name])), rng, 3)]
    for content in (damage, *anything):
        yield Case(f"{name} of 0.2.0, anything in it", partial(_taken_over, alone / name, content))


def _taken_over(path: Path, content: bytes) -> Outcome:
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    path.write_bytes(content)
    _state(path.with_name(FILE))
    assert path.read_bytes() == content
    return None


def _artefacts(rng: Random, made: Path) -> Iterator[Case]:
    """The files that a checksum seals: nothing of them is taken that differs by a byte."""
    save_calibration(calibration_of(counted(frames_of(0, values=300))), made / "calibration.json")
    for name in ("calibration.json", "calibration.npz"):
        content = (made / name).read_bytes()
        fault, damage = damaged(rng, content)
        yield Case(
            f"{name}, {fault}", partial(_sealed, _calibration, made / "calibration.json", made / name, content, damage)
        )
    artefact = made / "artefact"
    if not artefact.exists():
        write_artefact(artefact, {"backend": {"runtime": "none"}, "precision": "fp32"}, _fill)
    for path in sorted(artefact.iterdir()):
        content = path.read_bytes()
        fault, damage = damaged(rng, content)
        yield Case(
            f"{path.name} of an artefact, {fault}",
            partial(_sealed, _artefact, artefact / "manifest.json", path, content, damage),
        )


def _fill(folder: Path) -> dict[str, Any]:
    (folder / "engine.bin").write_bytes(b"engine" * 99)
    return {"engine": "engine.bin"}


def _sealed(opening: Opening, opened: Path, path: Path, content: bytes, damage: bytes) -> Outcome:
    path.write_bytes(damage)
    try:
        opening(opened)
        assert damage == content, "a byte was changed, and nobody noticed"
    finally:
        path.write_bytes(content)
    return None
