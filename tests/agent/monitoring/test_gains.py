"""A board remembers the gains of its recalibrations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.common.errors import AgentError
from agent.monitoring.gains import GainRecord
from calibrate.statistics.fidelity_gain import Recalibrated

VAIN = Recalibrated(12.0, 0.4, 0.0, 64)
LOSSY = [0.6] * 24


def expected(record: GainRecord) -> float:
    gain = record.expected_gain(12.0, LOSSY)
    assert gain is not None
    return gain.estimate


def taught(path: Path) -> GainRecord:
    record = GainRecord(path, "model")
    for _ in range(6):
        record.note(VAIN)
    return record


def test_gains_outlive_the_process_and_belong_to_one_model(tmp_path: Path) -> None:
    path = tmp_path / "gains.json"
    found = expected(taught(path))
    assert found < 0.5 * expected(GainRecord())
    assert expected(GainRecord(path, "model")) == found
    assert expected(GainRecord(path, "another")) == expected(GainRecord())


@pytest.mark.parametrize("row", [[1.0, 0.5, 2.0, 3], [1.0, -0.1, 0.0, 3], ["x", 0.5, 0.0, 3], [1.0, 0.5, 0.0], 7])
def test_damage_costs_only_what_was_learnt(tmp_path: Path, row: object) -> None:
    path = tmp_path / "gains.json"
    taught(path)
    document = json.loads(path.read_text())
    document["recalibrations"][2] = row
    path.write_text(json.dumps(document))
    record = GainRecord(path, "model")
    assert expected(record) == expected(GainRecord())
    record.note(VAIN)
    assert expected(GainRecord(path, "model")) < expected(GainRecord())


def test_the_file_of_a_newer_tared_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "gains.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(AgentError) as refused:
        GainRecord(path, "model")
    assert refused.value.code == "gains.schema"


def test_a_few_frames_say_nothing() -> None:
    assert GainRecord().expected_gain(12.0, [0.0] * 7) is None
    assert GainRecord().expected_gain(12.0, [0.0] * 8) is not None
