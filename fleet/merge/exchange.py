"""Request histograms from boards, a few boards at a time, until each has sent them or there is a reason why not.

Each board gets a command, which is repeated while the board is silent. Its result announces an upload, whose chunks go
to the inbox. A board whose chunks are lost gets a new command, for the missing ones.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.timing import Backoff
from agent.contract.commands import CommandResult
from agent.contract.messages import NEWER_SCHEMA, Status
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from agent.contract.wire import MessageError
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.receive_queue import ReceiveQueue
from fleet.merge.inbox import AnnouncedUpload, UploadInbox
from fleet.operator import REPEAT_S, RepeatedCommand, may_answer_forged_command, new_command, wait_connected
from fleet.untrusted import Warnings

log = logging.getLogger(__package__)

_QUEUE_BYTES = 16 << 20  # more messages wait at the broker
_BATCH_BYTES = 1 << 20
_CONNECT_S = 10.0
_TOPIC_BYTES = 200  # logged bytes of a topic
_ROUNDS = 8  # commands to one board, for all or for what is missing
_VALID_S = 60.0
_TEMPORARY = ("command.busy", "command.interrupted")  # refusals after which a new command may succeed


@dataclass
class _PendingUpload:
    """A board that has been sent a command. Times are monotonic.

    until_s: when it is given up in any case. command: None while a new one is not due yet (`pause_until_s`).
    """

    topics: Topics
    until_s: float
    rounds: int = 0
    command: RepeatedCommand | None = None
    pause_until_s: float = 0.0


class MergeExchange:
    """Fetch uploads from boards. `inbox.complete` has what came; `failed` says by device why nothing came.

    In one thread, but for the MQTT client's.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        fleet: str,
        folder: Path,
        at_once: int,
        silence_s: float,
        signer: Signer | None = None,
        most_s: float = 1800.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare an exchange. Raises AgentError as UploadInbox.

        Args:
            folder: Where uploads are kept.
            at_once: How many boards send at a time.
            silence_s: After so many silent seconds a board is given up.
            signer: The operator's key.
            most_s: The most seconds for one board, so that one that sends nothing useful does not block the others.
        """
        self.inbox = UploadInbox(folder)
        self.failed: dict[str, str] = {}
        self._fleet, self._clock = fleet, clock
        self._at_once = at_once
        self._silence_s = silence_s
        self._signer = signer
        self._most_s = most_s
        self._warnings = Warnings(log, "merge", clock)
        self._pending: dict[str, _PendingUpload] = {}
        self._online: set[str] = set()
        self._endpoint = endpoint
        self._queue = ReceiveQueue(_QUEUE_BYTES)
        topics = [f"tared/v1/{fleet}/+/{path}" for path in ("status", "cmd/+/result", "histograms/+/+")]
        session = SessionOptions(subscriptions=topics, backoff=Backoff(0.2, 2.0), receive_queue=self._queue)
        self._client = MqttClient(endpoint, f"tared-merge-{uuid.uuid4().hex}", session)

    def gather(
        self,
        devices: Collection[str],
        within_s: float,
        advance: Callable[[str, float], None] = lambda _doing, _fraction: None,
    ) -> None:
        """Request the uploads of these boards, or of all that are online within `within_s` seconds if none is named.

        Raises AgentError: broker.unreachable  there is no connection; and as UploadInbox.
        """
        with self._client:
            wait_connected(self._client, self._endpoint, _CONNECT_S)
            waiting = deque(sorted(devices))
            if not devices:
                self._receive(self._clock.monotonic_s() + within_s)
                waiting = deque(sorted(self._online))
            total = len(waiting)
            while waiting or self._pending:
                while waiting and len(self._pending) < self._at_once:
                    self._start(waiting.popleft())
                self._receive(self._clock.monotonic_s() + 0.1)
                self._repeat(self._clock.monotonic_s())
                advance("gathering", 1.0 - (len(waiting) + len(self._pending)) / total)

    def _start(self, device: str) -> None:
        try:
            self._pending[device] = _PendingUpload(
                Topics(self._fleet, device), self._clock.monotonic_s() + self._most_s
            )
        except AgentError as error:
            self.failed[device] = str(error)
            return
        self._send_command(device)

    def _send_command(self, device: str) -> None:
        """Send a new command, for the whole upload or for what is missing."""
        pending, missing = self._pending[device], self.inbox.missing(device)
        arguments: dict[str, Any] = {"upload": missing[0], "missing": missing[1]} if missing is not None else {}
        to = pending.topics if self._signer is not None else None
        command = new_command("histograms", arguments, self._clock.wall_s(), _VALID_S, to)
        pending.rounds += 1
        pending.command = RepeatedCommand(self._client, pending.topics, command, self._signer, self._clock)

    def _repeat(self, now_s: float) -> None:
        """Repeat the commands of silent boards, and give up boards that took too long."""
        for device, pending in list(self._pending.items()):
            command = pending.command
            if command is not None and now_s - command.answered_s > self._silence_s:
                self._fail(device, f"silent for {self._silence_s:.0f} s")
            elif now_s > pending.until_s:
                self._fail(device, f"upload incomplete after {self._most_s:.0f} s, though the board was not silent")
            elif command is not None:
                command.repeat_if_due()
            elif now_s >= pending.pause_until_s:
                self._send_command(device)

    def _receive(self, until_s: float) -> None:
        while (left_s := until_s - self._clock.monotonic_s()) > 0.0:
            for topic, payload, _ in self._queue.pop(_BATCH_BYTES, left_s, 0.0):
                try:
                    _, _, _, device, kind, *rest = topic.decode().split("/")
                    self._receive_one(device, kind, rest, payload)
                except (MessageError, UnicodeDecodeError) as error:  # noqa: PERF203  of that one, not of all
                    self._warnings.warn("refused", f"topic={topic[:_TOPIC_BYTES]!r} error={str(error)!r}")

    def _receive_one(self, device: str, kind: str, rest: Sequence[str], payload: bytes) -> None:
        """Raises MessageError."""
        if kind == "status":
            if Status.from_json(payload).state in ("online", "degraded"):
                self._online.add(device)
            return
        pending = self._pending.get(device)
        if pending is None:
            return
        command = pending.command
        if kind == "cmd" and command is not None and rest[0] == command.id:
            command.note_answer()
            self._receive_result(device, pending, payload)
        elif kind == "histograms":
            try:
                is_complete = self.inbox.receive_chunk(device, rest[0], rest[1], payload)
            except MessageError as error:
                if error.code not in ("histograms.sha256", "histograms.unreadable"):
                    raise
                self._retry(device, pending, str(error))
                return
            if is_complete:
                del self._pending[device]
            elif command is not None:
                command.note_answer()

    def _receive_result(self, device: str, pending: _PendingUpload, payload: bytes) -> None:
        """Raises MessageError, except for a newer tared's result: that board has no other to give, and has failed."""
        try:
            result = CommandResult.from_json(payload)
        except MessageError as error:
            if error.code != NEWER_SCHEMA:
                raise
            self._fail(device, str(error))
            return
        if result.result is not None:
            self.inbox.expect(device, AnnouncedUpload.from_result(result.result))
        if result.error is not None:
            is_doubtful = self._signer is not None and may_answer_forged_command(result)
            if is_doubtful or result.error.code in _TEMPORARY:
                self._retry(device, pending, result.error.message)
            else:
                self._fail(device, f"{result.error.code}: {result.error.message}")
        elif result.final:  # chunks have been lost, or wait behind the result at the broker
            self._retry(device, pending, "chunks that do not arrive")

    def _retry(self, device: str, pending: _PendingUpload, why: str) -> None:
        """Send a new command after a pause, unless there were enough."""
        if pending.rounds >= _ROUNDS:
            self._fail(device, why)
        else:
            pending.command = None
            pending.pause_until_s = self._clock.monotonic_s() + REPEAT_S

    def _fail(self, device: str, why: str) -> None:
        self.failed[device] = why
        del self._pending[device]
