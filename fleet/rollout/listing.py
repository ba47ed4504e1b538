"""Show rollouts to people as tables, and to programs as JSON."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet.devices.devices import Device
from fleet.rollout.register import Overview
from fleet.rollout.rows import BoardRow, BoardState, count_words
from fleet.rollout.spec import RolloutSpec
from fleet.store.transaction import Row

_WIDE = 200
_MOST_SHOWN = 20  # boards that did not simply succeed
_PLAIN = (BoardState.WAITING, BoardState.DONE)


def as_object(overview: Overview) -> dict[str, Any]:
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


def details(overview: Overview, boards: Sequence[BoardRow], commands: Sequence[Row]) -> dict[str, Any]:
    """Return a rollout for --json, with its boards, records, and commands as they were sent and answered."""
    keys = ("device", "for", "id", "sent", "status", "command", "result")
    return {
        **as_object(overview),
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
    table = _table(console, "rollout", "op", "state", "wave", "boards", "begun")
    for each in overviews:
        rollout = each.rollout
        wave = f"{rollout.wave + 1} of {rollout.waves}"
        boards = count_words(map(Counter, each.counts.values()))
        table.add_row(rollout.id, rollout.op, rollout.state.value, wave, boards, _when(rollout.created))
    console.print(table)


def print_rollout(overview: Overview, boards: Sequence[BoardRow], console: Console) -> None:
    """Print the waves of a rollout, the boards that did not simply succeed, and all records."""
    rollout = overview.rollout
    demand = ", signed commands alone" if rollout.is_signed else ""
    console.print(Text(f"{rollout.id} {rollout.op} in {rollout.fleet}: {rollout.state.value}{demand}"))
    waves = _table(console, "wave", "boards")
    for wave, counts in sorted(overview.counts.items()):
        here = " <" if wave == rollout.wave and not rollout.state.is_finished else ""
        waves.add_row(f"{wave + 1}{here}", count_words([Counter(counts)]))
    console.print(waves)
    notable = [each for each in boards if each.state not in _PLAIN and each.reason]
    if notable:
        table = _table(console, "board", "wave", "state", "reason")
        for each in notable[:_MOST_SHOWN]:
            table.add_row(Text(each.name), str(each.wave + 1), each.state.value, Text(each.reason))
        console.print(table)
        if (more := len(notable) - _MOST_SHOWN) > 0:
            console.print(f"and {more} more: --json has them all")
    records = _table(console, "when", "who", "what", "why")
    for record in overview.records:
        records.add_row(_when(record.at), Text(record.who), Text(record.what), Text(record.why))
    console.print(records)


def print_plan(spec: RolloutSpec, waves: Sequence[Sequence[Device]], console: Console) -> None:
    """Print what a new rollout would do."""
    gates = ", ".join(each.text for each in spec.parsed_gates)
    console.print(Text(f"{spec.op}, gates {gates}, each wave looked at for {spec.soak_s:.0f} s"))
    commands = [each.birth.get("commands") for wave in waves for each in wave]
    guarded = sum(isinstance(each, dict) and bool(each.get("operator_keys")) for each in commands)
    if guarded and not spec.signed:
        words = f"{guarded} of them have operators' keys: with --signed no controller without one carries it out"
        console.print(Text(words, style="yellow"))
    table = _table(console, "wave", "boards", "first of them")
    for number, wave in enumerate(waves, 1):
        table.add_row(str(number), str(len(wave)), Text(", ".join(each.name for each in wave[:5])))
    console.print(table)


def _table(console: Console, *columns: str) -> Table:
    if not console.is_terminal:
        console.width = _WIDE  # in a pipe, no line is cut
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
