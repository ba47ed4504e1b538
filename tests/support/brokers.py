"""Real MQTT brokers as fixtures, mosquitto and amqtt where they are installed; a pytest plugin."""

from __future__ import annotations

import abc
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.timing import Backoff
from agent.contract.messages import Birth, Event
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.config import OutboxConfig
from agent.mqtt.embedded_broker import EmbeddedBroker
from agent.mqtt.endpoint import Protocol
from agent.mqtt.message import Message
from agent.uplink.home_assistant import Discovery
from agent.uplink.link import MqttLink
from agent.uplink.outbox import Outbox
from agent.uplink.outbox_store import EVENT

_MOSQUITTO = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")
_AMQTT = importlib.util.find_spec("amqtt") is not None
_ran: set[str] = set()
PROTOCOLS: dict[str, Protocol] = {"5": "5", "3.1.1": "3.1.1"}


class RealBroker(abc.ABC):
    """A broker that can be stopped as by a crash, and started again on the same port."""

    host = "127.0.0.1"
    port: int
    protocol: Protocol = "auto"  # that its clients are to speak

    @property
    def endpoint(self) -> Endpoint:
        """For clients whose will is published soon."""
        return Endpoint(self.host, self.port, protocol=self.protocol, will_delay_s=1)

    @abc.abstractmethod
    def start(self) -> None: ...

    @abc.abstractmethod
    def stop(self) -> None: ...


class Mosquitto(RealBroker):
    """settings: further lines of its configuration, which may be about its one listener."""

    def __init__(self, folder: Path, *settings: str, persistent: bool = False) -> None:
        if _MOSQUITTO is None:
            pytest.skip("mosquitto is not installed: apt-get install mosquitto")
        _ran.add("mosquitto")
        self.port = free_port()
        self._config = folder / "mosquitto.conf"
        lasting = ["persistence true", f"persistence_location {folder}/"] if persistent else []
        # Started by root, mosquitto becomes a user who may not read what pytest writes.
        lines = ["user root", f"listener {self.port} {self.host}", "allow_anonymous true", *lasting, *settings]
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert _MOSQUITTO is not None
        self._process = subprocess.Popen([_MOSQUITTO, "-c", str(self._config)], stderr=subprocess.DEVNULL)
        eventually(lambda: _listens(self.host, self.port))

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


class Amqtt(RealBroker):
    # It has no other. tests/agent/mqtt/test_mqtt5_fallback.py: a client that does not know this.
    protocol = "3.1.1"

    def __init__(self) -> None:
        self.port = 0
        self._broker: EmbeddedBroker | None = None

    def start(self) -> None:
        self._broker = EmbeddedBroker(self.port)
        self.port = self._broker.__enter__().port

    def stop(self) -> None:
        if self._broker is not None:
            self._broker.__exit__(None, None, None)
            self._broker = None


@pytest.fixture(params=["mosquitto by MQTT 5", "mosquitto by MQTT 3.1.1", "amqtt"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealBroker]:
    """A running broker of each kind, for clients of each version that it speaks."""
    name, _, protocol = str(request.param).partition(" by MQTT ")
    for broker in _running(name, tmp_path):
        broker.protocol = PROTOCOLS.get(protocol, broker.protocol)
        yield broker


@pytest.fixture
def any_broker(tmp_path: Path) -> Iterator[RealBroker]:
    """One running broker: mosquitto when installed, else amqtt."""
    yield from _running("mosquitto" if _MOSQUITTO else "amqtt", tmp_path)


@pytest.fixture(scope="module")
def module_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """As `any_broker`, for what is made once for a file of tests."""
    yield from _running("mosquitto" if _MOSQUITTO else "amqtt", tmp_path_factory.mktemp("broker"))


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[RealBroker]:
    """A running mosquitto, for what amqtt cannot do.

    amqtt 0.12 forgets messages that it has acknowledged but not yet passed on when their sender disconnects. It keeps a
    connection open when another one takes over its client id.
    """
    yield from _running("mosquitto", tmp_path)


@contextlib.contextmanager
def running_mosquitto(folder: Path, *settings: str) -> Iterator[Mosquitto]:
    """A mosquitto that is set up as these lines say. Skips the test where none is installed."""
    broker = Mosquitto(folder, *settings)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Fails the test that leaves a thread behind."""
    before = set(threading.enumerate())
    yield
    eventually(lambda: set(threading.enumerate()) <= before)


_EXPECTED_S = 120.0  # for a document among others that come all the time


class Watcher:
    """Sees all that is published under tared/; once the context is entered the subscription stands."""

    def __init__(self, endpoint: Endpoint) -> None:
        name = f"watcher-{uuid.uuid4().hex}"
        self._client = MqttClient(endpoint, name, SessionOptions(subscriptions=["tared/#"], backoff=Backoff(0.05, 0.2)))
        self._client.inboxes["tared/#"] = queue.Queue()  # without bound: a test may look late
        self.seen: list[Message] = []

    def __enter__(self) -> Watcher:
        self._client.__enter__()
        assert self._client.wait_connected(60.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def next(self, timeout_s: float = 60.0) -> Message:
        message = self._client.inbox.get(timeout=timeout_s)
        self.seen.append(message)
        return message

    def all(self) -> list[Message]:
        """All messages so far."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.seen.append(self._client.inbox.get_nowait())
        return self.seen

    def expect(self, topic: str, **fields: object) -> dict[str, Any]:
        """The next document on `topic` that has these fields. Fails when it does not come."""
        give_up_at = time.monotonic() + _EXPECTED_S
        while True:
            message = self.next()
            assert time.monotonic() < give_up_at, f"no document on {topic} with {fields} in {_EXPECTED_S:g} s"
            if message.topic == topic:
                document: dict[str, Any] = json.loads(message.payload)
                if fields.items() <= document.items():
                    return document

    def retained(self, topic: str) -> dict[str, Any]:
        """The first document on `topic`: what the broker held when this watcher came. Fails without one."""
        while topic not in (message.topic for message in self.seen):
            self.next()
        document: dict[str, Any] = json.loads(next(m.payload for m in self.seen if m.topic == topic))
        return document


@contextlib.contextmanager
def on_the_air(
    endpoint: Endpoint,
    topics: Topics,
    birth: Birth,
    backoff: Backoff | None = None,
    recognise: Callable[[bytes], bool] = lambda _: False,
    clock: Clock = SYSTEM_CLOCK,
    discovery: Discovery | None = None,
) -> Iterator[MqttLink]:
    """A device's link, whose outbox is in memory and waits for nothing."""
    quick = backoff or Backoff(0.05, 0.2)
    with (
        Outbox(Path(":memory:"), topics, OutboxConfig(commit_s=0.0, backlog_per_s=10_000.0), clock) as outbox,
        MqttLink(endpoint, topics, birth, outbox, quick, discovery, recognise=recognise, clock=clock) as link,
    ):
        yield link


def report(link: MqttLink, kind: str = "alarm") -> None:
    """One event more in the link's outbox."""
    link.outbox.put(kind, EVENT, lambda epoch, seq: Event(epoch=epoch, seq=seq, ts=0.0, kind=kind).to_json())


def check_board_reports_and_obeys(endpoint: Endpoint) -> None:
    """Over this transport: 80 alarms one way, 50 commands of 2 kB the other, more than one read has room for."""
    topics = Topics("fleet", "board")
    with Watcher(endpoint) as watcher, on_the_air(endpoint, topics, Birth(agent_version="1.2.3")) as link:
        for _ in range(80):
            report(link)
        assert [watcher.expect(topics.event)["seq"] for _ in range(80)] == list(range(1, 81))
        with MqttClient(endpoint, "operator") as operator:
            for number in range(50):
                operator.publish(Message(topics.command, bytes(2000) + bytes([number])))
            assert [link.inbox.get(timeout=60.0).payload[-1] for _ in range(50)] == list(range(50))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _ran:
        terminalreporter.write_line("MQTT brokers tested against: " + ", ".join(sorted(_ran)))


def eventually(holds: Callable[[], object], timeout_s: float = 45.0) -> None:
    """Wait for a condition that no event announces. Fails when it does not hold within `timeout_s`.

    Looking takes a fifth of the time at most, or is done five times a second: what is waited for needs the processor.
    """
    give_up_at = time.monotonic() + timeout_s
    while True:
        begun_s = time.thread_time()
        if holds():
            return
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(min(0.2, max(0.01, 4.0 * (time.thread_time() - begun_s))))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _running(name: str, folder: Path) -> Iterator[RealBroker]:
    broker = _new_broker(name, folder)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


def _new_broker(name: str, folder: Path) -> RealBroker:
    if name == "mosquitto":
        return Mosquitto(folder)
    if not _AMQTT:
        pytest.skip("amqtt is not installed: pip install '.[demo]'")
    _ran.add(f"amqtt {importlib.metadata.version('amqtt')}")
    return Amqtt()


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
