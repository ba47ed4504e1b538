"""Evidence in a file: over a restart, over a kill in the middle of a line, and never of another engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drift_bench import monitor_of, regime
from evidence_bench import SOURCE, Process
from unexpected import unexpected

from agent.common.errors import AgentError
from agent.common.state_files import Journal
from agent.config import DriftConfig
from agent.monitoring import evidence_file as file_module
from agent.monitoring.drift import DriftMonitor
from agent.monitoring.estimates import FidelityRecord
from agent.monitoring.evidence_file import EvidenceFile, RecalledEvidence, remove_other_files
from calibrate.errors import CalibrationError


def recalled(drift: object, since: float) -> RecalledEvidence:
    return RecalledEvidence(since, {"drift": drift, "classes": None, "appearances": None})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "evidence.jsonl"


@pytest.mark.parametrize(("engine", "recall"), [("night", True), ("day", False)])
def test_another_engine_and_one_that_serves_anew_begin_with_nothing_but_the_hour(
    path: Path, engine: str, recall: bool
) -> None:
    first = Process(path)
    first.frame(1.0, 0.5)
    first.evidence.note("drift", {"e": 1})
    second = Process(path, engine, recall)
    assert second.recalled is None
    assert second.record.since_start.estimate.interval.n == 0
    assert second.record.hour.estimate == first.record.hour.estimate
    assert Process(path, engine).recalled == recalled(None, 0.0)


def test_a_kill_in_the_middle_of_a_line_costs_that_line(path: Path) -> None:
    first = Process(path)
    first.evidence.note("drift", {"e": 1})
    first.evidence.note("drift", {"e": 2})
    path.write_bytes(path.read_bytes()[:-3])
    assert Process(path).recalled == recalled({"e": 1}, 0.0)


@pytest.mark.parametrize("lines", [7, 50, 1000])
def test_nothing_is_lost_however_long_it_lasts_and_the_file_stays_small(
    path: Path, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    """Drift, start and frames belong together, wherever the file was written anew and the process killed."""
    monkeypatch.setattr(file_module, "_LINES", lines)
    rng = np.random.default_rng(0)
    whole, process, longest = FidelityRecord(), Process(path), 0
    whole.start(0.0)
    for number, drawn in enumerate(rng.random(400)):
        value = float(drawn) if drawn > 0.1 else None
        if number == 150:
            whole.start(150.0)
            process.starts(150.0)
        whole.add(float(number), value)
        process.frame(float(number), value)
        process.evidence.note("drift", {"e": number})
        longest = max(longest, path.read_bytes().count(b"\n"))
        if number % 97 == 0:
            process = Process(path)
            assert process.recalled == recalled({"e": number}, 0.0 if number < 150 else 150.0)
            assert process.record.state() == whole.state()
    assert longest <= lines + 4
    estimate = process.record.since_start.estimate
    assert estimate == whole.since_start.estimate
    assert (estimate.interval.n + estimate.empty, estimate.since) == (250, 150.0)


@pytest.mark.parametrize("shortened", [False, True])
def test_a_kill_while_the_file_is_written_anew_counts_nothing_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch, shortened: bool
) -> None:
    first = Process(path)
    for ts in range(5):
        first.frame(float(ts), 0.5)
    monkeypatch.setattr(file_module, "_LINES", 5)
    shorten = Journal.shorten

    def killed(journal: Journal) -> None:
        if shortened:
            shorten(journal)
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "shorten", killed)
    with pytest.raises(KeyboardInterrupt):
        first.frame(5.0, 0.5)
    monkeypatch.setattr(Journal, "shorten", shorten)
    assert Process(path).record.since_start.estimate.interval.n == 6


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_kill_during_a_swap_leaves_no_engine_with_the_drift_of_another(
    path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    first = Process(path)
    first.evidence.note("drift", {"e": 1})
    shorten, calls = Journal.shorten, iter(range(1, 3))

    def killed(journal: Journal) -> None:
        if next(calls) == killed_at:
            raise KeyboardInterrupt
        shorten(journal)

    monkeypatch.setattr(Journal, "shorten", killed)
    with pytest.raises(KeyboardInterrupt):
        first.swap("night", 9.0)
    monkeypatch.setattr(Journal, "shorten", shorten)
    recalled = Process(path, "night").recalled
    assert recalled is None or recalled.parts["drift"] is None


def test_a_disk_that_is_full_for_a_while_leaves_nothing_half(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file goes; the next engine is remembered, and the hour with it."""
    errors: list[AgentError] = []
    process = Process(path)
    process.evidence._on_error = errors.append
    process.frame(1.0, 1.0)
    put = Journal.put

    def full(*_: object) -> None:
        raise AgentError("state.write", "no space left on device", "room", "make some")

    monkeypatch.setattr(Journal, "put", full)
    process.frame(2.0, 1.0)
    process.frame(3.0, 1.0)
    assert len(errors) == 1
    assert not path.exists()
    monkeypatch.setattr(Journal, "put", put)
    process.swap("night", 3.5)
    process.frame(4.0, 0.0)
    assert Process(path, "night").record.state() == process.record.state()
    assert process.record.hour.estimate.interval.n == 4
    assert len(errors) == 1


def test_evidence_weighed_under_other_settings_is_refused() -> None:
    other = DriftMonitor(DriftConfig(tolerance_db=6.0), 1.5, regime())
    with pytest.raises(CalibrationError):
        other.restore(monitor_of(regime()).saved_state())


def test_a_file_that_cannot_be_removed_ends_nothing(path: Path) -> None:
    path.mkdir()
    errors: list[AgentError] = []
    evidence = EvidenceFile(path, SOURCE, errors.append)
    assert evidence.start("day", 0.0, recall=False, mean=FidelityRecord()) is None
    evidence.note_frame(1.0, 1.0)
    assert [error.code for error in errors] == ["state.write"]


def test_evidence_from_another_camera_is_not_recalled(path: Path) -> None:
    first = Process(path)
    first.frame(1.0, 1.0)
    first.evidence.note("drift", {"e": 1})
    assert "camera" not in path.read_text()
    elsewhere = Process(path, source="rtsp://elsewhere")
    assert elsewhere.recalled is None
    assert elsewhere.record.hour.estimate.interval.n == 0


def test_files_of_other_cameras_are_removed(tmp_path: Path) -> None:
    for name in ("evidence", "evidence-0123456789ab", "evidence-ba9876543210", "accuracy-0123456789ab"):
        (tmp_path / f"{name}.jsonl").touch()
    other = [tmp_path / name for name in ("evidence-of-a-theft.jsonl", "evidence-0123456789ab.json", "results.jsonl")]
    for path in other:
        path.touch()
    kept = tmp_path / "evidence-ba9876543210.jsonl"
    remove_other_files(tmp_path, ("evidence", "accuracy"), {kept}, unexpected)
    assert set(tmp_path.iterdir()) == {kept, *other}


def test_a_file_that_cannot_be_removed_is_reported(tmp_path: Path) -> None:
    (tmp_path / "evidence.jsonl").mkdir()
    errors: list[AgentError] = []
    remove_other_files(tmp_path, ("evidence",), set(), errors.append)
    assert [error.code for error in errors] == ["state.write"]
