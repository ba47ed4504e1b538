"""The board's state, and the service manager's wishes."""

from __future__ import annotations

import contextlib
import os
import socket

import psutil


def health() -> dict[str, float]:
    """Memory and load of this process and board now; temperatures in degrees C where sensors can be read."""
    memory = psutil.virtual_memory()
    state = {
        "rss_bytes": float(psutil.Process().memory_info().rss),
        "memory_available_bytes": float(memory.available),
        "load_1min": os.getloadavg()[0],
    }
    for name, sensors in psutil.sensors_temperatures().items():
        if sensors:
            state[f"temperature_{name}_c"] = max(sensor.current for sensor in sensors)
    return state


def notify_service_manager(message: str) -> None:
    """Tell systemd, e.g. READY=1, WATCHDOG=1, STOPPING=1; does nothing when started otherwise (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),  # a manager that has gone is no reason to go too
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
    ):
        channel.sendto(message.encode(), address)
