"""An operator's commands, repeated quickly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device import TOPICS

from agent.contract.commands import Command, CommandResult
from agent.mqtt.client import Endpoint
from fleet import operator


@pytest.fixture
def quick_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "REPEAT_S", 0.1)


def send(endpoint: Endpoint, command: Command, silence_s: float = 10.0) -> Iterator[CommandResult]:
    return operator.send(endpoint, TOPICS, command, silence_s)
