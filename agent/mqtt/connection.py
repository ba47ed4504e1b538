"""One connection to a broker, by MQTT 5 or 3.1.1, from the attempt to its end: what is said on it, and what follows.

Each has a client of its own (agent/paho_client.py), because paho would resend a status of the lost connection after the
new one's: what was not acknowledged is left in `in_flight`, for whoever connects next. The broker is not trusted: what
breaks the protocol, and silence where an answer is due, end the connection as an exception.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from agent import tls
from agent.broker_trouble import recognise, violation
from agent.bulk import BulkSocket
from agent.endpoint import Endpoint
from agent.errors import AgentError
from agent.in_flight import InFlight
from agent.intake import Intake
from agent.mqtt5 import Answer, Limits, Version, packet_bytes
from agent.paho_client import PahoClient
from agent.publishing import Message, Source
from agent.taking_in import TakingIn
from agent.wire import MAX_PAYLOAD_BYTES

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
IN_FLIGHT = 20  # messages handed to paho and not yet acknowledged
_MAX_PACKET_BYTES = 4 * MAX_PAYLOAD_BYTES  # what is longer a broker that speaks MQTT 5 does not send a board
_UNACKNOWLEDGED = 1000  # messages that a broker has under way to whoever takes in many


class Connection:
    """Belongs to one thread: it calls `open`, then `turn` while `alive`, and `close` in any case.

    `outcome` says in words how far it has come, `answer` what became of the version it speaks. `admitted_at` is the
    monotonic time at which the broker had taken us and our subscriptions. A byte in `wakee` ends a turn; `hear` gets
    what arrives, with its subscription; where there is an intake, that gets all of it instead. Without a wakee there
    are no turns: who waits for many connections at once waits for their `sock`, and calls `handle`.

    session_s: for so long the broker keeps what comes for us after the connection, by MQTT 3.1.1 for as long as it
    pleases; and until the intake's reader has settled what came, it stays unacknowledged. 0: nothing outlasts us.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        version: Version,
        client_id: str,
        subscriptions: Sequence[str],
        will: Message | None,
        hear: Callable[[str, Message], None],
        wakee: socket.socket | None,
        intake: Intake | None = None,
        session_s: int = 0,
    ) -> None:
        self.outcome = "not tried yet"
        self.answer: Answer = "unasked"
        self.admitted_at: float | None = None
        self.in_flight = InFlight(IN_FLIGHT)
        self._endpoint = endpoint
        # The broker publishes a delayed will no later than at the session's end (section 3.1.3.2.2).
        will_delay_s = endpoint.will_delay_s if version == "5" and will is not None else 0
        self._session_ends = bool(will_delay_s) and not session_s  # with a goodbye
        self._is_board = will is not None
        self._limits = Limits()
        self._subscriptions = subscriptions
        self._subscribing: int | None = None  # the message id of the SUBSCRIBE that waits for its answer
        self._answer_by = math.inf
        self._hear = hear
        self._wakee = wakee
        self._taking_in = TakingIn(intake, holds=session_s > 0) if intake is not None else None
        self._selector = selectors.DefaultSelector() if wakee is not None else None
        self._client = PahoClient(
            endpoint,
            version,
            client_id,
            self,
            will=will,
            will_delay_s=will_delay_s,
            session_s=max(session_s, will_delay_s),
            in_flight=IN_FLIGHT,
            connect_s=CONNECT_TIMEOUT_S,
            bulk=self._taking_in is not None,
        )

    @property
    def alive(self) -> bool:
        """Whether there is still a socket."""
        return self.sock is not None

    @property
    def sock(self) -> Any:
        """What a selector takes; None without a connection."""
        return self._client.sock

    @property
    def wants_write(self) -> bool:
        """Whether it waits until the socket takes more."""
        sock = self.sock
        return self._client.wants_write or (isinstance(sock, BulkSocket) and sock.wants_write)

    def open(self, password: str | None) -> None:
        """Reach the broker and introduce ourselves.

        Raises OSError, AgentError (`broker.tls`, `broker.websocket`), ConfigError (`mqtt.host`, `mqtt.tls`).
        """
        self.outcome = "no answer to CONNECT"
        # An operator asks for nothing: amqtt 0.12 refuses a version that comes without properties, else it waits.
        wishes: dict[str, int | None] = {}
        if self._is_board or self._taking_in is not None:
            wishes["MaximumPacketSize"] = _MAX_PACKET_BYTES
        if self._taking_in is not None:
            wishes["ReceiveMaximum"] = _UNACKNOWLEDGED
        self._client.connect(password, **wishes)
        self._answer_by = time.monotonic() + CONNECT_TIMEOUT_S
        if (sock := self.sock) is not None:
            self.answer = "silence"
            if self._selector is not None and self._wakee is not None:
                self._selector.register(self._wakee, selectors.EVENT_READ)
                self._selector.register(sock, selectors.EVENT_READ)

    def turn(self, patience_s: float) -> None:
        """Wait for something to do, for at most `patience_s`, and do it.

        Raises AgentError (`broker.protocol`, `broker.silent`, `broker.port`, `broker.limits`), and whatever paho makes
        of broken packets.
        """
        if (sock := self.sock) is None or self._selector is None or self._wakee is None:
            return
        self._selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self.wants_write else 0))
        ready = {
            key.fileobj: events for key, events in self._selector.select(0.0 if self.has_read_ahead else patience_s)
        }
        if self._wakee in ready:
            self._wakee.recv(4096)
        self.handle(ready.get(sock, 0))

    @property
    def has_read_ahead(self) -> bool:
        """Whether there is something to read that no selector sees."""
        # Only the sockets of TLS, and paho's for websockets, have `pending`.
        return bool(getattr(self.sock, "pending", int)())

    def handle(self, events: int) -> None:
        """Do what is due. events: of `selectors`, that the socket is ready for. Raises as `turn`."""
        if (sock := self.sock) is None:
            return
        if events & selectors.EVENT_READ or self.has_read_ahead:
            self._read(sock)
        if isinstance(sock, BulkSocket) and self._taking_in is not None:
            self._taking_in.advance(sock)
        if events & selectors.EVENT_WRITE:
            self._client.write()
        self._client.keep_alive()
        if time.monotonic() > min(self._answer_by, self.in_flight.answer_by):
            found = self.outcome if self.admitted_at is None else f"{len(self.in_flight)} messages unacknowledged"
            raise AgentError("broker.silent", found, "answers in time", "see the broker's log, or restart it")

    def send(self, message: Message, source: Source) -> None:
        """Publish what was taken from `source`, which hears of its delivery.

        What the broker takes from nobody, for its length, is left out, and the source hears of that; so is a message of
        QoS 0 while the network has no room.
        """
        length = packet_bytes(message)
        if length > self._limits.packet_bytes:
            line = "mqtt=too_large topic=%s bytes=%d limit=%d remedy='the maximum packet size of the broker'"
            log.warning(line, message.topic, length, self._limits.packet_bytes)
            source.refused(message, for_good=True)
            return
        if not message.qos and self._client.wants_write:  # it would wait where nothing bounds what waits
            source.refused(message, for_good=False)
            return
        packet_id = self._client.publish(message, message.retain and self._limits.retains)
        if message.qos:
            self.in_flight.add(packet_id, message, source)

    def say_goodbye(self) -> None:
        """Disconnect, so that the will stays unsaid, and no session is left but one that was asked for."""
        self._client.disconnect(ends_session=self._session_ends)

    def close(self) -> None:
        """Cut the connection, unless a goodbye was said: then the broker publishes the will."""
        if self._selector is not None:
            self._selector.close()
        self._client.close()

    def _read(self, sock: Any) -> None:
        if self.answer == "silence" and isinstance(sock, (socket.socket, BulkSocket)) and self._endpoint.tls is None:
            with contextlib.suppress(ConnectionError):  # which paho is told again
                begin = sock.peek(5) if isinstance(sock, BulkSocket) else sock.recv(5, socket.MSG_PEEK)
                if (other := recognise(begin)) is not None:
                    self.answer = "unasked"
                    raise other
        self._client.read()

    def on_connack(self, refusal: str | None, speaks_version: bool, limits: Limits) -> None:
        """As PahoClient tells it; so are all `on_`."""
        self.answer = "spoken" if speaks_version else "refused"
        if refusal is not None:
            hint = "; set mqtt.protocol: auto" if self.answer == "refused" and self._endpoint.protocol == "5" else ""
            self.outcome = f"refused: {refusal}{hint}"
            return
        self._limits = limits
        self.in_flight.most = min(IN_FLIGHT, limits.in_flight)
        if limits.qos < 1:
            raise AgentError(
                "broker.limits", "a broker for QoS 0 alone", "QoS 1", "raise the maximum QoS of the broker"
            )
        if self._subscriptions:
            self.outcome = "no answer to SUBSCRIBE"
            self._answer_by = time.monotonic() + CONNECT_TIMEOUT_S
            self._subscribing = self._client.subscribe(self._subscriptions)
        else:
            self._admit()

    def on_suback(self, packet_id: int, refusals: Sequence[str | None]) -> None:
        if packet_id != self._subscribing:
            raise violation("a SUBACK that nobody waits for", "one answer to each SUBSCRIBE")
        self._subscribing = None
        if len(refusals) != len(self._subscriptions):
            raise violation(f"a SUBACK with {len(refusals)} codes", f"{len(self._subscriptions)}")
        for topic, refusal in zip(self._subscriptions, refusals, strict=True):
            if refusal is not None:
                log.warning("mqtt=deaf topic=%s reason=%r remedy=%r", topic, refusal, "the broker's ACL")
        self._admit()

    def _admit(self) -> None:
        self.outcome = "connected"
        self.admitted_at = time.monotonic()
        self._answer_by = math.inf

    def on_message(self, subscription: str, message: Message) -> None:
        self._hear(subscription, message)

    def on_puback(self, packet_id: int, refusal: str | None) -> None:
        self.in_flight.acknowledge(packet_id, refusal)

    def on_end(self, cause: str, error: OSError | None) -> None:
        if error is not None and (told := tls.explained(error)) is not None:
            self.answer = "unasked"
            self.outcome = str(told)
        elif self.admitted_at is not None:
            self.outcome = f"connection lost: {cause}"
        elif not self.outcome.startswith("refused"):
            hint = "; a port for TLS wants mqtt.tls" if self._endpoint.tls is None and self.answer == "silence" else ""
            self.outcome += f", then the connection was lost: {cause}{hint}"
