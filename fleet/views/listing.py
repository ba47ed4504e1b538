"""List the devices and the rollouts of a fleet: as tables for people, and as JSON for programs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from agent.common.table import tabulate
from agent.contract.messages import SCHEMA_VERSION
from fleet.devices.devices import Device
from fleet.devices.facts import Fact, facts
from fleet.rollout.register import Overview
from fleet.rollout.rows import BoardRow, BoardStage, count_words
from fleet.rollout.spec import RolloutSpec
from fleet.store.transaction import Row

_MOST_NAMED = 5  # devices with a newer schema
_MOST_SHOWN = 20  # boards that did not simply succeed
_PLAIN = (BoardStage.WAITING, BoardStage.DONE)
_LOUD = {"silent": "red", "offline": "red", "degraded": "yellow"}
_COLUMNS = ("device", "state", "engine", "regime", "fidelity", "gain dB", "p99 ms", "drift", "tared", "seen", "tags")


def device_objects(devices: Sequence[Device], silent_s: float) -> list[dict[str, object]]:
    """Return an object for each device: its facts, `last_seen` (Unix time in s) and `tags`."""
    now = time.time()
    return [{**facts(each, now, silent_s), "last_seen": each.last_seen, "tags": dict(each.tags)} for each in devices]


def print_devices(devices: Sequence[Device], console: Console, silent_s: float) -> None:
    """Print a row for each device, and how many there are of each state."""
    now = time.time()
    known = [facts(each, now, silent_s) for each in devices]
    rows = [
        [Text(cell, style=_LOUD.get(cell, "")) for cell in _row(device, fact)]
        for device, fact in zip(devices, known, strict=True)
    ]
    console.print(tabulate(_COLUMNS, rows, console.width, prose=("tags",)))
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
        str(fact["engine"] or ""),
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


def rollout_object(overview: Overview) -> dict[str, Any]:
    """Return a rollout for --json, without its boards."""
    rollout = overview.rollout
    return {
        "id": rollout.id,
        "fleet": rollout.fleet,
        "state": rollout.state.value,
        "op": rollout.op,
        "wave": rollout.wave + 1,
        "waves": [
            {each.value: count for each, count in sorted(overview.counts[wave].items()) if count}
            for wave in sorted(overview.counts)
        ],
        "created": rollout.created,
        "soak_until": rollout.soak_until,
    }


def rollout_details(overview: Overview, boards: Sequence[BoardRow], commands: Sequence[Row]) -> dict[str, Any]:
    """Return a rollout for --json, with its boards, records, and commands as they were sent and answered."""
    keys = ("device", "for", "id", "sent", "status", "command", "result")
    return {
        **rollout_object(overview),
        "spec": json.loads(overview.rollout.spec_json),
        "boards": [
            {"device": each.name, "wave": each.wave + 1, "state": each.state.value, "reason": each.reason}
            for each in boards
        ],
        "records": [
            {"at": each.at, "who": each.who, "what": each.what, "why": each.why, "document": json.loads(each.document)}
            for each in overview.records
        ],
        "commands": [
            dict(zip(keys, (*row[:5], json.loads(row[5]), json.loads(row[6] or "null")), strict=True))
            for row in commands
        ],
    }


def print_rollouts(overviews: Sequence[Overview], console: Console) -> None:
    """Print a line for each rollout."""
    heads, rows = ("rollout", "op", "state", "wave", "boards", "begun"), []
    for each in overviews:
        rollout = each.rollout
        wave = f"{rollout.wave + 1} of {rollout.waves}"
        boards = count_words(each.counts.values())
        rows.append((rollout.id, rollout.op, rollout.state.value, wave, boards, _when(rollout.created)))
    console.print(tabulate(heads, rows, console.width, prose=("boards",)))


def print_rollout(overview: Overview, boards: Sequence[BoardRow], console: Console) -> None:
    """Print the waves of a rollout, the boards that did not simply succeed, and all records."""
    rollout = overview.rollout
    demand = ", signed commands alone" if rollout.is_signed else ""
    console.print(Text(f"{rollout.id} {rollout.op} in {rollout.fleet}: {rollout.state.value}{demand}"))
    waves = []
    for wave, counts in sorted(overview.counts.items()):
        here = " <" if wave == rollout.wave and not rollout.state.is_finished else ""
        waves.append((f"{wave + 1}{here}", count_words([counts])))
    console.print(tabulate(("wave", "boards"), waves, console.width, prose=("boards",)))
    notable = [each for each in boards if each.state not in _PLAIN and each.reason]
    if notable:
        shown = notable[:_MOST_SHOWN]
        rows = [(each.name, str(each.wave + 1), each.state.value, each.reason) for each in shown]
        console.print(tabulate(("board", "wave", "state", "reason"), rows, console.width, prose=("reason",)))
        if (more := len(notable) - _MOST_SHOWN) > 0:
            console.print(f"and {more} more: --json has them all")
    records = [(_when(each.at), each.who, each.what, each.why) for each in overview.records]
    console.print(tabulate(("when", "who", "what", "why"), records, console.width, prose=("why",)))


def print_plan(spec: RolloutSpec, waves: Sequence[Sequence[Device]], console: Console) -> None:
    """Print what a new rollout would do."""
    gates = ", ".join(each.text for each in spec.parsed_gates)
    console.print(Text(f"{spec.op}, gates {gates}, each wave looked at for {spec.soak_s:.0f} s"))
    commands = [each.birth.get("commands") for wave in waves for each in wave]
    guarded = sum(isinstance(each, dict) and bool(each.get("operator_keys")) for each in commands)
    if guarded and not spec.signed:
        words = f"{guarded} of them have operators' keys: with --signed no controller without one carries it out"
        console.print(Text(words, style="yellow"))
    rows = [
        (str(number), str(len(wave)), ", ".join(each.name for each in wave[:_MOST_NAMED]))
        for number, wave in enumerate(waves, 1)
    ]
    console.print(tabulate(("wave", "boards", "first of them"), rows, console.width, prose=("first of them",)))


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
