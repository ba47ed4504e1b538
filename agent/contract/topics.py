"""Name the topics of the MQTT contract, and check which names may be part of a topic."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import overload
from urllib.parse import quote

from agent.common.errors import ConfigError

MAX_NAME_BYTES = 64
HOME_ASSISTANT_PREFIX = "homeassistant"  # the default prefix of Home Assistant's discovery
MAX_TOPIC_BYTES = 256  # longest topic that a sender may name


def check_name(name: str) -> str:
    """Return `name` if it may be one level of a topic (a fleet, a device, a command id).

    A wildcard or a slash would reach other devices' topics; brokers disconnect a client that sends control characters.

    Raises ValueError, which says what a name must be, for any other name.

    >>> check_name("gate-3")
    'gate-3'
    """
    if not name or not name.isprintable() or set(name) & set("+#/"):
        raise ValueError("a non-empty printable name without '+', '#' and '/'")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"a name of at most {MAX_NAME_BYTES} bytes in UTF-8")
    return name


def may_reply_to(topic: str, own: str, house: str = HOME_ASSISTANT_PREFIX) -> bool:
    """Return True if a result may go to the topic that the sender of a command names.

    Otherwise a sender could have a board, which is allowed to publish, write anybody's telemetry, commands and state.

    Args:
        topic: The requested topic.
        own: The topic of the result, where it goes anyway.
        house: The prefix that Home Assistant is set to. Another one at the same broker may use the default.

    >>> own = Topics("plant", "gate-3").result("17")
    >>> may_reply_to("my/answers", own), may_reply_to("tared/v1/plant/gate-4/cmd", own)
    (True, False)
    """
    if not topic or not topic.isprintable() or set(topic) & set("+#") or len(topic.encode()) > MAX_TOPIC_BYTES:
        return False
    reserved = topic.startswith(("$", "tared/", f"{HOME_ASSISTANT_PREFIX}/", f"{house}/")) or topic == "tared"
    return topic == own or not reserved


@dataclass(frozen=True)
class Topic:
    """A topic of the device; of a `Topics` it is the topic's name, or the filter of all its names.

    Args:
        path: Below the device's prefix; a level in braces is one of many.
        holds: What is published there.
        from_board: True if the board publishes, False if it subscribes.
        qos: Quality of service with which tared publishes.
        retain: The broker keeps the newest message.
    """

    path: str
    holds: str
    from_board: bool
    qos: int = 1
    retain: bool = False

    @overload
    def __get__(self, topics: None, owner: type[Topics]) -> Topic: ...
    @overload
    def __get__(self, topics: Topics, owner: type[Topics]) -> str: ...
    def __get__(self, topics: Topics | None, owner: type[Topics]) -> Topic | str:
        return self if topics is None else topics.below(re.sub(r"\{\w+\}", "+", self.path))


@dataclass(frozen=True)
class Topics:
    """Every topic of one device: `tared/v1/{fleet}/{device}/...`.

    >>> Topics("plant", "gate-3").telemetry
    'tared/v1/plant/gate-3/telemetry'

    Raises ConfigError (`mqtt.name`) for a name that no topic may contain.
    """

    fleet: str
    device: str

    status = Topic("status", "the state of the board; also its last will", from_board=True, retain=True)
    birth = Topic("birth", "hardware, software, and the engine in service", from_board=True, retain=True)
    telemetry = Topic("telemetry", "a sample, every `mqtt.telemetry_period_s`", from_board=True)
    event = Topic("event", "something that happened; also the rows that the outbox has dropped", from_board=True)
    reported = Topic("reported", "the settings in force", from_board=True, retain=True)
    detections = Topic("detections", "the newest result, at most `results.mqtt_per_s`", from_board=True, qos=0)
    snapshot = Topic("snapshot", "a JPEG, after the command `snapshot`", from_board=True)
    command_result = Topic("cmd/{id}/result", "the progress and the end of a command", from_board=True)
    histogram_chunks = Topic(
        "histograms/{upload}/{n}", "a chunk of an upload, after the command `histograms`", from_board=True
    )
    ack = Topic("ack", "the rows that a collector has stored", from_board=False)
    command = Topic("cmd", "a command", from_board=False)
    labels = Topic("labels", "the true content of a frame", from_board=False)
    desired = Topic("desired", "the settings that the board is to have", from_board=False, retain=True)
    model_chunks = Topic("model/{sha256}/{n}", "a chunk of a file, after the command `model`", from_board=False)

    def __post_init__(self) -> None:
        for field in fields(self):
            name = getattr(self, field.name)
            try:
                check_name(name)
            except ValueError as error:
                found = f"the {field.name} name {name!a}"
                raise ConfigError("mqtt.name", found, str(error), f"rename the {field.name}") from None

    @property
    def board_header(self) -> str:
        """The line of HTTP by which the board's preview says whose pictures these are."""
        return f"X-Board: {quote(self.fleet)}/{quote(self.device)}"

    def model_chunk(self, sha256: str, number: int) -> str:
        return self.below(f"model/{sha256}/{number}")

    def histogram_chunk(self, upload: str, number: int) -> str:
        return self.below(f"histograms/{upload}/{number}")

    def result(self, command_id: str) -> str:
        """Return the topic for the results of one command. `command_id` has passed `check_name`."""
        return self.below(f"cmd/{command_id}/result")

    def below(self, path: str) -> str:
        return f"tared/v1/{self.fleet}/{self.device}/{path}"
