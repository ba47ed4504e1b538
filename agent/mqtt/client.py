"""Keep a session with an MQTT broker: connect, publish and receive, reconnect when a connection is lost.

`MqttSession` does everything but wait: it makes one `Connection` after another, greets the broker, sends what waits and
sorts what arrives into inboxes. An error ends a connection, never the session. `Negotiation` chooses between MQTT 5 and
3.1.1. `MqttClient` is a session with a thread of its own. The fleet's simulator drives thousands of sessions from one
thread instead (fleet/simulator/client.py).
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from agent.common.clock import SYSTEM_CLOCK, Clock, Waker
from agent.common.errors import AgentError
from agent.common.timing import Backoff
from agent.mqtt.acknowledgements import PendingAck
from agent.mqtt.connection import CONNECT_TIMEOUT_S, INBOX_SIZE, Connection, SessionOptions, Version, VersionReply
from agent.mqtt.endpoint import Endpoint, Protocol
from agent.mqtt.message import HeldMessage, Mailbox, Message, MessageSource

__all__ = ["INBOX_SIZE", "Endpoint", "MqttClient", "MqttSession", "SessionOptions"]

log = logging.getLogger(__package__)

STABLE_S = 10.0  # a connection that lasted this long was a success, and the backoff starts over
# So many connections by 3.1.1, each after silence to 5, show that the broker does not speak 5.
_HINTS = 2
_DEFAULTS = SessionOptions()

SessionT = TypeVar("SessionT", bound="MqttSession")


class Negotiation:
    """The version that the next connection speaks: 5, until the broker has shown that it does not.

    1. A broker that refuses the version does not speak it: 3.1.1 from now on.
    2. Other brokers hang up (RabbitMQ before 3.13), or wait for more (amqtt 0.12, which reads the properties as the
       client's name). Then 3.1.1 is tried once; after that has helped twice, 3.1.1 is kept. Once may have been the
       network.
    3. A broker that has spoken MQTT 5 before falls back only if it refuses the version.
    """

    def __init__(self, wish: Protocol) -> None:
        self.version: Version = "3.1.1" if wish == "3.1.1" else "5"
        self.fell_back = False  # with the latest connection: the next one is due at once
        self._open = wish == "auto"
        self._spoken = False
        self._hints = 0

    def learn(self, reply: VersionReply, admitted: bool) -> None:
        """Choose the next version after a connection has ended. admitted: whether the broker accepted us."""
        self.fell_back = False
        if not self._open:
            return
        if self.version == "5":
            self._spoken = self._spoken or reply == "spoken"
            self.fell_back = reply == "refused" or (reply == "silence" and not self._spoken)
            if self.fell_back:
                self.version = "3.1.1"
                self._open = reply != "refused"
        else:
            self._hints += admitted
            if self._hints >= _HINTS:
                self._open = False
            else:
                self.version = "5"


class MqttSession(abc.ABC):
    """A session that publishes and receives while it is open; a context manager.

    An unreachable broker is no error: the session tries again for as long as it is open. `outcome` is the result of the
    latest attempt to connect, in words, as soon as that is known.

    A subclass calls `_open`, then `_turn` for as long as the session is `_alive`, and `_end` in any case. Then it waits
    for `_retry_s()` and starts again.

    Raises ConfigError for a password or TLS file that cannot be read.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str,
        options: SessionOptions = _DEFAULTS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.inboxes: dict[str, queue.Queue[Message]] = {
            topic: queue.Queue(INBOX_SIZE) for topic in options.subscriptions
        }
        self.reserved: dict[str, queue.Queue[HeldMessage]] = {
            topic: queue.Queue(INBOX_SIZE) for topic in options.recognise
        }
        self.outcome = "not tried yet"
        self._options = options
        self._clock = clock
        self._endpoint = endpoint
        self._client_id = client_id
        self._password = endpoint.password()
        if endpoint.tls is not None:
            endpoint.tls.context()  # raises here; each connection reads the files again, for certificates are renewed
        self._negotiation = Negotiation(endpoint.protocol)
        self._backoff = options.backoff or Backoff()
        self._mailbox = Mailbox()
        self._last_words = Mailbox()
        self._sources: tuple[MessageSource, ...] = (self._mailbox, *options.sources)
        self._dropped_incoming = dict.fromkeys(options.subscriptions, 0)
        self._connection: Connection | None = None
        self.connected = False  # the broker has admitted us and accepted our subscriptions, and `greet` was called
        self._leaving = False
        self._leave_by = math.inf  # monotonic
        self._failed = False  # the latest attempt failed, and nothing has worked since
        self._broken_by: set[type[Exception]] = set()  # kinds of errors whose traceback is in the log

    def __enter__(self: SessionT) -> SessionT:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def start(self) -> None:
        """Connect, and keep connected until `close`."""

    @property
    def drops(self) -> dict[str, int]:
        """Messages dropped from full queues so far, by cause."""
        return {"outgoing": self._mailbox.dropped, "incoming": sum(self._dropped_incoming.values())}

    @property
    def inbox(self) -> queue.Queue[Message]:
        """The inbox of the only subscription."""
        (inbox,) = self.inboxes.values()
        return inbox

    def publish(self, message: Message) -> None:
        """Leave a message in the mailbox, and return at once."""
        self._mailbox.put(message)
        self.wake()

    @abc.abstractmethod
    def wake(self) -> None:
        """Notify the session that there may be something to send."""

    @abc.abstractmethod
    def close(self, *last_words: Message, timeout_s: float = 2.0) -> None:
        """Deliver all that waits, then `last_words`, for at most `timeout_s`, and disconnect.

        If that does not succeed in time, the connection is cut, and the broker publishes the will.
        """

    @property
    def _alive(self) -> bool:
        return self._connection is not None and self._connection.alive

    def _open(self, waker: Waker | None = None) -> None:
        """Try once to connect. waker: as in Connection. Raises as `Connection.open`."""
        self._connection = Connection(
            self._endpoint,
            self._negotiation.version,
            self._client_id,
            self._options,
            self._receive,
            waker,
            self._clock,
        )
        self._connection.open(self._password)
        self._update_outcome(self._connection)

    def _turn(self, turn: Callable[[Connection], None]) -> None:
        """Call `turn` with the connection, then send what waits. Raises as `Connection.turn`."""
        connection = self._connection
        assert connection is not None, "no connection was opened"
        turn(connection)
        self._update_outcome(connection)  # before anybody can see that it is connected
        if connection.admitted_at is not None:
            if not self.connected:
                self._on_connected()
            for source in self._sources:
                self._send_from(source)
            if self._leaving and not self._unsent:
                self._send_from(self._last_words)

    def _update_outcome(self, connection: Connection) -> None:
        """Take over the connection's outcome, but keep why the previous one failed until this one is admitted."""
        if connection.admitted_at is not None or not self._failed:
            self.outcome, self._failed = connection.outcome, False

    def _on_connected(self) -> None:
        """Greet the broker; our subscriptions hold by now, because who reads `online` may send a command at once."""
        for source in self._sources:
            source.connection_started()
        if self._options.greet is not None:
            self._options.greet()
        self.connected = True
        address = self._endpoint.host, self._endpoint.port
        log.info("mqtt=up host=%s port=%d protocol=%s", *address, self._negotiation.version)

    def _send_from(self, source: MessageSource) -> None:
        connection = self._connection
        while connection is not None and connection.in_flight.has_room and (message := source.pop()) is not None:
            self._hand_over(connection, message, source)

    def _hand_over(self, connection: Connection, message: Message, source: MessageSource) -> None:
        connection.send(message, source)

    def _end(self, error: Exception | None) -> None:
        """Close the connection, return what it did not deliver, and note why it ended; raises nothing."""
        connection, self._connection = self._connection, None
        self._failed = True
        reason = self._describe(error) if error is not None else ""
        if connection is None:  # the attempt failed before there was a connection
            self.outcome = reason
            return
        connection.outcome = reason or connection.outcome
        connection.close()
        self._negotiation.learn(connection.version_reply, connection.admitted_at is not None)
        self.outcome, self.connected = connection.outcome, False
        for source in self._sources:
            source.put_back(connection.in_flight.messages_from(source))
        if connection.admitted_at is not None and self._clock.monotonic_s() - connection.admitted_at >= STABLE_S:
            self._backoff.reset()

    def _describe(self, error: Exception) -> str:
        """Return why a connection has ended; log the traceback of an unexpected error, once for each kind."""
        if isinstance(error, (OSError, AgentError)):
            return str(error)
        reason = f"{type(error).__name__}: {error}"  # a broker may send anything, and paho raises anything
        is_new = type(error) not in self._broken_by
        self._broken_by.add(type(error))
        log.warning("mqtt=broken reason=%r", reason, exc_info=error if is_new else None)
        return reason

    def _retry_s(self) -> float:
        """Return how many seconds to wait until the next attempt."""
        address = self._endpoint.host, self._endpoint.port
        if self._negotiation.fell_back:
            log.info("mqtt=fallback host=%s port=%d reason=%r protocol=3.1.1", *address, self.outcome)
            return 0.0
        delay_s = self._backoff.next_s()
        log.warning("mqtt=down host=%s port=%d reason=%r retry_s=%.1f", *address, self.outcome, delay_s)
        return delay_s

    @property
    def _unsent(self) -> int:
        """The number of messages that wait in the sources."""
        return sum(map(len, self._sources))

    def _leave(self, timeout_s: float, last_words: Sequence[Message]) -> None:
        """Start to leave: `_has_left` is true once everything is delivered, or after `timeout_s`."""
        for message in last_words:
            self._last_words.put(message)
        self._leave_by = self._clock.monotonic_s() + timeout_s
        self._leaving = True

    def _has_left(self) -> bool:
        """Return whether it is time to go; says goodbye to the broker if everything was delivered."""
        connection = self._connection
        if connection is None or connection.in_flight or self._unsent or len(self._last_words):
            return self._clock.monotonic_s() >= self._leave_by
        connection.say_goodbye()
        return True

    def _receive(self, subscription: str, message: Message, ack: PendingAck) -> None:
        recognise = self._options.recognise.get(subscription)
        if recognise is not None and recognise(message.payload):

            def confirm() -> None:
                ack.release()
                self.wake()

            held = HeldMessage(**vars(message), confirm=confirm)
            with contextlib.suppress(queue.Full):  # by MQTT 3.1.1, where the broker knows no limit
                self.reserved[subscription].put_nowait(held)
                return
        ack.release()
        try:
            self.inboxes[subscription].put_nowait(message)
        except queue.Full:
            dropped = self._dropped_incoming[subscription] = self._dropped_incoming[subscription] + 1
            if dropped.bit_count() == 1:  # a flood is logged at 1, 2, 4, 8 ... messages
                log.warning("mqtt=inbox_full topic=%s dropped=%d", message.topic, dropped)


class MqttClient(MqttSession):
    """A session with a thread of its own, which does everything in the background.

    >>> with MqttClient(endpoint, "us", SessionOptions(subscriptions=["tared/#"])) as client:  # doctest: +SKIP
    ...     client.publish(Message("tared/greeting", b"hello"))
    ...     message = client.inbox.get(timeout=5.0)
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str,
        options: SessionOptions = _DEFAULTS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(endpoint, client_id, options, clock)
        self._connected = threading.Event()
        self._closing = threading.Event()
        self._waker = Waker()
        if options.receive_queue is not None:
            options.receive_queue.on_progress = self.wake
        self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_connected(self, timeout_s: float) -> bool:
        return self._clock.wait(self._connected, timeout_s)

    def wake(self) -> None:
        self._waker.wake()

    def close(self, *last_words: Message, timeout_s: float = 2.0) -> None:
        """Close as MqttSession does, but wait up to CONNECT_TIMEOUT_S longer for an attempt to connect."""
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
        log.info("mqtt=closed unsent=%d", self._unsent)

    def _run(self) -> None:
        while not self._closing.is_set():
            error = None
            try:
                self._open(self._waker)
                while self._alive:
                    self._turn(lambda connection: connection.turn(self._wait_s))
                    if self._closing.is_set() and self._has_left():
                        break
            except Exception as caught:  # `_end` reports it, whatever it is
                error = caught
            self._end(error)
            # A traceback holds this frame, and so a failed socket, until the garbage collector runs.
            error = None
            self._connected.clear()
            if not self._closing.is_set():
                self._clock.wait(self._closing, self._retry_s())

    def _on_connected(self) -> None:
        super()._on_connected()
        self._connected.set()

    @property
    def _wait_s(self) -> float:
        """Return the longest wait for the socket: paho's keepalive has to be checked every second."""
        return min(1.0, max(0.0, self._leave_by - self._clock.monotonic_s()))
