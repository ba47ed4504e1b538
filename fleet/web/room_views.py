"""Say what the fleet's pages show of its store: devices, how they are distributed, rollouts with waves and gates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.common.errors import CommandError
from agent.common.html.charts import stacked_bars, timeline
from agent.common.html.pages import Figure
from fleet.devices.devices import Device, Devices
from fleet.devices.facts import SILENT_S, facts
from fleet.devices.records import AuditEntry
from fleet.devices.selection import select
from fleet.devices.trends import daily_trends
from fleet.rollout.gates import parse_gates
from fleet.rollout.register import Overview, RolloutRegister
from fleet.rollout.rows import BoardRow, BoardStage, Rollout, RolloutState, count_words, find_rollout
from fleet.rollout.spec import RolloutSpec
from fleet.store.transaction import FleetStore
from fleet.views.sections import DRIFT_COLORS, STATE_COLORS, distributions, state_word, step_mark, thirty_days
from fleet.views.words import figure, tag_names, unread, unsigned_warning
from fleet.web.room import FleetRoom

_STAGES = {
    BoardStage.DONE: "good",
    BoardStage.SENT: "c0",
    BoardStage.WAITING: "idle",
    BoardStage.FAILED: "bad",
    BoardStage.UNREACHED: "c3",
    BoardStage.UNDOING: "warning",
    BoardStage.UNDONE: "c4",
    BoardStage.KEPT: "c1",
}
_STATES = {
    RolloutState.RUNNING: "c0",
    RolloutState.PAUSED: "warning",
    RolloutState.UNDOING: "warning",
    RolloutState.COMPLETED: "good",
    RolloutState.ROLLED_BACK: "bad",
    RolloutState.ABORTED: "bad",
}
_PLAIN = (BoardStage.WAITING, BoardStage.DONE, BoardStage.UNDONE)
_CLAIM_S = 10.0  # a controller needs as long to find a new rollout
_MOST_DEVICES, _MOST_BOARDS, _MOST_ROLLOUTS, _MOST_RECORDS = 1000, 200, 200, 200
_MOST_TAGS = 8


def devices_values(store: FleetStore, room: FleetRoom, where: str) -> dict[str, Any]:
    """Return what the page of devices shows."""
    devices, words = _selected(store, room, where)
    rows = [_device_row(each, room.clock.wall_s()) for each in devices[:_MOST_DEVICES]]
    newer = unread(devices)
    return {"rows": rows, "count": len(devices), "words": words or (f"{newer}." if newer else "")}


def overview_values(store: FleetStore, room: FleetRoom, where: str) -> dict[str, Any]:
    """Return what the page of distributions shows."""
    devices, words = _selected(store, room, where)
    sections = distributions(devices, room.clock.wall_s(), SILENT_S) if devices else []
    return {"count": len(devices), "words": words, "sections": sections}


def days_values(store: FleetStore, room: FleetRoom, where: str) -> dict[str, Any]:
    """Return what the part of the thirty days shows: minutes of reading, where years are stored."""
    devices, words = _selected(store, room, where)
    days = daily_trends(store, [each.id for each in devices], room.clock.wall_s())
    return {"count": len(devices), "words": words, "sections": [thirty_days(days)]}


def _selected(store: FleetStore, room: FleetRoom, where: str) -> tuple[list[Device], str]:
    """Return the selected devices, and in one sentence why there are none."""
    try:
        devices = select(Devices(store), room.fleet, where, clock=room.clock)
    except CommandError as error:
        return [], f"{error.found}; expected {error.expected}."
    return devices, "" if devices else f"No device of the fleet {room.fleet} is in the store yet."


def _device_row(device: Device, now: float) -> dict[str, Any]:
    fact = facts(device, now)
    state, drift = state_word(fact), str(fact["drift"] or "")
    tags = tag_names(device)
    return {
        "key": device.id,
        "name": device.name,
        "state": state,
        "tone": STATE_COLORS[state],
        "drift": drift,
        "drift_tone": DRIFT_COLORS.get(drift, "idle"),
        "fidelity": figure(fact["fidelity"], 3),
        "low": figure(fact["fidelity_low"], 3),
        "gain": figure(fact["gain"], 3),
        "gain_db": figure(fact["gain_db"], 1),
        "p99_ms": figure(fact["latency_p99"], 1),
        "engine": str(fact["engine"] or "")[:12],
        "agent": f"schema {device.schema}" if device.is_newer else str(fact["agent"] or ""),
        "seen_at": device.last_seen,
        "tags": tags[:_MOST_TAGS],
        "more_tags": max(0, len(tags) - _MOST_TAGS),
    }


def rollouts_values(store: FleetStore, room: FleetRoom, _subject: str) -> dict[str, Any]:
    """Return what the page of rollouts shows."""
    rollouts = RolloutRegister(store, "").all(room.fleet)
    return {
        "count": len(rollouts),
        "rows": [
            {
                "id": each.rollout.id,
                "op": each.rollout.op,
                "state": each.rollout.state.value,
                "tone": _STATES[each.rollout.state],
                "wave": f"{each.rollout.wave + 1} of {each.rollout.waves}",
                "boards": count_words(each.counts.values()),
                "created": each.rollout.created,
                "controller": _controller_words(each.rollout, room.clock.wall_s()),
            }
            for each in rollouts[:_MOST_ROLLOUTS]
        ],
    }


def own_rollout(store: FleetStore, fleet: str, begin: str) -> str:
    """Return the id of a rollout of this fleet. begin: that of the id. Raises CommandError (`rollout.unknown`)."""
    with store.transaction("read") as transaction:
        rollout = find_rollout(transaction, begin)
    if rollout.fleet != fleet:
        remedy = "see the page of rollouts"
        raise CommandError("rollout.unknown", repr(begin), f"the id of a rollout of {fleet}", remedy)
    return rollout.id


def rollout_values(store: FleetStore, room: FleetRoom, begin: str) -> dict[str, Any]:
    """Return what the page of a rollout shows. Raises CommandError as `own_rollout`."""
    overview, boards = RolloutRegister(store, "").progress(own_rollout(store, room.fleet, begin))
    rollout = overview.rollout
    notable = [each for each in boards if each.state not in _PLAIN or each.reason]
    return {
        "id": rollout.id,
        "state": rollout.state.value,
        "tone": _STATES[rollout.state],
        "is_finished": rollout.state.is_finished,
        "controller": _controller_words(rollout, room.clock.wall_s()),
        "soak_until": rollout.soak_until if rollout.state is RolloutState.RUNNING else None,
        "does": _spec_words(rollout),
        "waves": list(_waves(overview)),
        "figures": [_stages_figure(overview), _steps_figure(overview.records)],
        "boards": [_board_row(each) for each in notable[:_MOST_BOARDS]],
        "more_boards": max(0, len(notable) - _MOST_BOARDS),
        "records": list(reversed(overview.records))[:_MOST_RECORDS],
    }


def plan_values(spec: RolloutSpec, waves: Sequence[Sequence[Device]]) -> dict[str, Any]:
    """Return what the form shows of a rollout that is not created yet."""
    return {
        "waves": [(len(wave), ", ".join(each.name for each in wave[:5])) for wave in waves],
        "gates": ", ".join(each.text for each in spec.parsed_gates),
        "warning": unsigned_warning(spec, waves),
    }


def _controller_words(rollout: Rollout, now: float) -> str:
    """Return that no controller carries the rollout out; empty if one does, or if there is nothing to do."""
    if rollout.state.is_finished or rollout.is_held(now) or now - rollout.created < _CLAIM_S:
        return ""
    key = " --sign KEY" if rollout.is_signed else ""
    return f"No controller is at work on it: start 'tared fleet rollout run{key}'."


def _spec_words(rollout: Rollout) -> dict[str, str]:
    """Return what a rollout is to do, as facts by name; also of one of a newer tared."""
    spec: dict[str, Any] = json.loads(rollout.spec_json)
    arguments = " ".join(f"{key}={value}" for key, value in (spec.get("arguments") or {}).items() if value is not None)
    words = {
        "Does": f"{rollout.op} {arguments}".strip(),
        "Boards": spec.get("select") or "all",
        "Gates": _gate_words(str(spec.get("gates", ""))),
        "Soak": f"{spec.get('soak_s', 0):.0f} s",
        "At once": spec.get("at_once"),
        "Hours": f"{', '.join(spec['windows'])} ({spec.get('timezone')})" if spec.get("windows") else "",
        "Order": spec.get("order"),
        "Commands": "signed commands alone: a controller without --sign leaves it" if rollout.is_signed else "",
    }
    return {name: str(value) for name, value in words.items() if value}


def _gate_words(gates: str) -> str:
    """Return all gates, with the one that is always there; as they are written, if a newer tared wrote them."""
    try:
        return ", ".join(each.text for each in parse_gates(gates))
    except CommandError:
        return gates


def _waves(overview: Overview) -> Iterator[dict[str, Any]]:
    """Yield what has come of each wave, and what its gates have said."""
    rollout = overview.rollout
    judged: dict[int, list[Mapping[str, Any]]] = {}
    for record in overview.records:
        document = json.loads(record.document)
        if "gates" in document:
            judged[int(document["wave"])] = document["gates"]
    for wave, counts in sorted(overview.counts.items()):
        gates = judged.get(wave + 1, [])
        stand, tone = _wave_stand(rollout, wave, gates)
        yield {"number": wave + 1, "counts": count_words([counts]), "stand": stand, "tone": tone, "gates": gates}


def _wave_stand(rollout: Rollout, wave: int, gates: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    if gates:
        return ("passed", "good") if all(each["passed"] for each in gates) else ("failed", "bad")
    if wave != rollout.wave or rollout.state.is_finished:
        return "not begun" if wave >= rollout.wave else "left", "idle"
    if rollout.state is not RolloutState.RUNNING:
        return rollout.state.value.lower(), "warning"
    return "soaking" if rollout.soak_until is not None else "under way", "c0"


def _stages_figure(overview: Overview) -> Figure:
    bars = {
        f"wave {wave + 1}": {stage.value: count for stage, count in counts.items()}
        for wave, counts in sorted(overview.counts.items())
    }
    seen = {
        stage.value: color for stage, color in _STAGES.items() if any(bar.get(stage.value) for bar in bars.values())
    }
    return Figure("Boards of each wave, by state", stacked_bars(bars, seen, "Boards of each wave"), seen)


def _steps_figure(records: Sequence[AuditEntry]) -> Figure:
    lanes: dict[str, list[tuple[float, str, str]]] = {}
    for record in records:
        wave = json.loads(record.document).get("wave")
        lane = f"wave {wave}" if isinstance(wave, int) else "the rollout"
        lanes.setdefault(lane, []).append(step_mark(record))
    return Figure("Steps", timeline(lanes, "Steps of the rollout"))


def _board_row(board: BoardRow) -> dict[str, Any]:
    return {
        "key": board.device,
        "name": board.name,
        "wave": board.wave + 1,
        "state": board.state.value,
        "tone": _STAGES[board.state],
        "reason": board.reason,
        "settled": board.settled,
    }
