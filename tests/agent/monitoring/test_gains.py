"""A board remembers the gains of its recalibrations."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept import kept_in, spoil

from agent.monitoring.gains import GainRecord
from agent.state.store import StateStore
from calibrate.statistics.fidelity_gain import Recalibrated

VAIN = Recalibrated(12.0, 0.4, 0.0, 64)
LOSSY = [0.6] * 24


def expected(record: GainRecord) -> float:
    gain = record.expected_gain(12.0, LOSSY)
    assert gain is not None
    return gain.estimate


def taught(folder: Path) -> GainRecord:
    record = GainRecord(kept_in(folder), "model")
    for _ in range(6):
        record.note(VAIN)
    return record


def test_gains_outlive_the_process_and_belong_to_one_model(tmp_path: Path) -> None:
    found = expected(taught(tmp_path))
    assert found < 0.5 * expected(GainRecord())
    assert expected(GainRecord(kept_in(tmp_path), "model")) == found
    assert expected(GainRecord(kept_in(tmp_path), "another")) == expected(GainRecord())


@pytest.mark.parametrize("damage", ["loss = -0.1", "gained = 2.0", "frames = -3", "gain_db = 9e999"])
def test_damage_costs_only_what_was_learnt(tmp_path: Path, damage: str) -> None:
    taught(tmp_path)
    spoil(tmp_path, f"UPDATE gains SET {damage} WHERE rowid = 3")
    record = GainRecord(StateStore(tmp_path), "model")
    assert expected(record) == expected(GainRecord())
    record.note(VAIN)
    assert expected(GainRecord(kept_in(tmp_path), "model")) < expected(GainRecord())


def test_a_few_frames_say_nothing() -> None:
    assert GainRecord().expected_gain(12.0, [0.0] * 7) is None
    assert GainRecord().expected_gain(12.0, [0.0] * 8) is not None
