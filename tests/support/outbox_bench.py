"""An outbox on a disk: rows put in, taken as by a link, and looked at where they are stored."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from brokers import eventually
from device import TOPICS

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.mqtt.config import OutboxConfig
from agent.mqtt.message import Message
from agent.uplink.outbox import Outbox
from agent.uplink.outbox_store import ALARM

AT_ONCE = {"commit_s": 0.0, "backlog_per_s": 10_000.0}


@contextmanager
def opened(folder: Path, clock: Clock = SYSTEM_CLOCK, **config: Any) -> Iterator[Outbox]:
    with Outbox(folder / "outbox.sqlite", TOPICS, OutboxConfig(**{**AT_ONCE, **config}), clock) as outbox:
        yield outbox


def put(outbox: Outbox, count: int, kind: str = "alarm", rank: int = ALARM, size: int = 0) -> None:
    for _ in range(count):
        outbox.put(kind, rank, lambda epoch, seq: json.dumps({"epoch": epoch, "seq": seq, "x": "x" * size}).encode())


def popped(outbox: Outbox, count: int) -> list[Message]:
    """The next so many messages."""
    messages: list[Message] = []

    def collect() -> bool:
        message = outbox.pop()
        messages.extend([message] if message is not None else [])
        return message is not None

    while len(messages) < count:
        eventually(collect)
    return messages


def taken(outbox: Outbox, count: int, deliver: bool = True) -> list[dict[str, Any]]:
    """The next so many documents; PUBACKed at once, or not."""
    messages = popped(outbox, count)
    if deliver:
        for message in messages:
            outbox.delivered(message)
    return [json.loads(message.payload) for message in messages]


def numbers(documents: list[dict[str, Any]]) -> list[int]:
    return [document["seq"] for document in documents]


def stored(folder: Path) -> list[tuple[int, int]]:
    """Number, and whether a broker has it, of each row on the disk."""
    with closing(sqlite3.connect(folder / "outbox.sqlite")) as db:
        return db.execute("SELECT seq, sent FROM rows ORDER BY epoch, seq").fetchall()
