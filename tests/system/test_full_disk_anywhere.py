"""A disk that is full at one write after the other: the daemon serves on, says so, starts again, and leaves no half.

A small file system has room for so many bytes, or so many files, before a job. Each size refuses another write of it.
By the number of files every write that makes one is refused in turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bench import small_file_system
from brokers import RealBroker
from kept import spoil
from troubled_board import Board, calibrated_board, check_artefacts, copied, release, serves_on, show, squeeze, stop

pytestmark = [pytest.mark.slow, pytest.mark.broker]

# What the log names, by what is written there.
SITES = {
    "state.sqlite, jobs": "the journal of jobs, kept",
    "state.sqlite, limits": "the limits of the day, kept",
    "state.sqlite, refusal": "the latest refusal, kept",
    "state.sqlite, regimes": "the regimes, kept",
    "state.sqlite, commands": "the log of commands, kept",
    "jobs/ID/...": "recalibration.disk",
    "artefacts/ID/...": "artefact.write",
    "artefacts/ID/calibration.json": "calibration.write",
    "current": "store.write",
    "evidence.jsonl, accuracy.jsonl": r"(evidence|accuracy)\.jsonl: ",
    "selection.json, selection.png": "the report on the selected frames",
    "refused/ID.json": "refusal_not_kept",
    "outbox.sqlite": "the rows that wait for the fleet's collector, kept",
}
SELECTION = "selection.json, selection.png"
NO_ROOM = "store.room"  # what a job is refused for that would have to build where nothing is left
# Met by chance alone here: see below, tests/agent/jobs/test_kept_memory.py and tests/engines/store/test_refusals.py.
ELSEWHERE = {SITES[site] for site in ("current", "state.sqlite, limits", "state.sqlite, refusal", "refused/ID.json")}
BYTES = (0, 16384, 40960, 81920)  # with 128 KiB there may be room for all
FILES = range(14)  # with one more there is room for all


@dataclass
class Ordeal:
    """One board on a disk of its own; `told` is how the daemon named what the disk refused."""

    board: Board
    disk: Path
    told: set[str] = field(default_factory=set)

    def squeezed(self, room: dict[str, int]) -> None:
        """A job, and a way back, with only so much room."""
        board = self.board
        with board.living("squeezed") as life:
            life.wait_served()
            squeeze(self.disk, **room)
            life.wait(lambda: life.said("event=regime ") or life.said(SITES["state.sqlite, regimes"]))
            orders: list[tuple[str, dict[str, str]]] = [
                ("recalibrate", {"frames": "8", "method": "mse"}),
                ("rollback", {}),
            ]
            for op, arguments in orders:
                before, last = board.current, board.order(op, **arguments)
                if last.error is not None:
                    assert last.error.code == NO_ROOM or names(str(last.error)), last.error
                    assert board.current == before
                    self.told |= names(str(last.error))
                serves_on(life)
            stop(life)
            self.told |= names(life.log.read_text())

    def started_again(self, room: dict[str, int]) -> None:
        """A start with no more room, and a candidate that is not good enough; then there is room."""
        board = self.board
        board.world.config["recalibration"]["max_loss"] = 0.0
        show(board, "dark.avi")
        spoil(board.state, "DELETE FROM regimes")  # so that one is learnt anew
        squeeze(self.disk, **room)
        with board.living("again") as life:
            life.wait_served()
            assert not life.status()["degraded"]
            last = board.order("recalibrate", frames="8", method="global:1e6")
            assert last.error is not None
            assert last.error.code in (NO_ROOM, "recalibration.refused") or names(str(last.error)), last.error
            self.told |= names(str(last.error))
            release(self.disk)
            last = board.order("recalibrate", frames="8", method="global:2e6")
            assert last.error is not None
            assert last.error.code == "recalibration.refused", last.error
            assert list((board.state / "refused").glob("*.json"))
            serves_on(life)
            stop(life)
            self.told |= names(life.log.read_text())
        assert board.unfinished() == []
        check_artefacts(board)


def names(text: str) -> set[str]:
    """The places of SITES that a text names."""
    return {name for name in SITES.values() if re.search(name, text)}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, module_broker: RealBroker) -> Board:
    board = calibrated_board(tmp_path_factory.mktemp("calibrated") / "world", module_broker, plain=True)
    board.world.config["regimes"] = {"dwell_s": 1.5}  # once the disk is full
    board.world.config["drift"]["tolerance_db"] = 11.9  # a regime is learnt while drift is calm
    return board


@pytest.mark.trial
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("rooms", "sites"),
    [
        ([{"free_files": free} for free in FILES], set(SITES.values()) - ELSEWHERE - {SITES[SELECTION]}),
        (
            [{"free_bytes": free} for free in BYTES],
            {SITES[site] for site in (SELECTION, "evidence.jsonl, accuracy.jsonl", "outbox.sqlite")},
        ),
    ],
    ids=["files", "bytes"],
)
def test_every_write_meets_a_full_disk(
    calibrated: Board, any_broker: RealBroker, tmp_path: Path, rooms: list[dict[str, int]], sites: set[str]
) -> None:
    told: set[str] = set()
    for number, room in enumerate(rooms):
        folder = tmp_path / str(number)
        with small_file_system(folder / "state", "3m", 400) as disk:
            case = Ordeal(copied(calibrated, folder, any_broker), disk)
            case.squeezed(room)
            case.started_again(room)
            print(f"{room}: {sorted(case.told)}", flush=True)
            assert case.told, "the disk had room for all"
            told |= case.told
    assert told >= sites
