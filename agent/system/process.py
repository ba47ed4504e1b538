"""Control this process: its signals, its end in time, and its messages to systemd."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# After the signal. The frame path, a child and the broker may take 30 s in all; systemd's SIGKILL follows after 45 s.
END_S = 40.0
_POLL_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handling_signals(handle: Callable[[str], None]) -> Iterator[None]:
    """Call handle("SIGTERM" | "SIGINT") in the main thread while the block runs; then restore the handlers."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        handle(signal.Signals(number).name)

    previous = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_interrupt(_name: str) -> None:
    """Handle a signal as Ctrl-C: end what is running, through every `finally`."""
    raise KeyboardInterrupt


@contextmanager
def ending_in_time() -> Iterator[None]:
    """End the process with status 1 if the block has not ended END_S after SIGTERM or SIGINT; for the main thread.

    Python runs signal handlers in the main thread, between two of its own steps. While that thread waits in a library,
    the signal is noted, and does nothing; while it waits in the kernel for a disk on a network, the signal is not even
    taken. What each thread is doing then is printed. Without a descriptor to spare there is no guard.
    """
    try:
        woken, wake = socket.socketpair()
    except OSError:
        yield
        return
    with woken, wake:
        wake.setblocking(False)
        guard = threading.Thread(target=_guard, args=(woken,), name="end-guard", daemon=True)
        guard.start()
        previous = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            wake.shutdown(socket.SHUT_RDWR)
            guard.join()
            faulthandler.cancel_dump_traceback_later()


def _guard(woken: socket.socket) -> None:
    """Once a signal has come, let the process end in time; return where the block ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # so that `sigpending` says what the main thread has not taken
    is_ending = False
    while True:
        moved = select.select([woken], [], [], _POLL_S)[0]
        numbers = woken.recv(64) if moved else bytes(signal.sigpending())
        if moved and not numbers:
            return
        if not is_ending and any(number in numbers for number in _SIGNALS):
            is_ending = True
            faulthandler.dump_traceback_later(END_S, exit=True)  # it needs nothing of Python's that may hang


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
