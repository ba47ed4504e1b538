"""The `mqtt` section of config.yaml."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from agent.model_spec import Finite
from agent.schema import Strict
from agent.topics import check_name


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


class MqttConfig(Strict):
    """The broker; without a host an embedded one listens on a free loopback port."""

    host: Annotated[str, Field(min_length=1)] | None = None
    port: int = Field(default=1883, ge=1, le=65535)
    username: str | None = None
    password_file: Path | None = None
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


def _host_name() -> str:
    """This machine's name, made fit for an MQTT topic level."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "board"
