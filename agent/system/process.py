"""Control this process: its signals, and its messages to systemd."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def handling_signals(handle: Callable[[str], None]) -> Iterator[None]:
    """Call handle("SIGTERM" | "SIGINT") in the main thread while the block runs; then restore the handlers."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        handle(signal.Signals(number).name)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_interrupt(_name: str) -> None:
    """Handle a signal as Ctrl-C: end what is running, through every `finally`."""
    raise KeyboardInterrupt


def notify_service_manager(message: str) -> None:
    """Send systemd a message such as READY=1 or WATCHDOG=1 (sd_notify(3)); without systemd this does nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    with (
        suppress(OSError),  # a service manager that has gone is no reason to stop
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
    ):
        channel.sendto(message.encode(), address)
