"""Send a command to a board as its operator: repeat it until the board answers, and follow it to its end.

`new_command` makes a command of what was typed, `send` sends one and yields its results, `receive_snapshots` receives
the picture of a `snapshot`. Rollouts and merges send many commands at a time; they use the parts: `encode_command`,
`command_message`, `requested_chunks`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import queue
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.common.clock import SYSTEM_CLOCK, Clock
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
    SetArgs,
)
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from agent.contract.wire import MessageError
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.message import Message

REPEAT_S = 2.0
_MOST_EXPIRY_S = 2**32 - 1  # the longest expiry of an MQTT 5 message (section 3.3.2.3.3)

_DOUBTED_FOR = 3  # times REPEAT_S: how long to wait for another answer after a refusal that may be another command's
FILES = tuple(op for op, each in OPS.items() if issubclass(each.args, FileArgs))
_UNPROVEN = ("message.", "command.unsigned", "command.signature", "command.target")

_JPEG = b"\xff\xd8\xff"  # how each begins

ReceiveSnapshot = Callable[[CommandResult], bytes]

log = logging.getLogger(__package__)


def new_command(
    op: str,
    arguments: Mapping[str, Any],
    now: float,
    valid_s: float = 60.0,
    to: Topics | None = None,
    version: int | None = None,
) -> Command:
    """Make a command of what was typed.

    Args:
        op: Such as `recalibrate`.
        arguments: Such as `{"frames": "512"}`, all as text, or none. For `set`, the keys and values; values are read
            as JSON if they are.
        now: Unix time in s.
        valid_s: The command must reach the device within so many seconds of `now`, by the device's clock.
        to: The device's topics, if the command will be signed.
        version: None: one that rises with time, if the op needs one.

    Raises CommandError:
        command.unknown_op   no device knows the op
        command.args         no device would accept the arguments
    """
    if op not in OPS:
        raise CommandError("command.unknown_op", f"op {op!r}", "one of " + ", ".join(OPS), "correct the op")
    schema = OPS[op].args
    given = dict(arguments)
    if schema is SetArgs:
        given = {"values": {key: as_json(value) for key, value in given.items()}}
    is_text = all(isinstance(value, str) for value in given.values())
    try:
        args = schema.model_validate_strings(given) if is_text else schema.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = f"{'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}"
        known = ", ".join(f"{name}=..." for name in schema.model_fields) or "no arguments"
        raise CommandError("command.args", found, known, "correct the arguments") from None
    if version is None:
        version = int(now * 1000.0) if OPS[op].versioned else 1
    return command_from_args(op, args, now, valid_s, to, version)


def command_from_args(op: str, args: Strict, now: float, valid_s: float, to: Topics | None, version: int) -> Command:
    """Make a command, as `new_command`, of parsed arguments."""
    name = f"{to.fleet}/{to.device}" if to is not None else None
    expires = now + valid_s
    return Command(id=uuid.uuid4().hex, op=op, args=args, issued=now, expires=expires, version=version, to=name)


def file_arguments(file: Path, url: str | None = None, release: Path | None = None) -> dict[str, Any]:
    """Return the arguments of `model` or `calibration` for this file.

    url: where boards download the file; None: they get its chunks from us. release: the statement of `tared release`
    about a model. Raises CommandError (`command.args`).
    """
    try:
        digest = hashlib.sha256()
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
        arguments: dict[str, Any] = {"sha256": digest.hexdigest(), "size": file.stat().st_size, "url": url}
        if release is not None:
            arguments["release"] = json.loads(release.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError("command.args", str(error), "a file, and JSON about a model", "correct the paths") from None
    return arguments


def file_arguments_from(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Return the arguments of `model` or `calibration`, made of `file=...`, `url=...`, `release=...` and
    `accept=true`.

    Return also the absolute path of the file, unless boards fetch it from `url`. Raises CommandError (`command.args`).
    """
    given = dict(arguments)
    path, url, release = Path(given.pop("file", "")), given.pop("url", None), given.pop("release", None)
    accept = given.pop("accept", None)
    if given or not path.is_file():
        found = ", ".join(given) or f"no file {str(path)!r}"
        raise CommandError(
            "command.args", found, "file=PATH, url=..., release=..., accept=true", "correct the arguments"
        )
    parsed = file_arguments(path, url, Path(release) if release else None)
    if accept is not None:
        parsed["accept"] = accept
    return parsed, None if url is not None else path.resolve()


def send(
    endpoint: Endpoint,
    topics: Topics,
    command: Command,
    silence_s: float = 30.0,
    signer: Signer | None = None,
    file: Path | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Iterator[CommandResult]:
    """Send `command`, and yield its results as they come, up to the final one.

    The command is sent again after REPEAT_S of silence. So it reaches a device that was away, and a lost result comes
    once more. A device that works answers each time, so only one that is gone is silent. A refusal that may belong to
    a forged command under the same id (see `may_answer_forged_command`) does not end a signed command at once: it is
    sent once more first. Unreadable answers are ignored.

    Args:
        silence_s: Give up after so many seconds without an answer.
        signer: The operator's key that signs the command.
        file: The file whose chunks the device will request.

    Raises AgentError:
        broker.unreachable   there is no connection to the broker within `silence_s`
        command.no_answer    (CommandError) the device was silent for `silence_s`
    """
    client_id = f"tared-operator-{uuid.uuid4().hex}"
    results = [topics.result(command.id)]
    with MqttClient(endpoint, client_id, SessionOptions(subscriptions=results, backoff=Backoff(0.2, 2.0))) as client:
        wait_connected(client, endpoint, silence_s)
        latest: CommandResult | None = None
        doubted: CommandResult | None = None
        unread, doubted_at = "", 0.0
        sending = RepeatedCommand(client, topics, command, signer, clock)
        while latest is None or not latest.final:
            now = clock.monotonic_s()
            if doubted is not None and now - doubted_at > _DOUBTED_FOR * REPEAT_S:
                yield doubted
                return
            if now - sending.answered_s > silence_s:
                status = "no answer" if latest is None else f"nothing after {latest.status}"
                found = f"{status} from {topics.fleet}/{topics.device} for {silence_s:.0f} s{unread}"
                remedy = (
                    f"check whether the board is online: 'tared watch {topics.device}', "
                    "with the same options for the broker"
                )
                raise CommandError("command.no_answer", found, "a result", remedy)
            sending.repeat_if_due()
            try:
                result = CommandResult.from_json(clock.get(client.inbox, REPEAT_S).payload)
            except queue.Empty:
                continue
            except MessageError as error:  # its sender must not end what the device does
                log.warning("result=unreadable id=%s error=%r", command.id, str(error))
                unread = f", but what cannot be read: {error}"
                continue
            if signer is not None and may_answer_forged_command(result):
                if doubted is None:  # the device is there, and will answer our command too
                    doubted, doubted_at = result, clock.monotonic_s()
                    sending.send()
                continue
            for chunk in requested_chunks(topics, command.args, file, result) if file is not None else ():
                client.publish(chunk)
            if result != latest:
                yield result
            latest, doubted = result, None
            sending.note_answer()


@contextmanager
def receive_snapshots(
    endpoint: Endpoint, topics: Topics, silence_s: float, clock: Clock = SYSTEM_CLOCK
) -> Iterator[ReceiveSnapshot]:
    """Subscribe to a board's pictures, and yield the function that waits for the one of a succeeded `snapshot`.

    Enter it before the command is sent: a picture is not retained, and comes before its result. One that another
    operator has ordered is recognised by its length.

    Raises AgentError:
        broker.unreachable   there is no connection to the broker within `silence_s`
        command.no_picture   (CommandError, of the function) the picture does not come within `silence_s`
    """
    name = f"tared-operator-{uuid.uuid4().hex}"
    options = SessionOptions(subscriptions=[topics.snapshot], backoff=Backoff(0.2, 2.0))
    with MqttClient(endpoint, name, options) as client:
        wait_connected(client, endpoint, silence_s)

        def receive(result: CommandResult) -> bytes:
            length = (result.result or {}).get("bytes")
            give_up_at = clock.monotonic_s() + silence_s
            while (left_s := give_up_at - clock.monotonic_s()) > 0.0:
                try:
                    picture = clock.get(client.inbox, left_s).payload
                except queue.Empty:
                    break
                if len(picture) == length and picture.startswith(_JPEG):
                    return picture
            found = f"no picture on {topics.snapshot} for {silence_s:.0f} s"
            remedy = (
                "send the command again; check that the broker lets you read the topic, "
                "and passes messages of this length"
            )
            raise CommandError("command.no_picture", found, f"a JPEG of {length} bytes", remedy)

        yield receive


class RepeatedCommand:
    """A command to one board, sent at once, and again after each REPEAT_S of silence.

    answered_s: when the board last answered, or else got the command; monotonic.
    """

    def __init__(
        self,
        client: MqttClient,
        topics: Topics,
        command: Command,
        signer: Signer | None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.id, self._clock = command.id, clock
        self._client, self._topics, self._expires = client, topics, command.expires
        self._payload = encode_command(command, signer)
        self.answered_s = self._clock.monotonic_s()
        self.send()

    def send(self) -> None:
        self._client.publish(command_message(self._topics, self._payload, self._expires, self._clock))
        self._sent_s = self._clock.monotonic_s()

    def repeat_if_due(self) -> None:
        if self._clock.monotonic_s() - max(self._sent_s, self.answered_s) >= REPEAT_S:
            self.send()

    def note_answer(self) -> None:
        self.answered_s = self._clock.monotonic_s()


def wait_connected(client: MqttClient, endpoint: Endpoint, within_s: float) -> None:
    """Wait for the connection to the broker. Raises AgentError (`broker.unreachable`) without one in time."""
    if not client.wait_connected(within_s):
        found = f"no connection to {endpoint.host}:{endpoint.port} ({client.outcome})"
        remedy = "check that the broker runs, and its address, user name and password"
        raise AgentError("broker.unreachable", found, "an MQTT broker", remedy)


def may_answer_forged_command(result: CommandResult) -> bool:
    """Return True for a refusal that anybody can provoke, by sending a bad command under the id of ours."""
    return result.error is not None and result.error.code.startswith(_UNPROVEN)


def encode_command(command: Command, signer: Signer | None) -> bytes:
    """Return the document that goes to the board, signed if there is a key."""
    payload = command.to_json()
    return payload if signer is None else json.dumps(signer.sign(json.loads(payload))).encode()


def command_message(topics: Topics, payload: bytes, expires: float, clock: Clock = SYSTEM_CLOCK) -> Message:
    """Return the message that carries a command. expires: Unix time in s, after which the broker need not keep it.

    A message expires after one second at the earliest.
    """
    left_s = math.ceil(expires - clock.wall_s())
    return Message(topics.command, payload, expires_s=min(max(left_s, 1), _MOST_EXPIRY_S))


def requested_chunks(topics: Topics, args: Strict, path: Path, result: CommandResult) -> Iterator[Message]:
    """Yield some of the chunks that the device requests with this result, if it does; it requests the rest later."""
    first = (result.result or {}).get("next") if result.step == RECEIVING else None
    if not isinstance(args, FileArgs) or not isinstance(first, int) or not 0 <= first <= args.size:
        return
    with path.open("rb") as file:
        file.seek(first * MODEL_CHUNK_BYTES)
        for number in range(first, first + MODEL_CHUNKS_REQUESTED):
            if not (chunk := file.read(MODEL_CHUNK_BYTES)):
                return
            yield Message(topics.model_chunk(args.sha256, number), chunk)


def as_json(text: Any) -> Any:
    """Return the value of JSON text, such as `0.2` or `true`; the text itself if it is none, such as `info`."""
    try:
        return json.loads(text)
    except ValueError:
        return text
