"""A board that loses its power again and again while jobs run back to back: nothing adds up on its small disk."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from bench import small_file_system
from brokers import RealBroker
from troubled_board import Board, calibrated_board, check_artefacts, codes, copied, stop

from calibrate.errors import TaredError
from engines.store.retention import size

pytestmark = [pytest.mark.broker, pytest.mark.timeout(1800)]

SEED = 20
WITHIN_S = 5.0  # of its start: a job takes about three
METHODS = ("max", "mse", "entropy")  # in turn, so that no command asks for what is there


@contextmanager
def jobs_back_to_back(board: Board) -> Iterator[None]:
    """Commands, one after the other, whatever becomes of each."""
    ends = threading.Event()

    def order() -> None:
        while not ends.is_set():
            for method in METHODS:
                with suppress(TaredError):
                    for _ in board.follow("recalibrate", frames="8", method=method):
                        if ends.is_set():
                            return

    sender = threading.Thread(target=order)
    sender.start()
    try:
        yield
    finally:
        ends.set()
        sender.join()


def settled(board: Board, name: str) -> dict[str, int]:
    """Bytes by what lies in the state directory, once a daemon has done three more jobs, tidied up and ended."""
    with board.living(name) as life:
        for method in METHODS:
            last = board.order("recalibrate", frames="8", method=method)
            assert last.error is None or last.error.code == "recalibration.refused", last
        life.wait(lambda: life.status()["job"] is None)
        assert codes(life) <= {"recalibration.interrupted", "recalibration.refused"}
        stop(life)
    assert board.unfinished() == []
    check_artefacts(board)
    return {path.name: size(path) for path in board.state.iterdir()}


@pytest.mark.parametrize("kills", [pytest.param(6, marks=pytest.mark.trial), pytest.param(40, marks=pytest.mark.soak)])
def test_kills_at_random_moments_leave_nothing_behind(
    tmp_path: Path, module_broker: RealBroker, any_broker: RealBroker, kills: int
) -> None:
    stock = calibrated_board(tmp_path / "stock", module_broker)
    moments = random.Random(SEED)
    with small_file_system(tmp_path / "world" / "state", "2m"):
        board = copied(stock, tmp_path / "world", any_broker)
        before = settled(board, "before")
        with jobs_back_to_back(board):
            for number in range(kills):
                with board.living(f"life-{number}") as life:
                    life.wait_served()
                    threading.Event().wait(moments.uniform(0.0, WITHIN_S))
                    assert life.process.poll() is None, life.log.read_text()
                    assert "No space left" not in life.log.read_text()
        after = settled(board, "after")
    print(f"bytes before {before}, after {after}")
    # What a candidate leaves that a kill has ended on probation: why.
    assert after.keys() - {"refused"} == before.keys()
    assert after["artefacts"] <= 1.02 * before["artefacts"]
    assert sum(after.values()) < sum(before.values()) + 200_000  # of journals, which are bounded
