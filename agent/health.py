"""The board's state, and the service manager's wishes."""

from __future__ import annotations

import contextlib
import os
import socket

import psutil

from agent.board_state import BoardState


def health(board: BoardState | None = None) -> dict[str, float | str | bool]:
    """Memory and load of this process and board now; where they can be read: temperatures in degrees C, power in W.

    Of a Jetson also its power mode; throttling: whether heat slows the board down, absent where it does not tell.
    """
    reading = (board or BoardState()).read()
    state: dict[str, float | str | bool] = {
        "rss_bytes": float(psutil.Process().memory_info().rss),
        "memory_available_bytes": float(reading.memory_available_bytes),
        "load_1min": os.getloadavg()[0],
    }
    for name, sensors in psutil.sensors_temperatures().items():
        if sensors:
            state[f"temperature_{name}_c"] = max(sensor.current for sensor in sensors)
    if reading.power_mode is not None:
        state["power_mode"] = reading.power_mode
    if reading.power_w is not None:
        state["power_w"] = round(reading.power_w, 3)
    if reading.throttling is not None:
        state["throttling"] = bool(reading.throttling)
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
