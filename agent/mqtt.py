"""A client of an MQTT broker that heals itself. MQTT 5 where the broker speaks it; 3.1.1 suffices.

One thread owns the connection and everything it touches: it connects, waits on the socket, and moves messages
between the broker, sources of messages and bounded inboxes. Nobody else calls paho, so nobody waits for its
locks: `publish` only fills a mailbox. Whatever goes wrong in a connection ends that one, not the thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from agent.backoff import Backoff
from agent.connection import CONNECT_TIMEOUT_S, Connection
from agent.endpoint import Endpoint
from agent.errors import AgentError
from agent.intake import Intake
from agent.mailbox import Mailbox
from agent.mqtt5 import Negotiation
from agent.publishing import Message, Source

__all__ = ["INBOX_SIZE", "Endpoint", "MqttClient"]

log = logging.getLogger(__name__)

STABLE_S = 10.0  # a connection that lasted this long was a success, and the backoff starts over
INBOX_SIZE = 100

ClientT = TypeVar("ClientT", bound="MqttClient")


class MqttClient:
    """Publishes and receives in the background while it is open; a context manager.

    Each of the `subscriptions` has an inbox of its own, for one reader: a flood on one pushes nothing out of another.
    With `intake` all go there, in the order they came, many at a time; where it has no room the broker waits.
    Each attempt to connect leaves `will()` with the broker; each connection begins with `greet()`, on the MQTT thread:
    it may call `publish`, nothing that waits. What is published goes before what the `sources` have; who fills one of
    those calls `wake`. An unreachable broker is no error: it is tried again for as long as the
    client is open, and `outcome` says what became of the latest attempt.
    Raises ConfigError for a password or TLS file that cannot be read.
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
        sources: Sequence[Source] = (),
        intake: Intake | None = None,
    ) -> None:
        self.inboxes: dict[str, queue.Queue[Message]] = {topic: queue.Queue(INBOX_SIZE) for topic in subscriptions}
        self._intake = intake
        self._endpoint = endpoint
        self._password = endpoint.password()
        if endpoint.tls is not None:
            endpoint.tls.context()  # for what it raises; certificates are renewed, so each connection reads them anew
        self._negotiation = Negotiation(endpoint.protocol)
        self._client_id = client_id
        self._subscriptions = subscriptions
        self._will = will
        self._greet = greet
        self._backoff = backoff or Backoff()
        self._mailbox = Mailbox()
        self._last_words = Mailbox()
        self._sources: tuple[Source, ...] = (self._mailbox, *sources)
        self._dropped_incoming = dict.fromkeys(subscriptions, 0)
        self.outcome = "not tried yet"
        self._connected = threading.Event()
        self._closing = threading.Event()
        self._close_by = math.inf  # on time.monotonic()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        if intake is not None:
            intake.on_room = self.wake
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
        return {"outgoing": self._mailbox.dropped, "incoming": sum(self._dropped_incoming.values())}

    @property
    def inbox(self) -> queue.Queue[Message]:
        """What arrived on the only subscription."""
        (inbox,) = self.inboxes.values()
        return inbox

    def wait_connected(self, timeout_s: float) -> bool:
        return self._connected.wait(timeout_s)

    def publish(self, message: Message) -> None:
        """Leave a message in the mailbox, and return at once."""
        self._mailbox.put(message)
        self.wake()

    def wake(self) -> None:
        """There may be something to send."""
        with contextlib.suppress(OSError):  # full: the thread is about to wake; closed: it has ended
            self._waker.send(b"\0")

    def close(self, *last_words: Message, timeout_s: float = 2.0) -> None:
        """Deliver all that waits, then `last_words`, for at most `timeout_s`, and disconnect.

        Where that does not succeed in time the connection is cut, and the broker publishes the will. An
        attempt to connect that is under way is waited for: CONNECT_TIMEOUT_S more.
        """
        if self._closing.is_set():
            return
        for message in last_words:
            self._last_words.put(message)
        self._close_by = time.monotonic() + timeout_s
        self._closing.set()
        self.wake()
        self._thread.join(timeout_s + CONNECT_TIMEOUT_S + 1.0)
        if self._thread.is_alive():  # a resolver that does not answer; the thread is a daemon
            log.warning("mqtt=stuck host=%s port=%d", self._endpoint.host, self._endpoint.port)
            return
        self._waker.close()
        self._wakee.close()
        log.info("mqtt=closed unsent=%d", self._waiting)

    def _run(self) -> None:
        while not self._closing.is_set():
            up_s = self._connect()
            if self._closing.is_set():
                return
            if up_s >= STABLE_S:
                self._backoff.reset()
            where = self._endpoint.host, self._endpoint.port
            if self._negotiation.fell_back:
                log.info("mqtt=fallback host=%s port=%d reason=%r protocol=3.1.1", *where, self.outcome)
                continue
            delay_s = self._backoff.next_s()
            log.warning("mqtt=down host=%s port=%d reason=%r retry_s=%.1f", *where, self.outcome, delay_s)
            self._closing.wait(delay_s)

    def _connect(self) -> float:
        """One connection, from the attempt to its end; returns for how many seconds it was up."""
        will = self._will() if self._will is not None else None
        version = self._negotiation.version
        connection = Connection(
            self._endpoint, version, self._client_id, self._subscriptions, will, self._hear, self._wakee, self._intake
        )
        try:
            connection.open(self._password)
            self._serve(connection)
        except (OSError, AgentError) as error:
            connection.outcome = str(error)
        except Exception as error:  # a broker may send anything, and paho raises anything
            connection.outcome = f"{type(error).__name__}: {error}"
            log.warning("mqtt=broken reason=%r", connection.outcome, exc_info=True)
        finally:
            connection.close()
            self._negotiation.learn(connection.answer, connection.admitted_at is not None)
            self.outcome = connection.outcome
            self._connected.clear()
            for source in self._sources:
                source.put_back(connection.in_flight.of(source))
        return time.monotonic() - connection.admitted_at if connection.admitted_at is not None else 0.0

    def _serve(self, connection: Connection) -> None:
        """Move messages until the connection ends or the client is closed."""
        self.outcome = connection.outcome
        while connection.alive:
            connection.turn(self._patience_s())
            self.outcome = connection.outcome  # before anybody may see that it is connected
            if connection.admitted_at is not None:
                if not self.connected:
                    self._begin()
                self._send(connection)
            if self._closing.is_set() and self._leave(connection):
                return

    def _patience_s(self) -> float:
        """How long to wait for the socket: paho's keepalive needs a look every second."""
        return min(1.0, max(0.0, self._close_by - time.monotonic()))

    def _begin(self) -> None:
        """Nothing is said before we can hear: who reads `online` may send a command at once."""
        for source in self._sources:
            source.renew()
        if self._greet is not None:
            self._greet()
        self._connected.set()
        where = self._endpoint.host, self._endpoint.port
        log.info("mqtt=up host=%s port=%d protocol=%s", *where, self._negotiation.version)

    def _send(self, connection: Connection) -> None:
        for source in self._sources:
            self._send_from(source, connection)
        if self._closing.is_set() and not self._waiting:
            self._send_from(self._last_words, connection)

    def _send_from(self, source: Source, connection: Connection) -> None:
        while connection.in_flight.has_room and (message := source.take()) is not None:
            connection.send(message, source)

    @property
    def _waiting(self) -> int:
        return sum(map(len, self._sources))

    def _leave(self, connection: Connection) -> bool:
        """Whether it is time to go; says goodbye to the broker if everything was delivered."""
        if connection.in_flight or self._waiting or len(self._last_words):
            return time.monotonic() > self._close_by
        connection.say_goodbye()
        return True

    def _hear(self, subscription: str, message: Message) -> None:
        try:
            self.inboxes[subscription].put_nowait(message)
        except queue.Full:
            dropped = self._dropped_incoming[subscription] = self._dropped_incoming[subscription] + 1
            if dropped.bit_count() == 1:  # a flood is told at 1, 2, 4, 8 ... messages
                log.warning("mqtt=inbox_full topic=%s dropped=%d", message.topic, dropped)
