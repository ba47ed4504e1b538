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
from fleet.devices.devices import Device
from fleet.devices.facts import Fact, facts
from fleet.rollout.register import Overview
from fleet.rollout.rows import BoardRow, BoardStage, count_words
from fleet.rollout.spec import RolloutSpec
from fleet.store.transaction import Row
from fleet.views.words import ago, figure, gain, interval, tag_names, unread, unsigned_warning

_MOST_NAMED = 5  # boards of a wave
_MOST_SHOWN = 20  # boards that did not simply succeed
_PLAIN = (BoardStage.WAITING, BoardStage.DONE)
_LOUD = {"silent": "red", "offline": "red", "degraded": "yellow"}
_COLUMNS = ("device", "state", "engine", "regime", "fidelity", "gain", "p99 ms", "drift", "tared", "seen", "tags")


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
    states = Counter(str(fact["state"] or "unknown") for fact in known)
    console.print(
        Text(f"{len(devices)} devices: " + ", ".join(f"{count} {state}" for state, count in states.most_common()))
    )
    if words := unread(devices):
        console.print(Text(words, style="red"))


def _row(device: Device, fact: dict[str, Fact]) -> list[str]:
    return [
        device.name,
        str(fact["state"] or "?"),
        str(fact["engine"] or ""),
        "kept" if fact["regime"] is not None else "",
        interval(fact),
        gain(fact),
        figure(fact["latency_p99"], 1),
        str(fact["drift"] or ""),
        f"schema {device.schema}" if device.is_newer else str(fact["agent"] or ""),
        ago(fact["seen_s"]),
        " ".join(tag_names(device)),
    ]


def rollout_object(overview: Overview) -> dict[str, Any]:
    """Return a rollout for --json, without its boards."""
    rollout = overview.rollout
    return {
        "id": rollout.id,
        "fleet": rollout.fleet,
        "state": rollout.state.value,
        "op": rollout.op,
        "wave": rollout.wave + 1,
        "states_by_wave": [
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
    if words := unsigned_warning(spec, waves):
        console.print(Text(words, style="yellow"))
    rows = [
        (str(number), str(len(wave)), ", ".join(each.name for each in wave[:_MOST_NAMED]))
        for number, wave in enumerate(waves, 1)
    ]
    console.print(tabulate(("wave", "boards", "first of them"), rows, console.width, prose=("first of them",)))


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
