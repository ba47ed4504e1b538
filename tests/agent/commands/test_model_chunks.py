"""Models on their way to a board in chunks: out of order, forged, cancelled, given up, refused, and gone on with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from brokers import eventually
from delivery_bench import CONTENT, Board, board

from agent.commands import file_transfer
from agent.common.errors import AgentError
from agent.contract.commands import MODEL_CHUNK_BYTES

__all__ = ["board"]  # the fixture


def test_chunks_are_asked_for_and_taken_in_their_order(board: Board) -> None:
    board.begin()
    assert board.wanted == 0
    for number in (1, 0, 0, 3, 1, 2, 2, 3):
        board.chunk(number)
    assert board.end() == "SUCCEEDED"
    assert board.model.read_bytes() == CONTENT


def test_unrequested_chunks_are_ignored(board: Board) -> None:
    board.chunk(0)
    board.begin()
    board.chunk(0, sha="0" * 64)
    board.chunk(0, content=b"short")
    board.chunk(0, content=b"x" * (MODEL_CHUNK_BYTES + 1))
    board.delivery.receive("tared/v1/fleet/board/model/x", b"")
    assert board.kept == 0
    for number in range(4):
        board.chunk(number)
    assert board.end() == "SUCCEEDED"


def forge(board: Board) -> None:
    """Chunks as they are asked for, of which the first is somebody else's."""
    board.chunk(0, content=bytes(MODEL_CHUNK_BYTES))
    for number in range(1, 4):
        board.chunk(number)


def begun_anew(board: Board) -> bool:
    board.step()
    return [each.result for each in board.results].count({"next": 0}) == 2


def test_a_forged_chunk_costs_a_second_transfer_and_not_the_delivery(board: Board) -> None:
    board.begin()
    forge(board)
    eventually(lambda: begun_anew(board))
    for number in range(4):
        board.chunk(number)
    assert board.end() == "SUCCEEDED"
    assert board.model.read_bytes() == CONTENT


def test_chunks_that_were_sent_wrong_twice_are_no_model(board: Board) -> None:
    board.begin()
    forge(board)
    eventually(lambda: begun_anew(board))
    forge(board)
    assert "a file of another SHA-256" in board.end()
    assert (board.model.read_bytes(), board.kept) == (b"before", 0)


def test_chunks_are_cancelled(board: Board) -> None:
    board.begin()
    board.chunk(0)
    assert board.delivery.end("the operator cancels it")
    board.chunk(1)
    assert "the operator cancels it" in board.end()
    board.begin()
    assert board.wanted == 1


def test_a_silent_sender_is_asked_again_and_then_given_up(board: Board) -> None:
    board.begin()
    board.chunk(0)
    board.clock.turn(file_transfer._ASK_AGAIN_S + 1.0)
    board.delivery.tick()
    assert board.wanted == 1
    board.clock.turn(file_transfer._SILENCE_S)
    assert "no chunk for" in board.end()
    board.begin()
    assert board.wanted == 1, "it goes on where it ended"


def test_a_transfer_continues_in_another_process(tmp_path: Path, board: Board) -> None:
    board.begin()
    board.chunk(0)
    (path,) = board.incoming.iterdir()
    path.write_bytes(path.read_bytes() + b"half a chunk")
    later = Board(tmp_path)
    later.begin()
    assert later.wanted == 1
    for number in (1, 2, 3):
        later.chunk(number)
    assert later.end() == "SUCCEEDED"
    assert later.model.read_bytes() == CONTENT


def refusal(begin: Callable[[], None]) -> str:
    with pytest.raises(AgentError) as caught:
        begin()
    return caught.value.code


def test_the_part_of_another_model_is_removed(tmp_path: Path, board: Board) -> None:
    board.begin()
    board.chunk(0)
    later = Board(tmp_path)
    later.begin(sha256="0" * 64)
    assert board.kept == 0


def test_a_board_without_room_or_without_a_watch_says_so(tmp_path: Path) -> None:
    assert refusal(Board(tmp_path, reserve_bytes=2**60).begin) == "command.model"
    assert refusal(Board(tmp_path, watched=False).begin) == "command.model"
    blocked = Board(tmp_path)
    blocked.incoming.rmdir()
    blocked.incoming.write_text("no folder")
    assert refusal(functools.partial(blocked.begin)) == "command.model"
