"""Define the `mqtt` section of config.yaml: the broker, our names, the outbox, Home Assistant."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, field_validator

from agent.common.credentials import FileOrCredential
from agent.common.schema import OPTIONAL_TEXT, Finite, Strict, read_yaml, validate
from agent.contract.topics import check_name
from agent.mqtt.endpoint import Endpoint, Protocol, TlsFiles, Transport


class OutboxConfig(Strict):
    """The outbox: what is kept for the fleet, and who has to confirm that it has arrived.

    Args:
        bytes: Size of the file, about; when it is reached, samples are dropped before events.
        days: Age at which a row is dropped.
        commit_s: Seconds within which samples are written to the disk.
        backlog_per_s: Rows sent per second at most.
        confirm: Who confirms a row: the broker (PUBACK), a collector, or a collector once there has been one (auto).
    """

    bytes: int = Field(default=50_000_000, ge=100_000)
    days: Finite = Field(default=30.0, gt=0.0)
    commit_s: Finite = Field(default=5.0, ge=0.0, le=60.0)
    backlog_per_s: Finite = Field(default=100.0, ge=1.0, le=10_000.0)
    confirm: Literal["auto", "collector", "broker"] = "auto"


class HomeAssistantConfig(Strict):
    """The announcement of the device to Home Assistant, and the prefix of the topics that Home Assistant reads."""

    enabled: bool = False
    prefix: str = "homeassistant"

    @field_validator("prefix")
    @classmethod
    def _topic_levels(cls, prefix: str) -> str:
        for level in prefix.split("/"):
            check_name(level)
        return prefix


def _text(value: object) -> object:
    """Accept a number as text: YAML reads 5 without quotes as a number."""
    return str(value) if type(value) is int else value


_PROTOCOLS = {"enum": ["auto", 5, "5", "3.1.1"]}  # 5 as YAML reads it
Device = Annotated[
    str, BeforeValidator(lambda name: _host_name() if name is None else name), WithJsonSchema(OPTIONAL_TEXT)
]


class MqttConfig(Strict):
    """The broker and our names there. Without a host, an embedded broker listens on a free loopback port."""

    host: Annotated[str, Field(min_length=1)] | None = None
    port: int = Field(default=1883, ge=1, le=65535)
    username: str | None = None
    password_file: FileOrCredential | None = None
    tls: TlsFiles | None = None
    transport: Transport = "tcp"
    websocket_path: str = Field(default="/mqtt", pattern=r"^/[!-~]*$")
    protocol: Annotated[Protocol, BeforeValidator(_text), WithJsonSchema(_PROTOCOLS)] = "auto"
    will_delay_s: int = Field(default=20, ge=0, le=3600)
    fleet: str = "default"
    device: Device = Field(default_factory=lambda: _host_name())
    keepalive_s: int = Field(default=30, ge=5, le=3600)
    telemetry_period_s: Finite = Field(default=5.0, gt=0.0)
    outbox: OutboxConfig = OutboxConfig()
    home_assistant: HomeAssistantConfig = HomeAssistantConfig()

    @field_validator("fleet", "device")
    @classmethod
    def _topic_level(cls, name: str) -> str:
        return check_name(name)

    def endpoint(self) -> Endpoint:
        """Return the broker of `host`; without one, the broker on this machine."""
        fields = self.model_dump(include=set(Endpoint.__dataclass_fields__))
        return Endpoint(**{**fields, "host": self.host or "127.0.0.1", "tls": self.tls})


class _File(BaseModel):
    """The part of a config.yaml that the operator's side reads: the rest may be missing."""

    mqtt: MqttConfig = Field(default_factory=MqttConfig)


def read_mqtt_config(path: Path) -> MqttConfig:
    """Read the `mqtt` section of a config.yaml and ignore the rest. Raises ConfigError as `load_config`."""
    return validate(_File, read_yaml(path), str(path), path.resolve().parent).mqtt


def _host_name() -> str:
    """Return this machine's name as a level of an MQTT topic.

    A second service on the machine appends its own name: `tared install-service --name` has made its state directory.
    """
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "board"
    service = Path(os.environ.get("STATE_DIRECTORY", "")).name  # set by systemd
    return f"{host}{service.removeprefix('tared')}" if service.startswith("tared-") else host
