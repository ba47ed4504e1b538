"""The names of the MQTT contract: which topic carries what, and which names may be part of one."""

from __future__ import annotations

from dataclasses import dataclass, fields

from agent.common.errors import ConfigError

MAX_NAME_BYTES = 64
HOME_ASSISTANT_PREFIX = "homeassistant"  # the default prefix of Home Assistant's discovery
MAX_TOPIC_BYTES = 256  # of a topic that somebody else names


def check_name(name: str) -> str:
    """Return `name` if it may be one level of a topic (a fleet, a device, a command id).

    A wildcard or a slash would reach other devices' topics; brokers disconnect who sends control characters.
    Raises ValueError that says what a name must be.
    """
    if not name or not name.isprintable() or set(name) & set("+#/"):
        raise ValueError("a non-empty printable name without '+', '#' and '/'")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"a name of at most {MAX_NAME_BYTES} bytes in UTF-8")
    return name


def may_reply_to(topic: str, own: str, house: str = HOME_ASSISTANT_PREFIX) -> bool:
    """Whether an answer may go to a topic that its asker names, `own` being where it goes anyway.

    house: the prefix that Home Assistant is set to; another one at the same broker may be set to its default.

    Anybody's telemetry, commands and state would otherwise be anybody's to write, by the hand of a board that may.
    """
    if not topic or not topic.isprintable() or set(topic) & set("+#") or len(topic.encode()) > MAX_TOPIC_BYTES:
        return False
    reserved = topic.startswith(("$", "tared/", f"{HOME_ASSISTANT_PREFIX}/", f"{house}/")) or topic == "tared"
    return topic == own or not reserved


@dataclass(frozen=True)
class Topics:
    """Every topic of one device: `tared/v1/{fleet}/{device}/...`.

    Raises ConfigError (`mqtt.name`) for a name that no topic may contain.
    """

    fleet: str
    device: str

    def __post_init__(self) -> None:
        for field in fields(self):
            name = getattr(self, field.name)
            try:
                check_name(name)
            except ValueError as error:
                found = f"the {field.name} name {name!a}"
                raise ConfigError("mqtt.name", found, str(error), f"rename the {field.name}") from None

    @property
    def status(self) -> str:
        return self._topic("status")

    @property
    def birth(self) -> str:
        return self._topic("birth")

    @property
    def telemetry(self) -> str:
        return self._topic("telemetry")

    @property
    def event(self) -> str:
        return self._topic("event")

    @property
    def ack(self) -> str:
        return self._topic("ack")

    @property
    def command(self) -> str:
        return self._topic("cmd")

    @property
    def labels(self) -> str:
        return self._topic("labels")

    @property
    def desired(self) -> str:
        return self._topic("desired")

    @property
    def reported(self) -> str:
        return self._topic("reported")

    @property
    def detections(self) -> str:
        return self._topic("detections")

    @property
    def snapshot(self) -> str:
        return self._topic("snapshot")

    @property
    def model_chunks(self) -> str:
        """The filter of all topics that carry chunks of model files."""
        return self._topic("model/+/+")

    def model_chunk(self, sha256: str, number: int) -> str:
        return self._topic(f"model/{sha256}/{number}")

    def histogram_chunk(self, upload: str, number: int) -> str:
        return self._topic(f"histograms/{upload}/{number}")

    def result(self, command_id: str) -> str:
        """Where the results of one command appear. `command_id` has passed `check_name`."""
        return self._topic(f"cmd/{command_id}/result")

    def _topic(self, path: str) -> str:
        return f"tared/v1/{self.fleet}/{self.device}/{path}"
