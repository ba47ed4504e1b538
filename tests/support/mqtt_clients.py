"""Clients of a broker, patient and impatient, and their lines in the log."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Iterator

import pytest

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.timing import Backoff
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.endpoint import Endpoint

SELDOM = 3600.0  # seconds: a client that waits for its backoff fails the test


@contextlib.contextmanager
def connected(endpoint: Endpoint, *subscriptions: str) -> Iterator[MqttClient]:
    with MqttClient(
        endpoint, uuid.uuid4().hex, SessionOptions(subscriptions=subscriptions, backoff=Backoff(0.05, 0.2))
    ) as client:
        assert client.wait_connected(60.0), client.outcome
        yield client


def impatient(endpoint: Endpoint, clock: Clock = SYSTEM_CLOCK) -> MqttClient:
    """A client that is connected at once or never."""
    backoff = Backoff(SELDOM, SELDOM, random.Random(7))
    return MqttClient(endpoint, "us", SessionOptions(subscriptions=["t"], backoff=backoff), clock)


def logged(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if message.startswith(start)]
