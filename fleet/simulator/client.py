"""A session that shares its thread with thousands of others: the agent's, driven by a loop."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import TypeVar

from agent.mqtt.client import MqttSession, SessionOptions
from agent.mqtt.connection import Connection
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.message import Mailbox, Message, MessageSource
from fleet.simulator.event_loop import Loop, Timer

_LOOKS = 4  # in a keepalive, that need one now and then, as does what is waited for

ClientT = TypeVar("ClientT", bound="LightClient")


class LightClient(MqttSession):
    """`on_turn` is called when something may have come, or have been delivered; `on_dial` when it is
    its time to connect, which may be before a busy machine gets to it, `on_admitted` with each connection.

    garbles: may be asked of each message that is neither retained nor a last word: how often it is sent, and how late,
    in seconds; for a network that duplicates and delays. Not thread-safe: all is done in the loop's thread.
    """

    def __init__(self, loop: Loop, endpoint: Endpoint, client_id: str, options: SessionOptions) -> None:
        super().__init__(endpoint, client_id, options)
        self.on_turn: Callable[[], None] = lambda: None
        self.on_dial: Callable[[], None] = lambda: None
        self.on_admitted: Callable[[], None] = lambda: None
        self.garbles: Callable[[], tuple[int, float]] | None = None
        self.attempts = 0
        self._loop = loop
        self._fd: int | None = None
        self._events = 0
        self._woken = False
        self._over = False
        self._dialling = False
        self._look: Timer | None = None
        self._copies = Mailbox()  # nobody is told of them

    def __enter__(self: ClientT) -> ClientT:
        self._dial()
        return self

    @property
    def over(self) -> bool:
        """Whether it was closed, and has left."""
        return self._over

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.soon(self._advance_woken)

    def close(self, *last_words: Message, timeout_s: float = 2.0) -> None:
        """As MqttSession, but that it returns at once; see `over`."""
        if not self._leaving:
            self._leave(timeout_s, last_words)
            self._loop.at(self._leave_by + 0.01, self._advance_woken)
            self.wake()

    def cut(self) -> None:
        """As when the network or the broker has gone: it is tried again."""
        if self._fd is not None:
            self._lost(ConnectionResetError("cut"))

    def abandon(self) -> None:
        """As when the power has gone: no goodbye, and no other attempt."""
        self._over = True
        if self._fd is not None:
            self._lost(ConnectionAbortedError("abandoned"))

    def _dial(self) -> None:
        if not self._over:
            self._dialling = True
            self.on_dial()
            self._loop.dial(self._attempt, self._dialled)

    def _attempt(self) -> None:
        self.attempts += 1
        self._open()

    def _dialled(self, error: Exception | None) -> None:
        if error is not None or self._over or not self._alive or self._connection is None:
            self._lost(error)
            return
        self._fd, self._events = self._loop.watch(self._connection.sock, self._advance), selectors.EVENT_READ
        self._look_again()

    def _look_again(self) -> None:
        self._look = self._loop.at(time.monotonic() + self._endpoint.keepalive_s / _LOOKS, self._look_now)

    def _look_now(self) -> None:
        if self._connection is None:
            return
        try:
            self._connection.handle(0)
        except Exception as error:  # as in `_advance`
            self._lost(error)
            return
        self._watch_for_more()
        if self._fd is not None:
            self._look_again()

    def _advance_woken(self) -> None:
        self._woken = False
        if self._fd is not None:
            self._advance(0)
        elif self._leaving:
            self._over = True

    def _advance(self, events: int) -> None:
        """The socket is ready for these, or there may be something to send."""
        try:
            self._turn(lambda connection: self._handle(connection, events))
            self.on_turn()
            if self._leaving and self._has_left():
                self._over = True
                self._lost(None)
        except Exception as error:  # a broker may send anything
            self._lost(error)
            return
        if self._fd is not None:
            self._watch_for_more()

    def _handle(self, connection: Connection, events: int) -> None:
        connection.handle(events)
        while connection.alive and connection.has_read_ahead:
            connection.handle(0)

    def _watch_for_more(self) -> None:
        connection, fd = self._connection, self._fd
        if connection is None or fd is None or not connection.alive:
            self._lost(None)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if events != self._events:
            self._events = events
            self._loop.watch_for(fd, events, self._advance)

    def _on_connected(self) -> None:
        super()._on_connected()
        self._end_dialling()
        self.on_admitted()

    def _end_dialling(self) -> None:
        if self._dialling:
            self._dialling = False
            self._loop.dialled()

    def _lost(self, error: Exception | None) -> None:
        """The connection has ended, or was none."""
        if self._fd is not None:
            self._loop.unwatch(self._fd)
            self._fd = None
        if self._look is not None:
            self._look.cancel()
        self._end_dialling()
        self._end(error)
        if self._leaving:
            self._over = True
        if not self._over:
            self._loop.at(time.monotonic() + self._retry_s(), self._dial)

    def _hand_over(self, connection: Connection, message: Message, source: MessageSource) -> None:
        times, late_s = self.garbles() if self.garbles is not None and not message.retain else (1, 0.0)

        def send() -> None:
            if connection is self._connection and connection.alive:
                connection.send(message, source)
                for _ in range(1, times):
                    connection.send(message, self._copies)

        if late_s:
            self._loop.at(time.monotonic() + late_s, send)
        else:
            send()
