"""List the devices of a fleet for `tared fleet devices`: as a table for people, and as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.contract.messages import SCHEMA_VERSION
from fleet.devices.devices import Device
from fleet.devices.facts import Fact, facts

_PIPED_COLUMNS = 240
_MOST_NAMED = 5  # devices with a newer schema
_LOUD = {"silent": "red", "offline": "red", "degraded": "yellow"}
_COLUMNS = ("device", "state", "engine", "regime", "fidelity", "gain dB", "p99 ms", "drift", "tared", "seen", "tags")


def as_objects(devices: Sequence[Device], silent_s: float) -> list[dict[str, object]]:
    """Return an object for each device: its facts, `last_seen` (Unix time in s) and `tags`."""
    now = time.time()
    return [{**facts(each, now, silent_s), "last_seen": each.last_seen, "tags": dict(each.tags)} for each in devices]


def print_devices(devices: Sequence[Device], console: Console, silent_s: float) -> None:
    """Print a row for each device, and how many there are of each state."""
    if not console.is_terminal:
        console.width = _PIPED_COLUMNS  # so that no line is cut in a pipe
    now = time.time()
    known = [facts(each, now, silent_s) for each in devices]
    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    for device, fact in zip(devices, known, strict=True):
        table.add_row(*(Text(cell, style=_LOUD.get(cell, "")) for cell in _row(device, fact)))
    console.print(table)
    states = Counter(str(fact["state"] or "never told") for fact in known)
    console.print(
        Text(f"{len(devices)} devices: " + ", ".join(f"{count} {state}" for state, count in states.most_common()))
    )
    if words := unread(devices):
        console.print(Text(words, style="red"))


def unread(devices: Sequence[Device]) -> str:
    """Return which devices have a tared that is too new for this one, and the remedy; empty if none has."""
    newer = [each for each in devices if each.is_newer]
    if not newer:
        return ""
    names = ", ".join(each.name for each in newer[:_MOST_NAMED]) + (", ..." if len(newer) > _MOST_NAMED else "")
    return (
        f"{len(newer)} speak a newer schema than {SCHEMA_VERSION}, which is all that this tared knows, so nothing of "
        f"them is read but whether they are there: {names}; update this tared"
    )


def _row(device: Device, fact: dict[str, Fact]) -> list[str]:
    return [
        device.name,
        str(fact["state"] or "?"),
        str(fact["engine"] or "")[:12],
        "kept" if fact["regime"] is not None else "",
        interval(fact),
        _figure(fact["gain_db"], 1),
        _figure(fact["latency_p99"], 1),
        str(fact["drift"] or ""),
        f"schema {device.schema}" if device.is_newer else str(fact["agent"] or ""),
        ago(fact["seen_s"]),
        " ".join(tag_names(device)),
    ]


def tag_names(device: Device) -> list[str]:
    """Return the tags of a device as `NAME` or `NAME=VALUE`."""
    return [f"{name}={value}" if value else name for name, value in device.tags.items()]


def interval(fact: dict[str, Fact]) -> str:
    """Return the fidelity and its interval, as `0.98 [0.92, 1.00]`; empty if unknown."""
    if fact["fidelity"] is None:
        return ""
    return f"{_figure(fact['fidelity'], 3)} [{_figure(fact['fidelity_low'], 3)}, {_figure(fact['fidelity_high'], 3)}]"


def ago(seconds: Fact) -> str:
    """Return an age in words, in the unit that suits."""
    if seconds is None:
        return "never"
    age_s = float(seconds)
    for unit, size_s in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if age_s >= 2.0 * size_s:
            return f"{age_s / size_s:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"


def _figure(value: Fact, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, float) else ""
