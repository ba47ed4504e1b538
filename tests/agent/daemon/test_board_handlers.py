"""The operator's commands to the board, without a daemon around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent.commands.dispatcher import CommandProgress
from agent.common.errors import CommandError
from agent.contract.commands import CommandResult, SnapshotArgs
from agent.daemon import handlers
from agent.daemon.handlers import BoardHandlers

FRAME = SimpleNamespace(id=7, ts=1.5, image=np.zeros((8, 16, 3), np.uint8))


class Board:
    """The parts of it that its handlers use. allowed: privacy.snapshot."""

    def __init__(self, allowed: bool = True, frame: Any = FRAME) -> None:
        self.pictures: list[bytes] = []
        settings = SimpleNamespace(config=SimpleNamespace(privacy=SimpleNamespace(snapshot=allowed)))
        link = SimpleNamespace(send_snapshot=self.pictures.append)
        newest = SimpleNamespace(frame=frame) if frame is not None else None
        parts: list[Any] = [settings, SimpleNamespace(feeds={"gate": SimpleNamespace(newest=newest)}), link]
        self._handlers = BoardHandlers(*parts, stop=lambda _reason: None)

    def snapshot(self) -> CommandResult:
        results: list[CommandResult] = []
        self._handlers.handlers["snapshot"](SnapshotArgs(), CommandProgress("c1", results.append))
        return results[-1]

    def refusal(self) -> str:
        with pytest.raises(CommandError) as caught:
            self.snapshot()
        return caught.value.code


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(handlers, "time", SimpleNamespace(monotonic=lambda: found.now_s))
    return found


def test_a_picture_a_second_and_no_more(clock: SimpleNamespace) -> None:
    board = Board()
    result = board.snapshot().result
    assert result is not None
    assert (result["frame"], result["width"], result["height"]) == (7, 16, 8)
    clock.now_s += 0.9
    assert board.refusal() == "command.busy"
    clock.now_s += 0.2
    assert board.snapshot().status == "SUCCEEDED"
    assert len(board.pictures) == 2


def test_no_picture_leaves_without_its_owners_leave() -> None:
    board = Board(allowed=False)
    assert board.refusal() == "command.privacy"
    assert not board.pictures


def test_before_the_first_frame_there_is_none() -> None:
    assert Board(frame=None).refusal() == "command.snapshot"
