"""A candidate that failed its probation leaves the store; its evidence stays, and no other artefact is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kept import kept_in

from agent.contract.messages import Birth
from agent.core.state import JobState
from agent.jobs.job import JobJournal
from agent.jobs.recovery import CrashRecovery
from agent.models.engine_service import reject
from agent.uplink.reporter import Reporter
from engines.errors import EngineError
from engines.store.artefact import Artefact, Store, write_artefact

WHY = {"trigger": "alarm", "reason": "probation.error"}
VERDICT = {"fidelity": 0.9}


def made(store: Store, name: str) -> Artefact:
    inputs = {"model": name}

    def fill(folder: Path) -> dict[str, Any]:
        (folder / "engine").write_text(name)
        return {"verdict": VERDICT}

    return write_artefact(store.place(inputs), inputs, fill, store.key)


def names(store: Store) -> list[str]:
    return sorted(path.name for path in (store.root / "artefacts").iterdir())


def refusals(store: Store) -> list[Any]:
    return [json.loads(path.read_text()) for path in (store.root / "refused").glob("*")]


def test_a_rejected_candidate_leaves_the_store_and_its_verdict_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, b"k" * 32)
    other, candidate = made(store, "other"), made(store, "candidate")
    reject(store, candidate.id, WHY)
    assert names(store) == [other.id]
    (kept,) = refusals(store)
    assert (kept["id"], kept["rollback"], kept["verdict"]) == (candidate.id, WHY, VERDICT)
    reject(store, candidate.id, {"reason": "again"})
    assert refusals(store) == [kept]


def test_a_candidate_with_a_damaged_manifest_goes_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    candidate = made(store, "candidate")
    (candidate.path / "manifest.json").write_text("{}")
    reject(store, candidate.id, WHY)
    assert names(store) == []
    assert refusals(store)[0]["verdict"] is None


def test_the_target_of_a_link_and_files_elsewhere_stay(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    artefacts = [made(store, name) for name in ("one", "two")]
    for artefact in artefacts:
        store.promote(artefact)
        reject(store, artefact.id, WHY)
    (tmp_path / "state" / "elsewhere").mkdir()
    for identity in (artefacts[0].id, "", "..", "../elsewhere", "0" * 16):
        reject(store, identity, WHY)
    assert names(store) == sorted(artefact.id for artefact in artefacts)
    assert (tmp_path / "state" / "elsewhere").is_dir()
    assert not (tmp_path / "state" / "refused").exists()


def test_a_rejected_candidate_goes_though_its_evidence_cannot_be_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    candidate = made(store, "candidate")
    (tmp_path / "refused").write_text("where a folder belongs")
    reject(store, candidate.id, WHY)
    assert names(store) == []


def refuses(*_: object) -> None:
    raise EngineError("store.write", "no space left", "a writable store", "check the disk")


class Crashed:
    """The state directory of a daemon that was killed while a job was in `state`."""

    def __init__(self, folder: Path, trigger: str, state: JobState) -> None:
        self.store = Store(folder)
        self.before, self.candidate = made(self.store, "before"), made(self.store, "candidate")
        self.store.promote(self.before)
        self.journal = JobJournal(kept_in(folder))
        self.journal.start("job", trigger, {}, [])
        self.journal.enter("job", JobState.PROBATION, artefact=self.candidate.id)
        if state is not JobState.PROBATION:
            self.journal.enter("job", state)

    def past(self) -> CrashRecovery:
        return CrashRecovery(self.store.root, kept_in(self.store.root), Reporter(None, Birth(agent_version="0")))


@pytest.mark.parametrize(
    ("trigger", "state", "stays"),
    [
        ("alarm", JobState.PROBATION, False),
        ("command", JobState.PROBATION, False),
        ("switch", JobState.PROBATION, True),
        ("rollback", JobState.PROBATION, True),
        ("alarm", JobState.COMMITTED, True),
    ],
)
def test_a_candidate_that_a_crash_has_ended_is_gone_before_anything_is_chosen_to_serve(
    tmp_path: Path, trigger: str, state: JobState, stays: bool
) -> None:
    crashed = Crashed(tmp_path, trigger, state)
    past = crashed.past()
    ids = [crashed.before.id, *([crashed.candidate.id] if stays else [])]
    assert names(crashed.store) == sorted(ids)
    if not stays:
        (kept,) = refusals(crashed.store)
        assert (kept["rollback"]["reason"], kept["verdict"]) == ("recalibration.interrupted", VERDICT)
        assert past.end_unfinished_jobs("").rolled_back == 1


def test_a_candidate_that_had_become_current_stays(tmp_path: Path) -> None:
    crashed = Crashed(tmp_path, "alarm", JobState.PROBATION)
    crashed.store.promote(crashed.candidate)
    assert crashed.past().end_unfinished_jobs("").rolled_back == 0
    assert names(crashed.store) == sorted([crashed.before.id, crashed.candidate.id])


def test_a_start_succeeds_though_the_disk_keeps_the_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crashed = Crashed(tmp_path, "alarm", JobState.PROBATION)
    monkeypatch.setattr(Store, "discard", refuses)
    assert crashed.past().end_unfinished_jobs("").rolled_back == 1
    assert "store.write" in caplog.text
