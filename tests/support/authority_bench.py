"""A board that obeys signed words, with the keys of who may command it and of who may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device import NOW, TOPICS, Device
from kept import kept_in

from agent.commands.authority import Authority
from agent.commands.dispatcher import CommandDispatcher
from agent.commands.log import CommandLog
from agent.config import CommandsConfig
from agent.contract.commands import CommandResult
from agent.contract.signing import Signer, new_key


class Board:
    """Its keys: ann and bob operate, rel releases; eve has a key of her own."""

    def __init__(self, folder: Path, local: bool = False, **config: Any) -> None:
        self.folder = folder
        self.keys = {name: Signer(_key(folder / name)) for name in ("ann", "bob", "rel", "eve")}
        self.synchronised = True
        keys = {"operator_keys": [folder / "ann.pub", folder / "bob.pub"], "release_keys": [folder / "rel.pub"]}
        self.authority = Authority(CommandsConfig(**{**keys, **config}), TOPICS, local, lambda: self.synchronised)
        self.restart()

    def restart(self) -> None:
        self.device = Device()
        self.results: list[CommandResult] = []
        self.state = kept_in(self.folder)
        journal = CommandLog(self.state)
        self.desk = CommandDispatcher(
            self.device.handlers(), self.results.append, command_log=journal, authority=self.authority
        )

    def receive(self, payload: bytes, now: float = NOW) -> tuple[str, str]:
        """The status and the code that this command ends with."""
        self.desk.receive(payload, now)
        last = self.results[-1]
        return last.status, last.error.code if last.error else ""

    @property
    def did(self) -> int:
        return len(self.device.done_with) + len(self.device.jobs) + self.device.status_calls

    def order(self, key: str | None = "ann", **changes: Any) -> bytes:
        fields = {"id": "c1", "op": "restart", "args": {}, "issued": NOW, "expires": NOW + 60, "version": 1}
        document = {**fields, "to": "fleet/board", **changes}
        return json.dumps(self.keys[key].sign(document) if key else document).encode()


def _key(path: Path) -> Path:
    private = path.with_suffix(".key")
    return private if private.exists() else new_key(path)[0]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)
