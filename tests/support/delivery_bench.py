"""A board that a model of a few chunks is delivered to."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from brokers import eventually
from turned_clock import TurnedClock

from agent.commands.authority import Releases
from agent.commands.deliveries import FileReceiver, ModelAdmission, StagedModel
from agent.commands.dispatcher import CommandProgress
from agent.contract.commands import MODEL_CHUNK_BYTES, CommandResult, ModelArgs
from agent.state.store import StateStore

CONTENT = bytes(range(256)) * 400  # 3 chunks and a bit
SHA = hashlib.sha256(CONTENT).hexdigest()


class Board:
    """`try_out` accepts each file, which becomes `model`; `step` runs the calls that other threads have posted."""

    def __init__(self, folder: Path, watched: bool = True, reserve_bytes: int = 0) -> None:
        self.model = folder / "served" / "model.onnx"
        self.model.parent.mkdir(exist_ok=True)
        self.model.write_bytes(b"before")
        self.incoming = folder / "state" / "incoming"
        self.results: list[CommandResult] = []
        self.clock = TurnedClock()
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        admit = ModelAdmission(self.model, watched, reserve_bytes, Releases(None, StateStore(None)))
        self.delivery = FileReceiver(self.incoming, reserve_bytes, self._posted.put, admit, self.try_out, self.clock)

    def try_out(self, staged: StagedModel) -> None:
        assert self.model.is_dir() or self.model.read_bytes() == b"before", "not before it has been tried"
        assert staged.file.read_bytes() == CONTENT
        staged.install()
        staged.progress.succeed()

    def begin(self, url: str | None = None, **changes: Any) -> None:
        args = ModelArgs(**{"sha256": SHA, "size": len(CONTENT), "url": url, **changes})
        self.delivery.start(args, CommandProgress(f"c{len(self.results)}", self.results.append))

    def chunk(self, number: int, sha: str = SHA, content: bytes | None = None) -> None:
        at = number * MODEL_CHUNK_BYTES
        part = CONTENT[at : at + MODEL_CHUNK_BYTES] if content is None else content
        self.delivery.receive(f"tared/v1/fleet/board/model/{sha}/{number}", part)

    def step(self) -> CommandResult:
        """The latest result."""
        self.delivery.tick()
        while not self._posted.empty():
            self._posted.get()()
        return self.results[-1]

    def end(self) -> str:
        """The status, or the error's words, at the end."""
        eventually(lambda: self.step().final)
        last = self.results[-1]
        return last.status if last.error is None else last.error.message

    @property
    def wanted(self) -> int:
        """The chunk that it asked for last."""
        return next(int(str(each.result["next"])) for each in reversed(self.results) if each.result)

    @property
    def kept(self) -> int:
        return sum(path.stat().st_size for path in self.incoming.iterdir())


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)
