"""A daemon that starts on a damaged state directory serves all the same, and reports the damage."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker
from troubled_board import Board, calibrated_board, codes, copied, stop
from warm_start import tared
from worlds import FIRST_COMMIT, OUTLASTS_S, make_world

from agent.jobs.job import JobJournal
from engines.store.artefact import Store

pytestmark = [pytest.mark.slow, pytest.mark.broker]
trial = pytest.mark.trial


def garbage(path: Path) -> None:
    path.write_bytes(b"no journal at all" * 999)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def half_of_a_transaction(path: Path) -> None:
    """As after a power cut that has lost half of what was to undo it."""
    copies = {path.with_name(name): path.with_name(f"copy-{name}") for name in (path.name, f"{path.name}-journal")}
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")  # so that changed pages reach the file before the commit
        db.execute("BEGIN")
        db.execute("UPDATE jobs SET request = hex(randomblob(9000))")
        for here, copy in copies.items():
            shutil.copy(here, copy)
    for here, copy in copies.items():
        copy.replace(here)
    truncated(path.with_name(f"{path.name}-journal"))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of a board that has done many jobs, and has lost everything else."""
    path = tmp_path / "state" / "jobs.sqlite"
    jobs = JobJournal(path, lambda error: pytest.fail(str(error)))
    for number in range(40):
        jobs.start(str(number), "alarm", {"padding": "x" * 500}, [])
    return path


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (garbage, True),
        pytest.param(truncated, True, marks=trial),
        pytest.param(emptied, False, marks=trial),  # that is how SQLite begins one
        pytest.param(folder, True, marks=trial),
        pytest.param(half_of_a_transaction, None, marks=trial),  # as much of it as there is may leave it whole
    ],
)
def test_a_damaged_journal_is_moved_aside_and_the_first_job_is_done(
    tmp_path: Path, journal: Path, damage: Callable[[Path], None], told: bool | None
) -> None:
    world = make_world(tmp_path, lambda _: 0.5, OUTLASTS_S)
    damage(journal)
    summary, errors = world.run(until=FIRST_COMMIT)
    assert [swap["trigger"] for swap in summary["swaps"]] == ["first-start"]
    moved = [path.name for path in journal.parent.glob("jobs.sqlite.damaged.*")]
    assert moved == ["jobs.sqlite.damaged.1"] * errors.count("code=journal.damaged")
    assert told is None or bool(moved) is told
    assert not journal.with_name("jobs.sqlite-journal").exists()
    summary, errors = world.run("--frames", "20")
    assert (summary["frames"], "code=" in errors) == (20, False)


def test_a_journal_of_a_newer_tared_is_refused_and_left_alone(tmp_path: Path, journal: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 1.0)
    with closing(sqlite3.connect(journal)) as db:
        db.execute("PRAGMA user_version = 99")
    content = journal.read_bytes()
    done = tared(*world.arguments())
    assert done.returncode == 2
    assert "error: journal.schema: " in done.stderr
    assert "Traceback" not in done.stderr
    assert journal.read_bytes() == content


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    """A link to what has no end."""
    path.unlink()
    path.symlink_to("/dev/zero")


def other_words(path: Path) -> None:
    path.write_text("\x00#/+\n" * 100)


@trial
@pytest.mark.parametrize("shift", range(2))
def test_every_file_is_damaged_in_turn_and_costs_itself_alone(
    calibrated: Board, any_broker: RealBroker, tmp_path: Path, shift: int
) -> None:
    """In turn, too, by every kind of damage: the daemon serves, is up at its broker, and ends when it is asked to."""
    board = copied(calibrated, tmp_path / "world", any_broker)
    (board.state / "home_assistant").write_text("homeassistant/device/tared-tared-board/config\n")
    kinds: list[Callable[[Path], None]] = [garbage, pipe, folder, device, other_words, emptied]
    files = [path for path in sorted(board.state.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.parent == board.state or path.parent.name == board.current]
    assert len(files) > 12
    for number, file in enumerate(files):
        shutil.rmtree(board.state)
        shutil.copytree(calibrated.state, board.state, symlinks=True)
        (board.state / "home_assistant").write_text("homeassistant/device/tared-tared-board/config\n")
        damage = kinds[(number + 3 * shift) % len(kinds)]
        damage(file)
        print(file.name, damage.__name__, flush=True)
        start(board, f"{number}")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, module_broker: RealBroker) -> Board:
    return calibrated_board(tmp_path_factory.mktemp("calibrated") / "world", module_broker)


def start(board: Board, name: str) -> tuple[dict[str, Any], set[str]]:
    """Start until a frame is answered, and stop: the status, and the codes of the errors."""
    with board.living(name) as life:
        life.wait_served()
        found = life.status(), codes(life)
        stop(life)
    return found


def bit_flipped(board: Board, link: str, *names: str) -> None:
    for name in names:
        file = board.state / "artefacts" / Store(board.state).target(link) / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


ALL = ("engine.onnx", "calibration.json", "calibration.npz")


@pytest.mark.parametrize(
    ("current", "previous", "serves"),
    [
        pytest.param(("engine.onnx",), (), "previous", marks=trial),
        pytest.param(("engine.onnx",), ("engine.onnx",), "current", marks=trial),  # built anew, so under the same id
        pytest.param(ALL, ("engine.onnx",), "previous", marks=trial),
        pytest.param(ALL, ALL, "reference", marks=trial),
    ],
)
def test_a_damaged_engine_is_replaced_by_the_next_best(
    calibrated: Board,
    any_broker: RealBroker,
    tmp_path: Path,
    current: tuple[str, ...],
    previous: tuple[str, ...],
    serves: str,
) -> None:
    board = copied(calibrated, tmp_path / "world", any_broker)
    ids = {link: Store(board.state).target(link) for link in ("current", "previous")}
    bit_flipped(board, "current", *current)
    bit_flipped(board, "previous", *previous)
    board.world.config["calibration"]["frames"] = 10_000  # a first calibration is not done before this looks

    status, found = start(board, "damaged")
    assert found == {"artefact.damaged"}
    assert status["degraded"] is (serves == "reference")
    if serves != "reference":
        assert status["engine"] == ids[serves]
    else:
        board.world.config["calibration"]["frames"] = 32
        with board.living("cured") as life:
            life.wait(lambda: not life.status()["degraded"])
            life.wait(lambda: life.status()["job"] is None)
            stop(life)
    assert not board.unfinished()
