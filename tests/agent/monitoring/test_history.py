"""The history of a board: bounded, fine for the last hours, and no worse for a disk or a file that is broken."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from unexpected import unexpected

from agent.common.errors import AgentError
from agent.monitoring.history import FILE, History, HistoryRow, read_history

MOST_ROWS = 2000


def row(ts: float, **changes: object) -> HistoryRow:
    known = {"fidelity": (0.9, 0.8, 1.0), "drift": "calm", "gain_db": 0.5, "gain": (0.02, 0.0, 0.05), **changes}
    return HistoryRow(ts, "camera", "e1", True, **known)  # type: ignore[arg-type]  # fields of several types


def filled(folder: Path, seconds: range, is_live: bool = False) -> History:
    history = History(folder, unexpected, is_live)
    for second in seconds:
        if history.is_due(float(second)):
            history.add(float(second), [row(float(second))])
    return history


def test_rows_come_back_as_they_were_and_no_closer_than_some_seconds(tmp_path: Path) -> None:
    filled(tmp_path, range(0, 100))
    rows = read_history(tmp_path)
    assert [each.ts for each in rows] == [float(ts) for ts in range(0, 100, 5)]
    assert rows[0].fidelity == [0.9, 0.8, 1.0]
    assert rows[0].drift == "calm"
    assert rows[0].gain == [0.02, 0.0, 0.05]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_full_history_forgets_the_older_half_of_its_detail(tmp_path: Path) -> None:
    filled(tmp_path, range(0, 30_000, 5))
    rows = [each.ts for each in read_history(tmp_path)]
    assert len(rows) <= MOST_ROWS
    assert rows[0] == 0.0
    assert rows[-1] == 29_995.0
    steps = [after - before for before, after in pairwise(rows)]
    assert steps[-1] == 5.0
    assert steps == sorted(steps, reverse=True)
    assert (tmp_path / FILE).stat().st_size < 500_000
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_the_history_goes_on_after_a_start_and_begins_anew_where_a_recording_does(tmp_path: Path) -> None:
    filled(tmp_path, range(0, 50))
    filled(tmp_path, range(50, 100))
    assert len(read_history(tmp_path)) == 20
    filled(tmp_path, range(0, 10))
    assert [each.ts for each in read_history(tmp_path)] == [0.0, 5.0]


def test_a_clock_that_was_set_back_costs_a_live_camera_nothing(tmp_path: Path) -> None:
    filled(tmp_path, range(1000, 1020), is_live=True)
    filled(tmp_path, range(0, 10), is_live=True)
    assert [each.ts for each in read_history(tmp_path)] == [1000.0, 1005.0, 1010.0, 1015.0, 0.0, 5.0]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"ts": 1}', json.dumps({"ts": "x", "camera": "c", "engine": "e", "is_int8": True}), "\x00" * 50,
     '{"ts": NaN, "camera": "c", "engine": "e", "is_int8": true}', "[" * 100_000,
     json.dumps({"ts": 1.0, "camera": "c", "engine": "e", "is_int8": True, "fidelity": [1.0]})],
)  # fmt: skip
def test_a_damaged_row_costs_itself(tmp_path: Path, line: str) -> None:
    filled(tmp_path, range(0, 10))
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    assert [each.ts for each in read_history(tmp_path)] == [0.0, 5.0]
    filled(tmp_path, range(10, 15))
    assert read_history(tmp_path)[-1].ts == 10.0


@pytest.mark.parametrize("place", [Path.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
def test_a_disk_that_refuses_is_reported_once(tmp_path: Path, place: Callable[[Path], None]) -> None:
    place(tmp_path / FILE)
    errors: list[AgentError] = []
    history = History(tmp_path, errors.append, is_live=True)
    history.add(0.0, [row(0.0)])
    history.add(5.0, [row(5.0)])
    assert [error.code for error in errors] == ["state.write"]
