"""Follow the devices of a fleet for `tared watch`: a live table, or a line of JSON for each message."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.live import Live

from agent.common.errors import AgentError
from agent.common.table import ShownConsole, tabulate
from agent.common.timing import Backoff
from agent.contract.topics import MAX_NAME_BYTES, Topics
from agent.contract.wire import read_object
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.receive_queue import Arrival, ReceiveQueue
from fleet.devices.facts import cameras_of, value_at
from fleet.operator import wait_connected
from fleet.untrusted import printable

_HEADS = ("device", "state", "engine", "fps", "p50 ms", "p99 ms", "fidelity", "drift", "newest event", "heard")
KINDS = ("status", "birth", "telemetry", "event", "reported")
_CONNECT_S = 10.0
_POLL_S = 0.2
_QUEUE_BYTES = 16 << 20


@dataclass
class WatchedDevice:
    """A device, as far as it has reported.

    Args:
        newest: The newest document of each kind.
        heard_s: Monotonic time of the newest live message; None if only retained ones have arrived.
    """

    newest: dict[str, dict[str, Any]] = field(default_factory=dict)
    heard_s: float | None = None


def watch(
    endpoint: Endpoint,
    fleet: str,
    devices: frozenset[str] = frozenset(),
    as_json: bool = False,
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Follow devices until `ended` returns True, or an interrupt.

    Args:
        devices: Their names; empty: all of the fleet.
        as_json: Print JSON lines on a terminal, too.

    Raises AgentError (`broker.unreachable`).
    """
    console = ShownConsole()
    live = console.is_terminal and not as_json
    known: dict[str, WatchedDevice] = {}
    topics = [f"tared/v1/{fleet}/+/{kind}" for kind in KINDS]
    arrivals = ReceiveQueue(_QUEUE_BYTES)  # a broker sends what it retains of a thousand devices at once
    options = SessionOptions(subscriptions=topics, backoff=Backoff(0.2, 2.0), receive_queue=arrivals)
    client = MqttClient(endpoint, f"tared-watch-{uuid.uuid4().hex}", options)
    screen = Live(console=console, auto_refresh=False) if live else nullcontext()
    with client, screen as table:
        wait_connected(client, endpoint, _CONNECT_S)
        while not ended():
            for arrival in arrivals.pop(_QUEUE_BYTES, _POLL_S, _POLL_S):
                _receive(arrival, fleet, devices, known, None if live else _print)
            if table is not None:
                table.update(_table(known, console.width), refresh=True)


def _receive(
    arrival: Arrival,
    fleet: str,
    devices: frozenset[str],
    known: dict[str, WatchedDevice],
    report: Callable[[str, str, dict[str, Any]], None] | None,
) -> None:
    """Note a document, and report it; ignore messages that cannot be read."""
    try:
        name, kind = arrival.topic.decode().split("/")[3:5]
        Topics(fleet, name)
        document = read_object(arrival.payload)
    except (AgentError, ValueError):
        return
    if devices and name not in devices:
        return
    device = known.setdefault(name, WatchedDevice())
    device.newest[kind] = document
    if not arrival.retained:
        device.heard_s = time.monotonic()
    if report is not None:
        report(name, kind, document)


def _print(name: str, kind: str, document: dict[str, Any]) -> None:
    print(json.dumps({**document, "device": name, "topic": kind}), flush=True)


def _table(known: dict[str, WatchedDevice], width: int) -> RenderableType:
    rows = []
    for name, device in sorted(known.items()):
        state = device.newest.get("status", {}).get("state", "?")
        engine = str(device.newest.get("birth", {}).get("engine") or "")
        camera: Any = next(iter(cameras_of(device.newest.get("telemetry", {})).values()), {})
        heard = f"{time.monotonic() - device.heard_s:.0f} s ago" if device.heard_s is not None else "not yet"
        event = device.newest.get("event", {})
        words = " ".join(str(event[key]) for key in ("kind", "trigger", "step", "state", "code") if key in event)
        rows.append((_plain(name), _plain(state), _plain(engine), *_figures(camera), _plain(words), heard))
    return tabulate(_HEADS, rows, width, prose=("newest event",))


def _figures(camera: Any) -> tuple[str, str, str, str, str]:
    """Return fps, p50, p99, fidelity and drift, each empty if it is not reported."""
    paths = ("fps",), ("latency_ms", "p50"), ("latency_ms", "p99"), ("fidelity", "estimate")
    figures = (value_at(camera, *path) for path in paths)
    fps, p50, p99, estimate = (f"{each:.3g}" if isinstance(each, (int, float)) else "" for each in figures)
    return fps, p50, p99, estimate, _plain(value_at(camera, "drift", "state") or "")


def _plain(text: object) -> str:
    """Return a text without control characters, which a terminal would obey."""
    return printable(str(text), MAX_NAME_BYTES)
