"""Evidence files as another version, a power cut or a stranger left them: no daemon ends over one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attack.spoilt import ANYTHING, ONE_FILE, as_bytes, spoilt
from evidence_bench import SOURCE, Process
from hypothesis import given, settings
from hypothesis import strategies as st
from unexpected import unexpected

from agent.monitoring.estimates import FidelityRecord, SinceStartBySecond
from agent.monitoring.evidence_file import EvidenceFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "evidence.jsonl"


@pytest.mark.parametrize(
    "line",
    [
        *("", "no JSON", '{"schema": 1}', '["mean", null]', '["mean", {}]', '["mean", {"engine": "day", "next": "x"}]'),
        *('["mean", {"engine": "day", "next": 0, "since": 0.0, "state": {}}]', '["mean", []]'),
        *('["row 0", ["x", 1.0]]', '["row 0", [1.0, 7.0]]', '["row x", [1.0, 1.0]]', '["row 0", [NaN, 1.0]]'),
        f'["row {"9" * 4300}", [1.0, 1.0]]',
    ],
)
def test_a_file_of_another_version_or_that_cannot_be_read_is_begun_anew(path: Path, line: str) -> None:
    Process(path).frame(1.0, 1.0)
    kept = path.read_text()
    path.write_text(kept + line + "\n" if line.startswith("[") else line + kept[kept.index("\n") :])
    again = Process(path)
    assert again.recalled is None
    assert (again.record.since_start.estimate.interval.n, again.record.hour.estimate.interval.n) == (0, 0)
    again.frame(2.0, 0.5)
    assert Process(path).record.since_start.estimate.interval.n == 1


@settings(ONE_FILE)
@given(data=st.data())
def test_whatever_is_in_the_file_the_daemon_starts_and_remembers(path: Path, data: st.DataObject) -> None:
    """The files of fidelity and of accuracy, some of their lines spoilt: what is taken up can be gone on with."""
    kinds: list[type[FidelityRecord] | type[SinceStartBySecond]] = [FidelityRecord, SinceStartBySecond]
    kind = data.draw(st.sampled_from(kinds))
    mean = kind()
    path.unlink(missing_ok=True)
    evidence = EvidenceFile(path, SOURCE, unexpected)
    evidence.start("day", 0.0, recall=True, mean=mean)
    for number in range(3):
        evidence.note_frame(float(number), 0.5)
    evidence.note_start(2.5)
    evidence.note("drift", {"e": 1})
    header, *lines = path.read_bytes().splitlines()
    kept = [json.loads(line) for line in lines]
    stranger = st.tuples(st.sampled_from(("mean", "drift", "row 1", "row 9")) | st.text(), ANYTHING).map(list)
    spoilt_lines = spoilt(kept) | ANYTHING.map(lambda last: [*kept, last]) | stranger.map(lambda last: [*kept, last])
    rows = data.draw(spoilt_lines)
    rows = rows if isinstance(rows, list) else [rows]
    path.write_bytes(b"".join(line + b"\n" for line in [header, *map(as_bytes, rows)]))

    again = kind()
    evidence = EvidenceFile(path, SOURCE, unexpected)
    evidence.start("day", 10.0, recall=True, mean=again)
    for ts in (10.0, 12.0, 14.0):
        again.add(ts, 1.0)
        evidence.note_frame(ts, 1.0)
    evidence.note("drift", {"e": 2})
    for part in (again.since_start, again.hour) if isinstance(again, FidelityRecord) else (again,):
        assert 0.0 <= part.estimate.interval.low <= part.estimate.interval.high <= 1.0
    third = kind()
    assert EvidenceFile(path, SOURCE, unexpected).start("day", 20.0, recall=True, mean=third) is not None
    assert third.state() == again.state()
