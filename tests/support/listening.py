"""A results socket that is listened to."""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Callable
from typing import Any

from agent.common.errors import AgentError
from agent.mqtt.message import HeldMessage, Message


class Listening:
    """A link to nowhere that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.states: list[str] = []
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.recognised: queue.SimpleQueue[HeldMessage] = queue.SimpleQueue()
        self.labels: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.acks: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.desired: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.model_chunks: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.delivered_results: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[AgentError] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.drops: dict[str, int] = {}
        self.enough: Callable[[], object] = lambda: False  # then the daemon ends, as by its user
        self._ended = False

    @property
    def outbox(self) -> Listening:
        """It keeps what that is given, too."""
        return self

    def put(self, _kind: str, _rank: int, document: Callable[[int, int], bytes]) -> None:
        self._keep(document(1, 1 + len(self.sent)))

    def send(self, message: Any) -> None:
        self._keep(message.to_json())

    def reply(self, _reply: Any, _result: Any) -> None:
        """Ignore it: no sender here names a topic of its own."""

    def answer_births(self) -> None:
        """There is no Home Assistant."""

    def _keep(self, document: bytes) -> None:
        self.sent.append(json.loads(document))
        if not self._ended and self.enough():
            self._ended = True
            os.kill(os.getpid(), signal.SIGTERM)

    def set_state(self, state: str, _reason: str = "") -> None:
        if self.states[-1:] != [state]:
            self.states.append(state)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if message.get("kind") == kind]

    def cameras(self) -> list[dict[str, Any]]:
        return [message["cameras"]["camera"] for message in self.sent if "cameras" in message]
