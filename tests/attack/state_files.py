"""The files of a state directory, each with anything in the place of some of it, and what opens each of them."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from agent.jobs.limits import REFUSED, AutomationLimits, PrecisionAttempts
from agent.jobs.refusal import Attempt, RefusalMemory
from device import TOPICS
from merge_bench import calibration_of, counted, frames_of

from agent.commands.authority import Authority, Releases
from agent.commands.dispatcher import Authorisation
from agent.commands.log import CommandLog, ReplayGuard
from agent.commands.settings import Settings
from agent.common.errors import AgentError, CommandError
from agent.config import CommandsConfig, Config
from agent.contract.commands import Release
from agent.contract.messages import Birth
from agent.jobs.job import JobJournal
from agent.monitoring.estimates import FidelityRecord
from agent.monitoring.evidence_file import EvidenceFile
from agent.monitoring.history import History, HistoryRow, read_history
from agent.monitoring.regimes import RegimeStore, parse_regime
from agent.mqtt.config import HomeAssistantConfig, OutboxConfig
from agent.uplink.home_assistant import Discovery
from agent.uplink.outbox import Outbox
from agent.vision.spec import ModelSpec
from attack.case import Case, Outcome, damaged, drawn
from attack.spoilt import spoilt
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.calibration import load_calibration, save_calibration
from engines.store.artefact import read_artefact, write_artefact

Opening = Callable[[Path], object]
REGIMES = {
    "schema": 2,
    "identity": "one model",
    "regimes": [{"artefact": "a", "scales": {"x": 0.5}, "weights": {"x": 1.0}, "own": {"x": [0.25, 0.125]}}],
}
_ROW = HistoryRow(5.0, "gate", "a", True, (0.9, 0.8, 1.0), (), "calm", 0.5, (0.02, 0.0, 0.05))


def _unreported(_error: TaredError) -> None:
    """An error that the daemon logs."""


def _limits(path: Path) -> None:
    limits = AutomationLimits(path, 4, 60.0, 60.0, 3, _unreported)
    assert limits.may_start in (True, False)
    limits.count_rollback()


def _attempts(path: Path) -> None:
    attempts = PrecisionAttempts(path, "origin", _unreported)
    attempts.forbid("a")
    assert attempts.next_rung("b") >= 0


def _releases(path: Path) -> None:
    """A release is no way back, and what cannot be read accepts none."""
    releases = Releases(Authority(CommandsConfig(), TOPICS, False, lambda: True), path)
    releases.record(Release(kind="release", sha256="ab" * 32, size=5, version=3, issued=1.0, expires=2.0), "ab" * 8)


def _replay_guard(path: Path) -> None:
    ReplayGuard(path, True, _unreported).record(5.0, 6.0)


def _settings(path: Path) -> None:
    model = ModelSpec(path=path.with_name("model.onnx"), task="raw")
    document = {"model": model, "camera": {"source": "v4l2:/dev/video0"}, "state_dir": path.parent}
    settings = Settings(Config.model_validate(document), path, lambda _: True, lambda _: None, _unreported)
    with suppress(CommandError):  # a version that somebody has set as high as it goes
        settings.set({"recalibration.max_loss": 0.2}, Authorisation(settings.version + 1))
    assert 0.0 < settings.config.max_loss < 1.0


def _regimes(path: Path) -> None:
    assert len(RegimeStore(path, "one model", 5).known) <= 5


def _evidence(path: Path) -> None:
    evidence = EvidenceFile(path, "rtsp://camera", _unreported)
    record = FidelityRecord()
    evidence.start("day", 10.0, recall=True, mean=record)
    evidence.note_frame(12.0, 1.0)
    assert 0.0 <= record.since_start.estimate.interval.low <= 1.0


def _history(path: Path) -> None:
    History(path.parent, _unreported, True).add(7.0, [_ROW])
    assert read_history(path.parent)[-1].ts == _ROW.ts


def _home_assistant(path: Path) -> None:
    config = HomeAssistantConfig(enabled=True)
    Discovery(TOPICS, ["gate"], Birth(agent_version="1", engine="e"), path, config, False)


def _refusal(path: Path) -> None:
    memory = RefusalMemory(path, _unreported)
    memory.settings = "now"
    scene = parse_regime(REGIMES["regimes"][0])  # type: ignore[index]  # a list
    assert memory.note(Attempt("now", scene), AgentError(min(REFUSED), "found", "expected", "remedy"))
    assert memory.standing is not None


def _outbox(path: Path) -> None:
    with Outbox(path, TOPICS, OutboxConfig()):
        pass


def _journal(path: Path) -> None:
    assert len(JobJournal(path, _unreported).records()) <= 40


def _command_log(path: Path) -> None:
    assert len(CommandLog(path, _unreported).unfinished()) <= 40


def _calibration(path: Path) -> None:
    assert all(scale > 0.0 for scale in load_calibration(path).scales.values())


def _artefact(path: Path) -> None:
    read_artefact(path.parent).read_engine()


def _plan(path: Path) -> None:
    PrecisionPlan.from_json(path.read_text(encoding="utf-8", errors="replace"))


# Each file as the product writes it, by the call that also opens it again.
_WRITTEN: dict[str, Opening] = {
    "restraint.json": _limits,
    "attempts.json": _attempts,
    "releases.json": _releases,
    "commands.json": _replay_guard,
    "settings.json": _settings,
    "refusal.json": _refusal,
    "history.jsonl": _history,
    "evidence.jsonl": _evidence,
    "home_assistant": _home_assistant,
}
_DATABASES: dict[str, Opening] = {"outbox.sqlite": _outbox, "jobs.sqlite": _journal, "commands.sqlite": _command_log}


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
        content = (made / name).read_bytes()
        yield from _damages(rng, opening, alone / name, content)
        if name.endswith(".json"):
            yield from _anything(rng, opening, alone / name, json.loads(content))
    for name, document, known in (
        ("regimes.json", REGIMES, _regimes),
        ("plan.json", json.loads(PrecisionPlan().to_json()), _plan),
    ):
        yield from _damages(rng, known, alone / name, json.dumps(document).encode())
        yield from _anything(rng, known, alone / name, document)
    for name, opening in _DATABASES.items():
        (made / name).unlink(missing_ok=True)
        yield from _damages(rng, opening, alone / name, _database(opening, made / name))
    yield from _artefacts(rng, made)


def _damages(rng: Random, opening: Opening, path: Path, content: bytes) -> Iterator[Case]:
    fault, damage = damaged(rng, content)
    yield Case(f"{path.name}, {fault}", partial(_open, opening, path, damage))


def _anything(rng: Random, opening: Opening, path: Path, document: object) -> Iterator[Case]:
    for spoilt_one in drawn(spoilt(document), rng, 3):
        yield Case(f"{path.name}, anything for a value", partial(_open, opening, path, json.dumps(spoilt_one).encode()))


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
