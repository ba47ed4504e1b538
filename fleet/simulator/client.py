"""Run the agent's MQTT session on an event loop, where it shares one thread with thousands of others."""

from __future__ import annotations

import selectors
from asyncio import TimerHandle
from collections.abc import Callable

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.mqtt.client import MqttSession, SessionOptions
from agent.mqtt.connection import Connection
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.message import Mailbox, Message, MessageSource
from fleet.simulator.event_loop import Loop

_CHECKS = 4  # per keepalive: it has to be sent, and answers that are late have to be noticed


class LightClient(MqttSession):
    """A session driven by a loop. Not thread-safe: everything happens in the loop's thread.

    Attributes:
        on_turn: Called when something may have arrived, or have been delivered.
        on_dial: Called when it is time to connect, which a busy machine may do later.
        on_admitted: Called each time the broker admits a connection.
        has_left: The session was closed, or abandoned, and has ended.
        draw_delivery: For a network that duplicates and delays: draws for each message that is neither retained nor a
            last word how many times it is sent, and how late, in s. None: each is sent once, at once.
    """

    def __init__(
        self, loop: Loop, endpoint: Endpoint, client_id: str, options: SessionOptions, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(endpoint, client_id, options, clock)
        self.on_turn: Callable[[], None] = lambda: None
        self.on_dial: Callable[[], None] = lambda: None
        self.on_admitted: Callable[[], None] = lambda: None
        self.draw_delivery: Callable[[], tuple[int, float]] | None = None
        self.attempts = 0
        self._loop = loop
        self._fd: int | None = None
        self._is_writing = False
        self._woken = False
        self.has_left = False
        self._dialling = False
        self._check_timer: TimerHandle | None = None
        self._copies = Mailbox()  # the source of duplicates, whose delivery concerns nobody

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._run_woken)

    def close(self, *last_words: Message, timeout_s: float = 2.0) -> None:
        """Close as MqttSession does, but return at once; see `has_left`."""
        if not self._leaving:
            self._leave(timeout_s, last_words)
            self._loop.call_at(self._leave_by + 0.01, self._run_woken)
            self.wake()

    def cut(self) -> None:
        """Lose the connection, as when the network or the broker fails; the session connects again."""
        if self._fd is not None:
            self._lost(ConnectionResetError("cut"))

    def abandon(self) -> None:
        """End without a goodbye, as when the power fails."""
        self.has_left = True
        if self._fd is not None:
            self._lost(ConnectionAbortedError("abandoned"))

    def start(self) -> None:
        if not self.has_left:
            self._dialling = True
            self.on_dial()
            self._loop.dial(self._attempt, self._on_dialled)

    def _attempt(self) -> None:
        self.attempts += 1
        self._open()

    def _on_dialled(self, error: Exception | None) -> None:
        if error is not None or self.has_left or not self._alive or self._connection is None:
            self._lost(error)
            return
        self._fd, self._is_writing = self._connection.sock.fileno(), False
        self._loop.add_reader(self._fd, self._advance, selectors.EVENT_READ)
        self._check_later()

    def _check_later(self) -> None:
        self._check_timer = self._loop.call_later(self._endpoint.keepalive_s / _CHECKS, self._check)

    def _check(self) -> None:
        if self._fd is not None:
            self._advance(0)
        if self._fd is not None:
            self._check_later()

    def _run_woken(self) -> None:
        self._woken = False
        if self._fd is not None:
            self._advance(0)
        elif self._leaving:
            self.has_left = True

    def _advance(self, events: int) -> None:
        """Read and write what the socket is ready for, and send what waits."""

        def handle(connection: Connection) -> None:
            connection.handle(events)
            while connection.alive and connection.has_read_ahead:
                connection.handle(0)

        try:
            self._turn(handle)
            self.on_turn()
            if self._leaving and self._has_left():
                self.has_left = True
                self._lost(None)
        except Exception as error:  # a broker may send anything
            self._lost(error)
            return
        connection, fd = self._connection, self._fd
        if fd is None:
            return
        if connection is None or not connection.alive:
            self._lost(None)
        elif connection.wants_write != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(fd, self._advance, selectors.EVENT_WRITE)
            else:
                self._loop.remove_writer(fd)

    def _on_connected(self) -> None:
        super()._on_connected()
        self._end_dialling()
        self.on_admitted()

    def _end_dialling(self) -> None:
        if self._dialling:
            self._dialling = False
            self._loop.dial_finished()

    def _lost(self, error: Exception | None) -> None:
        """Clean up after a connection, or an attempt; try again later unless the session is to end."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._fd = None
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._end_dialling()
        self._end(error)
        if self._leaving:
            self.has_left = True
        if not self.has_left:
            self._loop.call_later(self._retry_s(), self.start)

    def _hand_over(self, connection: Connection, message: Message, source: MessageSource) -> None:
        times, late_s = self.draw_delivery() if self.draw_delivery is not None and not message.retain else (1, 0.0)

        def send() -> None:
            if connection is self._connection and connection.alive:
                connection.send(message, source)
                for _ in range(1, times):
                    connection.send(message, self._copies)

        if late_s:
            self._loop.call_later(late_s, send)
        else:
            send()
