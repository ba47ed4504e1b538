"""A daemon that starts on a damaged state directory serves all the same, and reports the damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker
from kept import kept_in
from troubled_board import Board, calibrated_board, codes, copied, stop
from worlds import FIRST_COMMIT, OUTLASTS_S, make_world

from agent.jobs.job import JobJournal

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


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of a board that has done many jobs, and has lost everything else."""
    state = kept_in(tmp_path / "state")
    jobs = JobJournal(state)
    for number in range(40):
        jobs.start(str(number), "alarm", {"padding": "x" * 500}, [])
    return state.path


@pytest.mark.parametrize(
    "damage", [garbage, *(pytest.param(each, marks=trial) for each in (truncated, emptied, folder))]
)
def test_a_damaged_journal_is_moved_aside_and_the_first_job_is_done(
    tmp_path: Path, journal: Path, damage: Callable[[Path], None]
) -> None:
    world = make_world(tmp_path, lambda _: 0.5, OUTLASTS_S)
    damage(journal)
    summary, errors = world.run(until=FIRST_COMMIT)
    assert [swap["trigger"] for swap in summary["swaps"]] == ["first-start"]
    assert [path.name for path in journal.parent.glob("state.sqlite.damaged.*")] == ["state.sqlite.damaged.1"]
    assert errors.count("code=state.damaged") == 1
    assert not journal.with_name("state.sqlite-journal").exists()
    summary, errors = world.run("--frames", "20")
    assert (summary["frames"], "code=" in errors) == (20, False)


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
    kinds: list[Callable[[Path], None]] = [garbage, pipe, folder, device, other_words, emptied]
    files = [path for path in sorted(board.state.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.parent == board.state or path.parent.name == board.current]
    assert len(files) > 8
    for number, file in enumerate(files):
        shutil.rmtree(board.state)
        shutil.copytree(calibrated.state, board.state, symlinks=True)
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
