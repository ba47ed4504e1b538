"""The operator's side of a command: send it, repeat it until it is answered, follow it to its end."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from agent.backoff import Backoff
from agent.errors import AgentError, CommandError
from agent.mqtt import Endpoint, MqttClient
from agent.publishing import Message
from agent.requests import OPS, Command, CommandResult
from agent.topics import Topics

REPEAT_S = 2.0


def new_command(op: str, arguments: Mapping[str, str], now: float, valid_s: float = 60.0) -> Command:
    """A command from what was typed, such as `recalibrate` and `{"frames": "512"}`.

    It must reach the device within `valid_s` of `now` (Unix time in seconds), by the device's clock. Raises
    CommandError for an op or arguments that no device would accept.
    """
    schema = OPS.get(op)
    if schema is None:
        raise CommandError("command.unknown_op", f"op {op!r}", "one of " + ", ".join(OPS), "correct the op")
    try:
        args = schema.model_validate_strings(dict(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = f"{'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}"
        known = ", ".join(f"{name}=..." for name in schema.model_fields) or "no arguments"
        raise CommandError("command.args", found, known, "correct the arguments") from None
    return Command(id=uuid.uuid4().hex, op=op, args=args, issued=now, expires=now + valid_s, version=1)


def send(endpoint: Endpoint, topics: Topics, command: Command, silence_s: float = 30.0) -> Iterator[CommandResult]:
    """Send `command` and yield its results as they come, up to the final one.

    It is sent again whenever REPEAT_S passed in silence: that is how it reaches a device that was away, and
    how a result that was lost comes once more. A device that works answers each time, so only one that is
    gone is silent. Raises AgentError (`broker.unreachable`), CommandError (`command.no_answer`) after
    `silence_s`, MessageError for an answer that is no result.
    """
    client_id = f"tared-operator-{uuid.uuid4().hex}"
    results = [topics.result(command.id)]
    with MqttClient(endpoint, client_id, subscriptions=results, backoff=Backoff(0.2, 2.0)) as client:
        if not client.wait_connected(silence_s):
            found = f"no connection to {endpoint.host}:{endpoint.port} ({client.outcome})"
            remedy = "check that it runs, its address, user name and password"
            raise AgentError("broker.unreachable", found, "an MQTT broker", remedy)
        client.publish(Message(topics.command, command.to_json()))
        latest: CommandResult | None = None
        heard_at = time.monotonic()
        while latest is None or not latest.final:
            try:
                answer = client.inbox.get(timeout=REPEAT_S)
            except queue.Empty:
                if time.monotonic() - heard_at > silence_s:
                    raise _no_answer(topics, latest, silence_s) from None
                client.publish(Message(topics.command, command.to_json()))
                continue
            heard_at = time.monotonic()
            result = CommandResult.from_json(answer.payload)
            if result != latest:
                latest = result
                yield result


def _no_answer(topics: Topics, latest: CommandResult | None, silence_s: float) -> CommandError:
    said = "no answer" if latest is None else f"nothing after {latest.status}"
    found = f"{said} from {topics.fleet}/{topics.device} for {silence_s:.0f} s"
    remedy = f"see whether it is online: mosquitto_sub -v -t '{topics.status}'"
    return CommandError("command.no_answer", found, "a result", remedy)
