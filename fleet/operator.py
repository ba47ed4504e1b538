"""The operator's side of a command: send it, repeat it until it is answered, follow it to its end."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import queue
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.common.errors import AgentError, CommandError
from agent.common.schema import Strict
from agent.common.timing import Backoff
from agent.contract.commands import (
    MODEL_CHUNK_BYTES,
    MODEL_CHUNKS_REQUESTED,
    OPS,
    RECEIVING,
    Command,
    CommandResult,
    FileArgs,
)
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from agent.contract.wire import MessageError
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.message import Message

REPEAT_S = 2.0
_MOST_EXPIRY_S = 2**32 - 1  # of an MQTT 5 message (section 3.3.2.3.3)

_DOUBTED_FOR = 3  # times REPEAT_S: for the answer to our own command, where what was refused may be another's
_TYPED = (
    "model",
    "histograms",
    "calibration",
)  # ops whose arguments are no text: nobody types a hash, or a list of numbers
_UNPROVEN = ("message.", "command.unsigned", "command.signature", "command.target")

log = logging.getLogger(__package__)


def new_command(
    op: str,
    arguments: Mapping[str, Any],
    now: float,
    valid_s: float = 60.0,
    to: Topics | None = None,
    version: int | None = None,
) -> Command:
    """A command from what was typed, such as `recalibrate` and `{"frames": "512"}`; of `set` the keys and values, which
    are JSON where they can be read as such.

    It must reach the device within `valid_s` of `now` (Unix time in seconds), by the device's clock. to: the device's
    topics, for a command that is to be signed. version: None for one that rises with time where the op needs that.
    Raises CommandError for an op or arguments that no device would accept.
    """
    schema = OPS.get(op)
    if schema is None:
        raise CommandError("command.unknown_op", f"op {op!r}", "one of " + ", ".join(OPS), "correct the op")
    try:
        if op == "set":
            args = schema.model_validate({"values": {key: as_json(value) for key, value in arguments.items()}})
        elif op in _TYPED:
            args = schema.model_validate(dict(arguments))
        else:
            args = schema.model_validate_strings(dict(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = f"{'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}"
        known = ", ".join(f"{name}=..." for name in schema.model_fields) or "no arguments"
        raise CommandError("command.args", found, known, "correct the arguments") from None
    if version is None:
        version = int(now * 1000.0) if op == "set" else 1
    return command_from_args(op, args, now, valid_s, to, version)


def command_from_args(op: str, args: Strict, now: float, valid_s: float, to: Topics | None, version: int) -> Command:
    """As `new_command`, of arguments that are ones."""
    name = f"{to.fleet}/{to.device}" if to is not None else None
    expires = now + valid_s
    return Command(id=uuid.uuid4().hex, op=op, args=args, issued=now, expires=expires, version=version, to=name)


def file_arguments(file: Path, url: str | None = None, release: Path | None = None) -> dict[str, Any]:
    """Of `model` and `calibration`, for the file at hand, and the statement of `tared release` about a model. Raises
    CommandError (`command.args`)."""
    try:
        with file.open("rb") as opened:
            digest = hashlib.sha256()
            while block := opened.read(1 << 20):
                digest.update(block)
        arguments: dict[str, Any] = {"sha256": digest.hexdigest(), "size": file.stat().st_size, "url": url}
        if release is not None:
            arguments["release"] = json.loads(release.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError("command.args", str(error), "a file, and JSON about a model", "correct the paths") from None
    return arguments


def send(
    endpoint: Endpoint,
    topics: Topics,
    command: Command,
    silence_s: float = 30.0,
    signer: Signer | None = None,
    file: Path | None = None,
) -> Iterator[CommandResult]:
    """Send `command` and yield its results as they come, up to the final one.

    signer: the operator's key that signs it. file: whose pieces the device asks for.

    It is sent again whenever REPEAT_S passed in silence: that is how it reaches a device that was away, and
    how a result that was lost comes once more. A device that works answers each time, so only one that is
    gone is silent. A refusal of what nobody has signed, or another, ends no signed command before that was sent once
    more. Raises AgentError (`broker.unreachable`), CommandError (`command.no_answer`) after
    `silence_s`; an answer that is no result counts for nothing.
    """
    client_id = f"tared-operator-{uuid.uuid4().hex}"
    results = [topics.result(command.id)]
    payload = encode_command(command, signer)
    with MqttClient(endpoint, client_id, SessionOptions(subscriptions=results, backoff=Backoff(0.2, 2.0))) as client:
        if not client.wait_connected(silence_s):
            found = f"no connection to {endpoint.host}:{endpoint.port} ({client.outcome})"
            remedy = "check that it runs, its address, user name and password"
            raise AgentError("broker.unreachable", found, "an MQTT broker", remedy)
        latest = None
        for result in _answers(client, topics, command, payload, silence_s, signer is not None):
            if file is not None and isinstance(command.args, FileArgs):
                for chunk in requested_chunks(topics, command.args, file, result):
                    client.publish(chunk)
            if result != latest:
                latest = result
                yield result


def _answers(
    client: MqttClient, topics: Topics, command: Command, payload: bytes, silence_s: float, signed: bool
) -> Iterator[CommandResult]:
    """All results, as often as they come, up to the final one. Raises CommandError as `send`."""
    latest: CommandResult | None = None
    doubted: CommandResult | None = None
    unread = ""
    heard_at = asked_at = doubted_at = time.monotonic()
    client.publish(command_message(topics, payload, command.expires))
    while latest is None or not latest.final:
        now = time.monotonic()
        if doubted is not None and now - doubted_at > _DOUBTED_FOR * REPEAT_S:
            yield doubted
            return
        if now - heard_at > silence_s:
            raise _no_answer(topics, latest, silence_s, unread)
        if now - max(asked_at, heard_at) >= REPEAT_S:
            client.publish(command_message(topics, payload, command.expires))
            asked_at = now
        try:
            result = CommandResult.from_json(client.inbox.get(timeout=REPEAT_S).payload)
        except queue.Empty:
            continue
        except MessageError as error:  # whoever sends such does not end what the device is at
            log.warning("result=unreadable id=%s error=%r", command.id, str(error))
            unread = f", but what cannot be read: {error}"
            continue
        if signed and may_answer_forged_command(result):
            if doubted is None:  # the device is there: it will answer ours too
                doubted, doubted_at = result, time.monotonic()
                client.publish(command_message(topics, payload, command.expires))
            continue
        latest, doubted, heard_at = result, None, time.monotonic()
        yield result


def may_answer_forged_command(result: CommandResult) -> bool:
    """Whether it refuses what may not be our command: nobody's word is needed to be refused under its id."""
    return result.error is not None and result.error.code.startswith(_UNPROVEN)


def encode_command(command: Command, signer: Signer | None) -> bytes:
    """The document that goes to the board, with the operator's signature where there is a key."""
    payload = command.to_json()
    return payload if signer is None else json.dumps(signer.sign(json.loads(payload))).encode()


def command_message(topics: Topics, payload: bytes, expires: float) -> Message:
    """What a broker need not keep for a device that is away once the command has expired, at that Unix time in s; a
    second is the least."""
    left_s = math.ceil(expires - time.time())
    return Message(topics.command, payload, expires_s=min(max(left_s, 1), _MOST_EXPIRY_S))


def requested_chunks(topics: Topics, args: FileArgs, path: Path, asked: CommandResult) -> Iterator[Message]:
    """A few of those that the device asks for with this result, if it does; it asks again before it has them all."""
    first = (asked.result or {}).get("next")
    if asked.step != RECEIVING or not isinstance(first, int) or not 0 <= first <= args.size:
        return
    with path.open("rb") as file:
        file.seek(first * MODEL_CHUNK_BYTES)
        for number in range(first, first + MODEL_CHUNKS_REQUESTED):
            if not (chunk := file.read(MODEL_CHUNK_BYTES)):
                return
            yield Message(topics.model_chunk(args.sha256, number), chunk)


def as_json(text: Any) -> Any:
    """`0.2` is a number, `true` a truth, and `info` a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _no_answer(topics: Topics, latest: CommandResult | None, silence_s: float, unread: str) -> CommandError:
    said = "no answer" if latest is None else f"nothing after {latest.status}"
    found = f"{said} from {topics.fleet}/{topics.device} for {silence_s:.0f} s{unread}"
    remedy = f"see whether it is online: 'tared watch {topics.device}', with the same options for the broker"
    return CommandError("command.no_answer", found, "a result", remedy)
