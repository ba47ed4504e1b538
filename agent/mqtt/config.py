"""The `mqtt` section of config.yaml."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from agent.common.credentials import FileOrCredential, resolve_against
from agent.common.schema import Finite, Strict, read_yaml, validate
from agent.contract.topics import check_name
from agent.mqtt.endpoint import Endpoint, Protocol, TlsFiles, Transport


class OutboxConfig(Strict):
    """How much is kept for the fleet, for how long, and when it has arrived."""

    bytes: int = Field(default=50_000_000, ge=100_000)
    days: Finite = Field(default=30.0, gt=0.0)
    commit_s: Finite = Field(default=5.0, ge=0.0, le=60.0)
    backlog_per_s: Finite = Field(default=100.0, ge=1.0, le=10_000.0)
    confirm: Literal["auto", "collector", "broker"] = "auto"


class HomeAssistantConfig(Strict):
    """Whether Home Assistant is told of this device, and below which topic it listens."""

    enabled: bool = False
    prefix: str = "homeassistant"

    @field_validator("prefix")
    @classmethod
    def _topic_levels(cls, prefix: str) -> str:
        for level in prefix.split("/"):
            check_name(level)
        return prefix


def _text(value: object) -> object:
    """YAML takes 5 without quotes for a number."""
    return str(value) if type(value) is int else value


class MqttConfig(Strict):
    """The broker; without a host an embedded one listens on a free loopback port."""

    host: Annotated[str, Field(min_length=1)] | None = None
    port: int = Field(default=1883, ge=1, le=65535)
    username: str | None = None
    password_file: FileOrCredential | None = None
    tls: TlsFiles | None = None
    transport: Transport = "tcp"
    websocket_path: str = Field(default="/mqtt", pattern=r"^/[!-~]*$")
    protocol: Annotated[Protocol, BeforeValidator(_text)] = "auto"
    will_delay_s: int = Field(default=20, ge=0, le=3600)
    fleet: str = "default"
    device: str = Field(default_factory=lambda: _host_name())
    keepalive_s: int = Field(default=30, ge=5, le=3600)
    telemetry_period_s: Finite = Field(default=5.0, gt=0.0)
    outbox: OutboxConfig = OutboxConfig()
    home_assistant: HomeAssistantConfig = HomeAssistantConfig()

    @field_validator("fleet", "device")
    @classmethod
    def _topic_level(cls, name: str) -> str:
        return check_name(name)

    def endpoint(self) -> Endpoint:
        """The broker of `host`; without one, what listens on this machine."""
        fields = self.model_dump(include=set(Endpoint.__dataclass_fields__))
        return Endpoint(**{**fields, "host": self.host or "127.0.0.1", "tls": self.tls})

    def resolve_paths(self, base: Path) -> MqttConfig:
        """The same section, relative paths taken from the folder `base`."""
        tls = self.tls.resolve_paths(base) if self.tls is not None else None
        return self.model_copy(update={"password_file": resolve_against(self.password_file, base), "tls": tls})


class _File(BaseModel):
    """Of a config.yaml, what the operator's side reads: the rest need not be there."""

    mqtt: MqttConfig = Field(default_factory=MqttConfig)


def read_mqtt_config(path: Path) -> MqttConfig:
    """The `mqtt` section of a config.yaml, of which nothing else is looked at. Raises ConfigError as `load_config`."""
    return validate(_File, read_yaml(path), str(path)).mqtt.resolve_paths(path.resolve().parent)


def _host_name() -> str:
    """This machine's name, made fit for an MQTT topic level; of a service beside the first one, its own behind it."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "board"
    service = Path(os.environ.get("STATE_DIRECTORY", "")).name  # by systemd, as `tared install-service --name` has it
    return f"{host}{service.removeprefix('tared')}" if service.startswith("tared-") else host
