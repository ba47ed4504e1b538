"""Boards are asked for their histograms, a few at a time, until each has sent them or there is a reason why not."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.common.errors import AgentError
from agent.common.timing import Backoff
from agent.contract.commands import CommandResult
from agent.contract.messages import NEWER_SCHEMA, Status
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from agent.contract.wire import MessageError
from agent.mqtt.bulk_receive import ReceiveQueue
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.message import Message
from fleet.merge.inbox import AnnouncedUpload, UploadInbox
from fleet.operator import REPEAT_S, command_message, encode_command, may_answer_forged_command, new_command
from fleet.untrusted import Warnings

log = logging.getLogger(__package__)

_INTAKE_BYTES = 16 << 20  # what comes faster waits with the broker
_BATCH_BYTES = 1 << 20
_CONNECT_S = 10.0
_MOST_S = 1800.0
_TOLD_BYTES = 200  # of a topic
_ROUNDS = 8  # in which a board is asked again for what is missing
_VALID_S = 60.0
_PASSING = ("command.busy", "command.interrupted")  # refusals after which it is worth to ask again


@dataclass
class _PendingUpload:
    """A board that has been asked. since_s: when something was heard of it last, or it was asked first; until_s: when
    it is given up, whatever it says; monotonic."""

    topics: Topics
    since_s: float
    until_s: float
    rounds: int = 0
    command: Message | None = None
    command_id: str = ""
    asked_s: float = 0.0
    pause_until_s: float = 0.0


class MergeExchange:
    """`failed` says of each board that has sent nothing why; what has come is in `inbox.whole`.

    at_once: so many boards at a time. silence_s: after which a board is given up. signer: the operator's key. most_s:
    that a board has in all, for one that only says that it is at it would keep all others waiting.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        fleet: str,
        folder: Path,
        at_once: int,
        silence_s: float,
        signer: Signer | None = None,
        most_s: float = _MOST_S,
    ) -> None:
        """Raises AgentError as UploadInbox."""
        self.inbox = UploadInbox(folder)
        self.failed: dict[str, str] = {}
        self._fleet = fleet
        self._at_once = at_once
        self._silence_s = silence_s
        self._signer = signer
        self._most_s = most_s
        self._warnings = Warnings(log, "merge")
        self._asked: dict[str, _PendingUpload] = {}
        self._endpoint = endpoint
        own = f"tared/v1/{fleet}/+"
        self._intake = ReceiveQueue(_INTAKE_BYTES)
        self._client = MqttClient(
            endpoint,
            f"tared-merge-{uuid.uuid4().hex}",
            SessionOptions(
                subscriptions=[f"{own}/status", f"{own}/cmd/+/result", f"{own}/histograms/+/+"],
                backoff=Backoff(0.2, 2.0),
                receive_queue=self._intake,
            ),
        )
        self._online: set[str] = set()

    def gather(
        self, devices: Collection[str], within_s: float, advance: Callable[[str, float], None] = lambda _do, _part: None
    ) -> None:
        """Ask these boards; where none is named, all that are there within so many seconds.

        Raises AgentError (`broker.unreachable`), and as UploadInbox.
        """
        with self._client:
            if not self._client.wait_connected(_CONNECT_S):
                found = f"no connection to {self._endpoint.host}:{self._endpoint.port} ({self._client.outcome})"
                raise AgentError("broker.unreachable", found, "an MQTT broker", "check that it runs, and its address")
            waiting = deque(sorted(devices) or self._present(within_s))
            total = len(waiting)
            while waiting or self._asked:
                while waiting and len(self._asked) < self._at_once:
                    self._begin(waiting.popleft())
                self._hear(time.monotonic() + 0.1)
                self._repeat(time.monotonic())
                advance("gathering", 1.0 - (len(waiting) + len(self._asked)) / total)

    def _present(self, within_s: float) -> Sequence[str]:
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            self._hear(min(until_s, time.monotonic() + 0.1))
        return sorted(self._online)

    def _begin(self, device: str) -> None:
        try:
            now_s = time.monotonic()
            self._asked[device] = _PendingUpload(Topics(self._fleet, device), now_s, now_s + self._most_s)
        except AgentError as error:
            self.failed[device] = str(error)
            return
        self._ask(device)

    def _ask(self, device: str) -> None:
        """With a new command, for all or for what is missing."""
        asked, missing = self._asked[device], self.inbox.missing(device)
        arguments: dict[str, Any] = {"upload": missing[0], "missing": missing[1]} if missing is not None else {}
        to = asked.topics if self._signer is not None else None
        command = new_command("histograms", arguments, time.time(), _VALID_S, to)
        asked.rounds += 1
        asked.command_id = command.id
        asked.command = command_message(asked.topics, encode_command(command, self._signer), command.expires)
        self._publish(asked)

    def _publish(self, asked: _PendingUpload) -> None:
        if asked.command is not None:
            asked.asked_s = time.monotonic()
            self._client.publish(asked.command)

    def _repeat(self, now_s: float) -> None:
        """Say it again to whoever is silent, give up who has been for too long."""
        for device, asked in list(self._asked.items()):
            if now_s - asked.since_s > self._silence_s:
                self._fail(device, f"silent for {self._silence_s:.0f} s")
            elif now_s > asked.until_s:
                self._fail(device, f"not all of it in {self._most_s:.0f} s, though it was not silent")
            elif asked.command is None and now_s >= asked.pause_until_s:
                self._ask(device)
            elif now_s - max(asked.since_s, asked.asked_s) >= REPEAT_S:
                self._publish(asked)

    def _hear(self, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0.0:
            for topic, payload, _ in self._intake.pop(_BATCH_BYTES, left_s, 0.0):
                self._hear_one(topic, payload)

    def _hear_one(self, topic: bytes, payload: bytes) -> None:
        try:
            _, _, _, device, kind, *rest = topic.decode().split("/")
            self._take(device, kind, rest, payload)
        except (MessageError, UnicodeDecodeError) as error:
            self._warnings.warn("refused", f"topic={topic[:_TOLD_BYTES]!r} error={str(error)!r}")

    def _take(self, device: str, kind: str, rest: Sequence[str], payload: bytes) -> None:
        """Raises MessageError."""
        if kind == "status":
            if Status.from_json(payload).state in ("online", "degraded"):
                self._online.add(device)
            return
        asked = self._asked.get(device)
        if asked is None:
            return
        if kind == "cmd" and rest[0] == asked.command_id:
            asked.since_s = time.monotonic()
            self._hear_answer(device, asked, payload)
        elif kind == "histograms":
            self._chunk(device, asked, rest[0], rest[1], payload)

    def _chunk(self, device: str, asked: _PendingUpload, name: str, number: str, payload: bytes) -> None:
        """Raises MessageError."""
        try:
            whole = self.inbox.receive_chunk(device, name, number, payload)
        except MessageError as error:
            if error.code not in ("histograms.sha256", "histograms.unreadable"):
                raise
            self._again(device, asked, str(error))
            return
        asked.since_s = time.monotonic()
        if whole:
            del self._asked[device]

    def _hear_answer(self, device: str, asked: _PendingUpload, payload: bytes) -> None:
        """Raises MessageError, but of a board whose tared is too new: no other answer is to be had of that."""
        try:
            result = CommandResult.from_json(payload)
        except MessageError as error:
            if error.code != NEWER_SCHEMA:
                raise
            self._fail(device, str(error))
        else:
            self._answered(device, asked, result)

    def _answered(self, device: str, asked: _PendingUpload, result: CommandResult) -> None:
        """Raises MessageError."""
        if result.result is not None:
            self.inbox.expect(device, AnnouncedUpload.from_result(result.result))
        if result.error is not None:
            doubtful = self._signer is not None and may_answer_forged_command(result)
            if doubtful or result.error.code in _PASSING:
                self._again(device, asked, result.error.message)
            else:
                self._fail(device, f"{result.error.code}: {result.error.message}")
        elif result.final:  # and chunks have been lost, or wait behind it with the broker
            self._again(device, asked, "chunks that do not arrive")

    def _again(self, device: str, asked: _PendingUpload, why: str) -> None:
        """In a moment, unless it was often enough."""
        if asked.rounds >= _ROUNDS:
            self._fail(device, why)
        else:
            asked.command, asked.command_id = None, ""
            asked.pause_until_s = time.monotonic() + REPEAT_S

    def _fail(self, device: str, why: str) -> None:
        self.failed[device] = why
        del self._asked[device]
