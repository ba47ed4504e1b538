"""The state of a board in one file: each table is kept, lost alone, and lost for good only where it is damaged."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from kept import kept_in, open_until, refusing, spoil

from agent.common.errors import AgentError
from agent.state import store
from agent.state.salvage import Row
from agent.state.schema import MIGRATIONS, TABLES
from agent.state.store import FILE, StateStore

ROWS: dict[str, Row] = {
    "jobs": (1, "a", "alarm", "{}", "[]", "COMMITTED", None, None, None, 1.0, 2.0),
    "commands": (1, "c1", "digest", 9.0, 1.0, "{}", 1, 0, "answers", b"\x00"),
    "replay_guard": (3.0, 2.0, 1.0),
    "settings": ("log_level", '"debug"', ""),
    "settings_versions": ("", 3),
    "releases": ("a key", 5),
    "policies": ("day", "{}"),
    "regimes": ("day", "a model", "{}"),
    "limits": ("job", 7.0),
    "attempts": ("day", "the rules", None),
    "refusal": ("settings", "{}", "{}"),
    "gains": ("a model", 12.0, 0.5, 0.25, 64),
    "audit": ("a model", 1, "{}", None, 0),
    "announcements": ("homeassistant/device/gate/config",),
}


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A folder whose state has a row in each table."""
    kept_in(tmp_path).replace({table: [row] for table, row in ROWS.items()})
    return tmp_path


def known(state: StateStore) -> dict[str, Sequence[Row]]:
    """The rows of every table that has some."""
    rows = {table: state.read(table, list) for table in TABLES}
    return {table: each for table, each in rows.items() if each}


def whole(*lost: str) -> dict[str, list[Row]]:
    return {table: [row] for table, row in ROWS.items() if table not in lost}


def overwrite(folder: Path, table: str) -> None:
    """Spoil the page on which a table has its rows."""
    with closing(sqlite3.connect(folder / FILE)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    content = bytearray((folder / FILE).read_bytes())
    content[(page - 1) * size : page * size] = b"\xa5" * size
    (folder / FILE).write_bytes(content)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("damage", ["a page", "the rows", "the table"])
def test_damage_of_one_table_costs_that_table_alone(full: Path, table: str, damage: str) -> None:
    if damage == "a page":
        overwrite(full, table)
    elif damage == "the table":
        spoil(full, f"DROP TABLE {table}")
    before, errors = (full / FILE).read_bytes(), list[AgentError]()
    state = kept_in(full, errors.append)
    if damage == "the rows":
        assert state.read(table, lambda rows: [int(each) for each in rows]) is None  # type: ignore[call-overload]
    assert known(state) == whole(table)
    (error,) = errors
    assert (error.code, error.remedy.split("; ")[1].split(" (")[0]) == ("state.damaged", f"lost: {TABLES[table][0]}")
    assert (full / f"{FILE}.damaged.1").read_bytes() == before
    state.replace({table: [ROWS[table]]})
    assert known(kept_in(full)) == whole()


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 40)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("is_running", [True, False], ids=["while it is open", "before a start"])
@pytest.mark.parametrize("damage", [garbage, emptied, folder, pipe, gone])
def test_a_file_that_is_none_is_begun_anew(full: Path, damage: object, is_running: bool) -> None:
    errors: list[AgentError] = []
    state = kept_in(full, errors.append)
    damage(full / FILE)  # type: ignore[operator]  # one of those above
    if not is_running:
        state = kept_in(full, errors.append)
    with_nothing_before = damage is gone and not is_running  # a new board
    assert known(state) == {}
    assert [error.code for error in errors] == [] if with_nothing_before else ["state.damaged"]
    assert (state.lost_in("releases") is None) is with_nothing_before
    state.replace({"limits": [ROWS["limits"]]})
    assert known(kept_in(full)) == {"limits": [ROWS["limits"]]}


def test_a_lost_table_stays_lost_until_somebody_removes_the_damaged_file(full: Path) -> None:
    overwrite(full, "releases")
    StateStore(full)
    overwrite(full, "gains")
    again = StateStore(full)
    assert again.lost_in("releases") == again.lost_in("gains") == full / f"{FILE}.damaged.2"
    assert again.lost_in("policies") is None
    (full / f"{FILE}.damaged.1").unlink()
    assert kept_in(full).lost_in("releases") is not None
    (full / f"{FILE}.damaged.2").unlink()
    assert kept_in(full).lost_in("releases") is None


def test_a_file_of_a_newer_tared_is_refused_and_left_as_it_is(full: Path) -> None:
    spoil(full, "PRAGMA user_version = 99")
    content = (full / FILE).read_bytes()
    for opening in (StateStore, lambda folder: StateStore.copy_of(folder, ["jobs"])):
        with pytest.raises(AgentError, match=r"state\.schema: .* of schema 99; expected schema 1"):
            opening(full)
    assert (full / FILE).read_bytes() == content


def test_an_older_schema_migrates_forward(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = (*MIGRATIONS, "ALTER TABLE limits ADD COLUMN colour TEXT DEFAULT 'red';")
    monkeypatch.setattr(store, "MIGRATIONS", later)
    assert known(kept_in(full)) == {**whole(), "limits": [(*ROWS["limits"], "red")]}


def test_a_disk_that_refuses_is_reported_once_for_each_table(full: Path) -> None:
    errors: list[AgentError] = []
    state = kept_in(full, errors.append)
    with refusing(state):
        for table in ("limits", "refusal", "limits"):
            state.write(table, [])
        assert state.read("releases", list) is None
    assert [(error.code, error.expected) for error in errors] == [
        ("state.write", "the limits of the day, kept in this file"),
        ("state.write", "the latest refusal, kept in this file"),
        ("state.read", "the versions of the releases, kept in this file"),
    ]
    assert state.lost_in("releases") == full / FILE, "nobody knows which release is an old one"
    assert known(kept_in(full)) == whole()


def test_a_transaction_that_fails_changes_no_table(full: Path) -> None:
    state = kept_in(full)
    with pytest.raises(AgentError, match=r"state\.write"):
        state.replace({"settings": [], "settings_versions": [("", None)]})
    assert known(state) == whole()


def test_a_copy_changes_nothing_beside_the_daemon(full: Path) -> None:
    overwrite(full, "gains")
    before, errors = sorted(full.iterdir()), list[AgentError]()
    copy = StateStore.copy_of(full, ["policies", "gains"])
    copy.report_to(errors.append)
    assert (copy.read("policies", list), copy.read("gains", list)) == ([ROWS["policies"]], None)
    assert [error.code for error in errors] == ["state.damaged"]
    assert sorted(full.iterdir()) == before


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.trial)])
def test_a_repair_that_is_killed_at_any_point_is_done_by_the_next_start(
    full: Path, tmp_path: Path, stride: int
) -> None:
    overwrite(full, "releases")
    damaged, step = (full / FILE).read_bytes(), 0
    while True:
        for path in tmp_path.iterdir():
            path.unlink()
        (full / FILE).write_bytes(damaged)
        if not open_until(full, step):
            break
        state = StateStore(full)
        assert known(state) == whole("releases"), step
        assert state.lost_in("releases") is not None, step
        step += stride
    assert step > 2 * stride
