"""The operator's commands to the board, without a daemon around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from device import carry_out
from turned_clock import TurnedClock

from agent.common.errors import CommandError
from agent.contract.commands import CommandResult, SnapshotArgs
from agent.daemon.handlers import BoardHandlers

FRAME = SimpleNamespace(id=7, ts=1.5, image=np.zeros((8, 16, 3), np.uint8))


class Board:
    """The parts of a board that its handlers use."""

    def __init__(self, frame: Any = FRAME) -> None:
        self.pictures: list[bytes] = []
        link = SimpleNamespace(send_snapshot=self.pictures.append)
        newest = SimpleNamespace(frame=frame) if frame is not None else None
        pipeline: Any = SimpleNamespace(feeds={"gate": SimpleNamespace(newest=newest)})
        self.clock = TurnedClock()
        self._handlers = BoardHandlers(
            cast(Any, None), pipeline, cast(Any, link), lambda _reason: None, clock=self.clock
        )

    def snapshot(self) -> CommandResult:
        results: list[CommandResult] = []
        carry_out(self._handlers, "snapshot", SnapshotArgs(), results.append)
        return results[-1]

    def refusal(self) -> str:
        with pytest.raises(CommandError) as caught:
            self.snapshot()
        return caught.value.code


def test_at_most_one_picture_a_second_is_sent() -> None:
    board = Board()
    result = board.snapshot().result
    assert result is not None
    assert (result["frame"], result["width"], result["height"]) == (7, 16, 8)
    board.clock.turn(0.9)
    assert board.refusal() == "command.busy"
    board.clock.turn(0.2)
    assert board.snapshot().status == "SUCCEEDED"
    assert len(board.pictures) == 2


def test_there_is_no_picture_before_the_first_frame() -> None:
    assert Board(frame=None).refusal() == "command.snapshot"
