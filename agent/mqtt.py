"""A connection to an MQTT broker that heals itself; the only file that imports paho. MQTT 3.1.1 suffices.

One thread owns paho and everything it touches: it connects, waits on the socket, and moves messages between
the broker, a bounded outbox and a bounded inbox. Nobody else calls paho, so nobody waits for its locks:
`publish` only fills the outbox. Every connection is a paho client of its own, because paho would resend a
status of the lost connection after the new one's: what was not acknowledged goes back into our outbox.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from paho.mqtt.client import Client, MQTTMessage, MQTTv311, topic_matches_sub
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from agent.backoff import Backoff
from agent.errors import ConfigError
from agent.outbox import Message, Outbox

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
STABLE_S = 10.0  # a connection that lasted this long was a success, and the backoff starts over
IN_FLIGHT = 20  # messages handed to paho and not yet acknowledged
INBOX_SIZE = 100


@dataclass(frozen=True)
class Endpoint:
    """Where a broker listens, and how to introduce oneself."""

    host: str
    port: int
    keepalive_s: int = 30
    username: str | None = None
    password_file: Path | None = None

    def password(self) -> str | None:
        """The first line of the password file. Raises ConfigError (`mqtt.password`)."""
        if self.password_file is None:
            return None
        try:
            return self.password_file.read_text(encoding="utf-8").partition("\n")[0]
        except (OSError, UnicodeDecodeError) as error:
            remedy = "correct mqtt.password_file, or its permissions"
            raise ConfigError("mqtt.password", str(error), "a readable text file", remedy) from error


ClientT = TypeVar("ClientT", bound="MqttClient")


class MqttClient:
    """Publishes and receives in the background while it is open; a context manager.

    `inbox` holds what arrived on the `subscriptions`, for one reader. Each attempt to connect leaves `will()`
    with the broker; each connection begins with `greet()`, on the MQTT thread: it may call `publish`, nothing
    that waits. An unreachable broker is no error: it is tried again for as long as the client is open, and
    `outcome` says what became of the latest attempt.
    Raises ConfigError for a password file that cannot be read.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str,
        *,
        subscriptions: Sequence[str] = (),
        will: Callable[[], Message] | None = None,
        greet: Callable[[], None] | None = None,
        backoff: Backoff | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self.inbox: queue.Queue[Message] = queue.Queue(INBOX_SIZE)
        self._endpoint = endpoint
        self._password = endpoint.password()
        self._client_id = client_id
        self._subscriptions = [(topic, 1) for topic in subscriptions]
        self._will = will
        self._greet = greet
        self._backoff = backoff or Backoff()
        self._outbox = outbox or Outbox()
        self._in_flight: dict[int, Message] = {}  # by paho's message id, in the order they were sent
        self._last_words: deque[Message] = deque()
        self._dropped_incoming = 0
        self.outcome = "not tried yet"
        self._connected = threading.Event()
        self._closing = threading.Event()
        self._close_by = math.inf  # on time.monotonic()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)

    def __enter__(self: ClientT) -> ClientT:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether the broker has admitted us and taken our subscriptions."""
        return self._connected.is_set()

    @property
    def drops(self) -> dict[str, int]:
        """Messages that fell out of a full queue so far, by cause."""
        return {"outgoing": self._outbox.dropped, "incoming": self._dropped_incoming}

    def wait_connected(self, timeout_s: float) -> bool:
        return self._connected.wait(timeout_s)

    def publish(self, topic: str, payload: bytes, qos: int = 1, retain: bool = False) -> None:
        """Leave a message in the outbox, and return at once."""
        self._outbox.put(Message(topic, payload, qos, retain))
        self._wake()

    def close(self, *last_words: Message, timeout_s: float = 2.0) -> None:
        """Deliver the outbox, then `last_words`, for at most `timeout_s`, and disconnect.

        Where that does not succeed in time the connection is cut, and the broker publishes the will. An
        attempt to connect that is under way is waited for: CONNECT_TIMEOUT_S more.
        """
        if self._closing.is_set():
            return
        self._last_words.extend(last_words)
        self._close_by = time.monotonic() + timeout_s
        self._closing.set()
        self._wake()
        self._thread.join(timeout_s + CONNECT_TIMEOUT_S + 1.0)
        if self._thread.is_alive():  # a resolver that does not answer; the thread is a daemon
            log.warning("mqtt=stuck host=%s port=%d", self._endpoint.host, self._endpoint.port)
            return
        self._waker.close()
        self._wakee.close()
        log.info("mqtt=closed unsent=%d", len(self._outbox))

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is about to wake; closed: it has ended
            self._waker.send(b"\0")

    def _run(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            self._connect()
            if self._closing.is_set():
                return
            if time.monotonic() - began >= STABLE_S:
                self._backoff.reset()
            delay_s = self._backoff.next_s()
            where = self._endpoint.host, self._endpoint.port
            log.warning("mqtt=down host=%s port=%d reason=%r retry_s=%.1f", *where, self.outcome, delay_s)
            self._closing.wait(delay_s)

    def _connect(self) -> None:
        """One connection, from the attempt to its end."""
        client = self._paho()
        try:
            client.connect(self._endpoint.host, self._endpoint.port, self._endpoint.keepalive_s)
        except (OSError, ValueError) as error:  # ValueError: a host name that no resolver takes
            self.outcome = str(error)
            return
        self.outcome = "no answer to CONNECT"
        try:
            self._serve(client)
        finally:
            if (sock := client.socket()) is not None:
                sock.close()  # without a goodbye, so that the will speaks
            self._connected.clear()
            self._outbox.put_back(list(self._in_flight.values()))
            self._in_flight.clear()

    def _paho(self) -> Client:
        client = Client(CallbackAPIVersion.VERSION2, self._client_id, protocol=MQTTv311, reconnect_on_failure=False)
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_inflight_messages = IN_FLIGHT
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_disconnect = self._on_disconnect
        if self._endpoint.username is not None:
            client.username_pw_set(self._endpoint.username, self._password)
        if self._will is not None:
            client.will_set(*self._will())
        return client

    def _serve(self, client: Client) -> None:
        """Move messages until the connection ends or the client is closed."""
        if (sock := client.socket()) is None:
            return
        give_up_at = time.monotonic() + CONNECT_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakee, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while client.socket() is not None:
                writing = selectors.EVENT_WRITE if client.want_write() else 0
                selector.modify(sock, selectors.EVENT_READ | writing)
                ready = {key.fileobj: events for key, events in selector.select(self._patience_s())}
                if self._wakee in ready:
                    self._wakee.recv(4096)
                if ready.get(sock, 0) & selectors.EVENT_READ:
                    client.loop_read()
                if ready.get(sock, 0) & selectors.EVENT_WRITE:
                    client.loop_write()
                client.loop_misc()
                if self.connected:
                    self._send(client)
                elif time.monotonic() > give_up_at:
                    return
                if self._closing.is_set() and self._leave(client):
                    return

    def _patience_s(self) -> float:
        """How long to wait for the socket: paho's keepalive needs a look every second."""
        return min(1.0, max(0.0, self._close_by - time.monotonic()))

    def _send(self, client: Client) -> None:
        while len(self._in_flight) < IN_FLIGHT:
            message = self._outbox.take()
            if message is None and self._closing.is_set() and self._last_words:
                message = self._last_words.popleft()
            if message is None:
                return
            info = client.publish(*message)
            if message.qos:
                self._in_flight[info.mid] = message

    def _leave(self, client: Client) -> bool:
        """Whether it is time to go; says goodbye to the broker if everything was delivered."""
        if self._in_flight or self._last_words or len(self._outbox):
            return time.monotonic() > self._close_by
        client.disconnect()
        return True

    def _on_connect(self, client: Client, _user: Any, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if reason.is_failure:
            self.outcome = f"refused: {reason}"
            return
        self.outcome = "connection lost"
        if self._subscriptions:
            client.subscribe(self._subscriptions)
        else:
            self._begin()

    def _on_subscribe(self, _client: Client, _user: Any, _mid: int, reasons: list[ReasonCode], _props: Any) -> None:
        for (topic, _), reason in zip(self._subscriptions, reasons, strict=True):
            if reason.is_failure:
                log.warning("mqtt=deaf topic=%s reason=%r remedy=%r", topic, str(reason), "the broker's ACL")
        self._begin()

    def _begin(self) -> None:
        """Nothing is said before we can hear: who reads `online` may send a command at once."""
        self._outbox.renew()
        if self._greet is not None:
            self._greet()
        self._connected.set()
        log.info("mqtt=up host=%s port=%d", self._endpoint.host, self._endpoint.port)

    def _on_message(self, _client: Client, _user: Any, message: MQTTMessage) -> None:
        # amqtt sends a new client the retained messages of everybody's subscriptions.
        if not any(topic_matches_sub(pattern, message.topic) for pattern, _ in self._subscriptions):
            return
        received = Message(message.topic, bytes(message.payload), message.qos, message.retain)
        try:
            self.inbox.put_nowait(received)
        except queue.Full:
            self._dropped_incoming += 1
            log.warning("mqtt=inbox_full topic=%s dropped=%d", received.topic, self._dropped_incoming)

    def _on_publish(self, _client: Client, _user: Any, mid: int, _reason: Any, _props: Any) -> None:
        self._in_flight.pop(mid, None)

    def _on_disconnect(self, _client: Client, _user: Any, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if reason.is_failure and self._connected.is_set():
            self.outcome = str(reason)
