"""A client of an MQTT broker that heals itself. MQTT 5 where the broker speaks it; 3.1.1 suffices.

One thread owns the connection and everything it touches: it connects, waits on the socket, and moves messages
between the broker, sources of messages and bounded inboxes. Nobody else calls paho, so nobody waits for its
locks: `publish` only fills a mailbox.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from agent.backoff import Backoff
from agent.connection import CONNECT_TIMEOUT_S
from agent.endpoint import Endpoint
from agent.intake import Intake
from agent.publishing import Message, Source
from agent.session import INBOX_SIZE, Session

__all__ = ["INBOX_SIZE", "Endpoint", "MqttClient"]

log = logging.getLogger(__name__)

ClientT = TypeVar("ClientT", bound="MqttClient")


class MqttClient(Session):
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
        sources: Sequence[Source] = (),
        intake: Intake | None = None,
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
        """As Session; an attempt to connect that is under way is waited for: CONNECT_TIMEOUT_S more."""
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
