"""Rights that go away while the daemon runs: the job that needs them fails, what serves serves on."""

from __future__ import annotations

from pathlib import Path

import pytest
from brokers import RealBroker
from troubled_board import Board, calibrated_board, check_artefacts, copied, serves_on, show, stop

pytestmark = [pytest.mark.trial, pytest.mark.broker]

UNWRITABLE, UNREADABLE = 0o500, 0o000


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, module_broker: RealBroker) -> Board:
    return calibrated_board(tmp_path_factory.mktemp("calibrated") / "world", module_broker)


@pytest.mark.parametrize(
    ("folder", "mode", "code"),
    [
        (".", UNWRITABLE, "state.write"),
        (".", UNREADABLE, "artefact.unreadable"),
        ("artefacts", UNWRITABLE, "artefact.write"),
        ("artefacts", UNREADABLE, "artefact.unreadable"),
        ("jobs", UNWRITABLE, "recalibration.disk"),
        ("state.sqlite", 0o400, "state.write"),
    ],
)
def test_rights_that_are_lost_during_a_job_cost_that_job(
    calibrated: Board, any_broker: RealBroker, tmp_path: Path, folder: str, mode: int, code: str
) -> None:
    board = copied(calibrated, tmp_path / "world", any_broker)
    place = board.state / folder
    with board.living("life") as life:
        life.wait_served()
        before, rights = board.current, place.stat().st_mode
        answers = board.follow("recalibrate", frames="8", method="mse")
        board.scene.write_text("")  # it collects, until there is something to see
        while next(answers).step != "COLLECTING":
            pass
        place.chmod(mode)
        show(board)
        *_, last = answers
        assert last.status == "FAILED"
        assert last.error is not None
        assert last.error.code == code, last.error
        if mode == UNREADABLE:
            last = board.order("rollback")
            assert last.error is not None
            assert last.error.code.startswith("state.read" if folder == "." else "artefact."), last.error
        serves_on(life)
        place.chmod(rights)
        assert board.current == before
        last = board.order("recalibrate", frames="8", method="mse")
        assert last.status == "SUCCEEDED", last
        assert board.current != before
        stop(life)
    assert board.unfinished() == []
    check_artefacts(board)
