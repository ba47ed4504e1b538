"""A client of an MQTT broker but for its waiting: one connection after the other, and what it says and hears on them.

Whoever has a thread to spend on it lets that wait (agent/mqtt/client.py); whoever has ten thousand of them waits for
all at once (fleet/simulator). Whatever goes wrong in a connection ends that one, not the session.
"""

from __future__ import annotations

import abc
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

from agent.common.errors import AgentError
from agent.common.timing import Backoff
from agent.mqtt.bulk_receive import ReceiveQueue
from agent.mqtt.connection import CONNECT_TIMEOUT_S, Connection
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.message import Mailbox, Message, MessageSource
from agent.mqtt.protocol import Negotiation

log = logging.getLogger(__package__)

STABLE_S = 10.0  # a connection that lasted this long was a success, and the backoff starts over
INBOX_SIZE = 100

SessionT = TypeVar("SessionT", bound="MqttSession")


class MqttSession(abc.ABC):
    """Publishes and receives while it is open; a context manager.

    Each of the `subscriptions` has an inbox of its own, for one reader: a flood on one pushes nothing out of another.
    With `intake` all go there, in the order they came, many at a time; where it has no room the broker waits.
    session_s: as Connection has it, with an intake.
    Each attempt to connect leaves `will()` with the broker; each connection begins with `greet()`, on the thread that
    drives it: it may call `publish`, nothing that waits. What is published goes before what the `sources` have; who
    fills one of those calls `wake`. An unreachable broker is no error: it is tried again for as long as the
    session is open, and `outcome` says what became of the latest attempt, as soon as that is known.
    Raises ConfigError for a password or TLS file that cannot be read.

    Who drives it calls `_open`, `_turn` for as long as it is `_alive`, and `_end` in any case, then waits for
    `_retry_s`.
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
        sources: Sequence[MessageSource] = (),
        intake: ReceiveQueue | None = None,
        session_s: int = 0,
    ) -> None:
        self.inboxes: dict[str, queue.Queue[Message]] = {topic: queue.Queue(INBOX_SIZE) for topic in subscriptions}
        self._intake = intake
        self._session_s = session_s
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
        self._sources: tuple[MessageSource, ...] = (self._mailbox, *sources)
        self._dropped_incoming = dict.fromkeys(subscriptions, 0)
        self._connection: Connection | None = None
        self._begun = False  # the connection has been greeted
        self._leaving = False
        self._leave_by = math.inf  # on time.monotonic()
        self.outcome = "not tried yet"
        self._failed = False  # and nothing has worked since

    @abc.abstractmethod
    def __enter__(self: SessionT) -> SessionT: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether the broker has admitted us and taken our subscriptions."""
        return self._begun

    @property
    def drops(self) -> dict[str, int]:
        """Messages that fell out of a full queue so far, by cause."""
        return {"outgoing": self._mailbox.dropped, "incoming": sum(self._dropped_incoming.values())}

    @property
    def inbox(self) -> queue.Queue[Message]:
        """What arrived on the only subscription."""
        (inbox,) = self.inboxes.values()
        return inbox

    def publish(self, message: Message) -> None:
        """Leave a message in the mailbox, and return at once."""
        self._mailbox.put(message)
        self.wake()

    @abc.abstractmethod
    def wake(self) -> None:
        """There may be something to send."""

    @abc.abstractmethod
    def close(self, *last_words: Message, timeout_s: float = 2.0) -> None:
        """Deliver all that waits, then `last_words`, for at most `timeout_s`, and disconnect.

        Where that does not succeed in time the connection is cut, and the broker publishes the will.
        """

    @property
    def _alive(self) -> bool:
        return self._connection is not None and self._connection.alive

    def _open(self, wakee: socket.socket | None = None) -> None:
        """One attempt to connect. wakee: as Connection has it. Raises as `Connection.open`."""
        will = self._will() if self._will is not None else None
        version = self._negotiation.version
        self._connection = Connection(
            self._endpoint,
            version,
            self._client_id,
            self._subscriptions,
            will,
            self._hear,
            wakee,
            self._intake,
            self._session_s,
        )
        self._connection.open(self._password)
        self._follow(self._connection)

    def _turn(self, turn: Callable[[Connection], None]) -> None:
        """One turn of the connection, and what is to be sent after it. Raises as `Connection.turn`."""
        connection = self._connection
        assert connection is not None, "no connection was opened"
        turn(connection)
        self._follow(connection)  # before anybody may see that it is connected
        if connection.admitted_at is not None:
            if not self._begun:
                self._begin()
            self._send()

    def _follow(self, connection: Connection) -> None:
        """How far an attempt has come; until it has come further, why the one before failed is what helps."""
        if connection.admitted_at is not None or not self._failed:
            self.outcome, self._failed = connection.outcome, False

    def _end(self, error: Exception | None) -> None:
        """The connection is over, by this error where it was one, and nobody else's affair."""
        connection, self._connection = self._connection, None
        self._failed = True
        if connection is None:  # it never came so far
            self.outcome = str(error)
            return
        if isinstance(error, (OSError, AgentError)):
            connection.outcome = str(error)
        elif error is not None:  # a broker may send anything, and paho raises anything
            connection.outcome = f"{type(error).__name__}: {error}"
            log.warning("mqtt=broken reason=%r", connection.outcome, exc_info=error)
        connection.close()
        self._negotiation.learn(connection.answer, connection.admitted_at is not None)
        self.outcome, self._begun = connection.outcome, False
        for source in self._sources:
            source.put_back(connection.in_flight.of(source))
        if connection.admitted_at is not None and time.monotonic() - connection.admitted_at >= STABLE_S:
            self._backoff.reset()

    def _retry_s(self) -> float:
        """How long to wait until the next attempt."""
        where = self._endpoint.host, self._endpoint.port
        if self._negotiation.fell_back:
            log.info("mqtt=fallback host=%s port=%d reason=%r protocol=3.1.1", *where, self.outcome)
            return 0.0
        delay_s = self._backoff.next_s()
        log.warning("mqtt=down host=%s port=%d reason=%r retry_s=%.1f", *where, self.outcome, delay_s)
        return delay_s

    def _begin(self) -> None:
        """Nothing is said before we can hear: who reads `online` may send a command at once."""
        for source in self._sources:
            source.renew()
        if self._greet is not None:
            self._greet()
        self._begun = True
        where = self._endpoint.host, self._endpoint.port
        log.info("mqtt=up host=%s port=%d protocol=%s", *where, self._negotiation.version)

    def _send(self) -> None:
        for source in self._sources:
            self._send_from(source)
        if self._leaving and not self._waiting:
            self._send_from(self._last_words)

    def _send_from(self, source: MessageSource) -> None:
        connection = self._connection
        while connection is not None and connection.in_flight.has_room and (message := source.take()) is not None:
            self._hand_over(connection, message, source)

    def _hand_over(self, connection: Connection, message: Message, source: MessageSource) -> None:
        connection.send(message, source)

    @property
    def _waiting(self) -> int:
        return sum(map(len, self._sources))

    def _leave(self, timeout_s: float, last_words: Sequence[Message]) -> None:
        """From now on it is about to go; see `_has_left`."""
        for message in last_words:
            self._last_words.put(message)
        self._leave_by = time.monotonic() + timeout_s
        self._leaving = True

    def _has_left(self) -> bool:
        """Whether it is time to go; says goodbye to the broker if everything was delivered."""
        connection = self._connection
        if connection is None or connection.in_flight or self._waiting or len(self._last_words):
            return time.monotonic() > self._leave_by
        connection.say_goodbye()
        return True

    def _hear(self, subscription: str, message: Message) -> None:
        try:
            self.inboxes[subscription].put_nowait(message)
        except queue.Full:
            dropped = self._dropped_incoming[subscription] = self._dropped_incoming[subscription] + 1
            if dropped.bit_count() == 1:  # a flood is told at 1, 2, 4, 8 ... messages
                log.warning("mqtt=inbox_full topic=%s dropped=%d", message.topic, dropped)


__all__ = ["INBOX_SIZE", "Endpoint", "MqttClient"]

ClientT = TypeVar("ClientT", bound="MqttClient")


class MqttClient(MqttSession):
    """A session with a thread of its own, that does everything in the background."""

    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str,
        *,
        subscriptions: Sequence[str] = (),
        will: Callable[[], Message] | None = None,
        greet: Callable[[], None] | None = None,
        backoff: Backoff | None = None,
        sources: Sequence[MessageSource] = (),
        intake: ReceiveQueue | None = None,
        session_s: int = 0,
    ) -> None:
        super().__init__(
            endpoint,
            client_id,
            subscriptions=subscriptions,
            will=will,
            greet=greet,
            backoff=backoff,
            sources=sources,
            intake=intake,
            session_s=session_s,
        )
        self._connected = threading.Event()
        self._closing = threading.Event()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        if intake is not None:
            intake.on_room = intake.on_settled = self.wake
        self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)

    def __enter__(self: ClientT) -> ClientT:
        self._thread.start()
        return self

    def wait_connected(self, timeout_s: float) -> bool:
        return self._connected.wait(timeout_s)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is about to wake; closed: it has ended
            self._waker.send(b"\0")

    def close(self, *last_words: Message, timeout_s: float = 2.0) -> None:
        """As MqttSession; an attempt to connect that is under way is waited for: CONNECT_TIMEOUT_S more."""
        if self._closing.is_set():
            return
        self._leave(timeout_s, last_words)
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
            error = None
            try:
                self._open(self._wakee)
                self._serve()
            except Exception as caught:  # told by `_end`, whatever it is
                error = caught
            self._end(error)
            error = (
                None  # its traceback holds this frame, and with it a socket that failed, until Python looks for such
            )
            self._connected.clear()
            if not self._closing.is_set():
                self._closing.wait(self._retry_s())

    def _serve(self) -> None:
        """Move messages until the connection ends or the client is closed."""
        while self._alive:
            self._turn(lambda connection: connection.turn(self._patience_s()))
            if self._closing.is_set() and self._has_left():
                return

    def _begin(self) -> None:
        super()._begin()
        self._connected.set()

    def _patience_s(self) -> float:
        """How long to wait for the socket: paho's keepalive needs a look every second."""
        return min(1.0, max(0.0, self._leave_by - time.monotonic()))
