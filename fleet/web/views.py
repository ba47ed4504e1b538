"""Say what the pages show: a board's documents as tiles, charts, a job's states and rows; a fleet's boards as rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from agent.common.html.charts import Axis, Mark, Series, line_chart
from agent.common.html.pages import Figure, show_bytes, show_share
from agent.common.html.text import visible
from fleet.devices.facts import SILENT_S, as_number, cameras_of, value_at
from fleet.views.sections import DRIFT_COLORS
from fleet.web.boards import LiveBoard

_STATES = {"online": "good", "degraded": "warning", "stopping": "idle", "offline": "bad"}
_STEPS = ("COLLECTING", "CALIBRATING", "PLANNING", "BUILDING", "VALIDATING", "PROBATION", "COMMITTED")
_ACCEPTED = 0.1  # the loss that a board accepts which does not say so
# The detail of an event has these values, in this order; each with the text before and behind it.
_EVENT_WORDS = {
    "trigger": ("trigger ", ""),
    "step": ("", ""),
    "percent": ("", " %"),
    "state": ("", ""),
    "code": ("", ""),
    "camera": ("camera ", ""),
    "trouble": ("trouble with the view: ", ""),
    "gain_db": ("a recalibration would gain ", " dB"),
    "artefact": ("engine ", ""),
    "fidelity_before": ("fidelity ", " before"),
    "fidelity": ("fidelity ", ""),
    "reason": ("", ""),
    "message": ("", ""),
    "address": ("", ""),
}
_MARKED = {"alarm": "bad", "swap": "c2", "rollback": "c3"}
_MOST_TEXT, _MOST_WORD, _MOST_ROWS = 300, 40, 30  # characters, characters, events
_HEALTH = ("temperature_", "power_w", "rss", "load", "cpu", "memory")  # beginnings of keys in telemetry.health
_TITLES = {"rss_bytes": "memory of the daemon", "load_1min": "load of a minute"}
_UNITS = {"_bytes": "", "_c": "°C", "_w": "W"}  # by the end of a figure's name
_MOST_REGIMES = _MOST_CAMERAS = 16


@dataclass(frozen=True)
class Tile:
    """A figure with its name. tone: a colour class of the style; detail: what stands below, smaller."""

    name: str
    value: str
    detail: str = ""
    tone: str = ""


def state_of(board: LiveBoard, now: float) -> tuple[str, str]:
    """Return a board's state and its tone; one that says it is there, and is not heard, is silent."""
    state = str(value_at(board.documents.get("status"), "state") or "never heard")
    if state in ("online", "degraded") and (board.heard_at is None or now - board.heard_at > SILENT_S):
        return "silent", "c3"
    return visible(state, _MOST_WORD), _STATES.get(state, "idle")


def board_page(board: LiveBoard, now: float) -> dict[str, Any]:
    """Return what the changing part of a board's page shows."""
    state, tone = state_of(board, now)
    telemetry = board.documents.get("telemetry", {})
    cameras = islice(cameras_of(telemetry).items(), _MOST_CAMERAS)
    max_loss = _figure(board.documents.get("reported"), "values", "recalibration.max_loss")
    good = 1.0 - (_ACCEPTED if max_loss is None else max_loss)
    return {
        "state": state,
        "tone": tone,
        "why": visible(_reason(board), _MOST_TEXT),
        "heard_at": board.heard_at,
        "measured_at": board.measured_at,
        "tiles": list(_tiles(board, telemetry)),
        "cameras": {visible(name, _MOST_WORD): list(_camera_tiles(each, good)) for name, each in cameras},
        "figures": list(_figures(board)),
        "steps": _steps(board.job),
        "percent": _figure(board.job, "percent"),
        "trigger": visible(value_at(board.job, "trigger") or "", _MOST_WORD),
        "events": list(_without_repeats(board.events))[:_MOST_ROWS],
        "regimes": _regimes(board.documents.get("birth", {})),
    }


def fleet_row(name: str, board: LiveBoard, now: float) -> dict[str, Any]:
    """Return what a row of the fleet's table shows of a board."""
    state, tone = state_of(board, now)
    cameras = cameras_of(board.documents.get("telemetry", {})).values()
    camera: Any = min(cameras, key=_fidelity, default={})
    drift = str(value_at(camera, "drift", "state") or "")
    return {
        "name": name,
        "state": state,
        "tone": tone,
        "engine": visible(value_at(board.documents.get("birth"), "engine") or "", 16),
        "fidelity": _figure(camera, "fidelity", "estimate"),
        "drift": visible(drift, _MOST_WORD),
        "drift_tone": DRIFT_COLORS.get(drift, "idle"),
        "gain_db": _figure(camera, "drift", "gain_db"),
        "fps": _figure(camera, "fps"),
        "p99_ms": _figure(camera, "latency_ms", "p99"),
        "job": visible(value_at(board.job, "step") or "", _MOST_WORD),
        "heard_at": board.heard_at,
    }


def _reason(board: LiveBoard) -> str:
    """Return why the board is degraded, or what holds a job back, in its own sentence."""
    telemetry, status = board.documents.get("telemetry", {}), board.documents.get("status", {})
    for document, key in ((status, "reason"), (telemetry, "degraded"), (telemetry, "held_back")):
        if isinstance(document.get(key), str):
            return str(document[key])
    return ""


def _tiles(board: LiveBoard, telemetry: Mapping[str, Any]) -> Iterator[Tile]:
    birth = board.documents.get("birth", {})
    yield Tile("engine", visible(birth.get("engine") or "none yet", 16), _precision(birth))
    yield _regime_tile(birth)
    if isinstance(policy := value_at(birth, "policies", str(birth.get("engine"))), Mapping):
        yield _policy_tile(policy)
    runtime, version = (value_at(birth, "runtimes", key) for key in ("runtime", "version"))
    yield Tile("runtime", visible(runtime or "not known", 24), visible(str(version or "").partition("-")[0], 24))
    yield Tile("tared", visible(birth.get("agent_version") or "not known", 20))
    if isinstance(labelled := telemetry.get("labelled_accuracy"), Mapping):
        yield _labelled_tile(labelled)
    health = telemetry.get("health")
    if value_at(health, "throttling") is True:
        yield Tile("heat", "slowed down", "the board is too hot, or takes too much current", "bad")
    for name, value in sorted(health.items()) if isinstance(health, Mapping) else ():
        if (shown := as_number(value)) is not None and name.startswith(_HEALTH):
            yield _health_tile(str(name), shown)


def _labelled_tile(labelled: Mapping[str, Any]) -> Tile:
    """Say what labels of drawn frames come to, or why they do not."""
    if isinstance(doubt := labelled.get("doubt"), str):
        return Tile("accuracy by labels", "not known", visible(doubt, _MOST_TEXT), "warning")
    estimate, low, high, n = (_figure(labelled, "accuracy", key) for key in ("estimate", "low", "high", "n"))
    loss, waiting = _figure(labelled, "int8_loss", "estimate"), _figure(labelled, "waiting")
    waits = f"; {waiting:.0f} frames wait for `tared label`" if waiting else ""
    if estimate is None or low is None or high is None:
        return Tile("accuracy by labels", "not known", f"this engine has no labels{waits}")
    words = f"{low:.3f} to {high:.3f}" + (f", {n:.0f} labels" if n is not None else "")
    words += f"; INT8 loses {loss:.3f}" if loss is not None else ""
    return Tile("accuracy by labels", f"{estimate:.3f}", words + waits)


def _precision(birth: Mapping[str, Any]) -> str:
    precision, share = birth.get("precision"), _figure(birth, "int8_macs_share")
    if not isinstance(precision, str):
        return ""
    if precision != "int8":
        return f"float, {visible(precision.upper(), 8)}"
    return f"INT8, {show_share(share)} of multiply-accumulates" if share is not None else "INT8"


def _regime_tile(birth: Mapping[str, Any]) -> Tile:
    """Say whether the engine in service is kept for a light."""
    engine, known = birth.get("engine"), birth.get("regimes")
    known = known if isinstance(known, list) else []
    kept = f"{len(known)} kept" if known else ""
    if engine is not None and engine in known:
        return Tile("regime", "known", f"the engine is kept for this light; {kept}", "good")
    return Tile("regime", "not known", kept or "no engine is kept for a light yet")


def _policy_tile(policy: Mapping[str, Any]) -> Tile:
    """Say what the owner lets be shown of the answers of the engine in service."""
    threshold, masks, classes = _figure(policy, "score_threshold"), _figure(policy, "masks"), policy.get("classes")
    words = [f"{masks:.0f} masks"] if masks else []
    if isinstance(classes, list):
        words.append(visible("only " + ", ".join(map(str, classes)), _MOST_TEXT))
    shown = f"scores from {threshold:.2f}" if threshold is not None else "some answers"
    return Tile("shown", shown, "; ".join(words) or "by this engine's policy")


def _health_tile(name: str, value: float) -> Tile:
    """Show a figure of telemetry's health, by the unit at the end of its name."""
    ending = next(filter(name.endswith, _UNITS), "")
    title = _TITLES.get(name, visible(name.removesuffix(ending).replace("_", " "), 30))
    return Tile(title, show_bytes(value) if ending == "_bytes" else f"{value:.4g} {_UNITS.get(ending, '')}".strip())


def _regimes(birth: Mapping[str, Any]) -> list[str]:
    """Return the engines that `switch` takes: those kept for a light, but for the one in service."""
    known = birth.get("regimes")
    names = [visible(each, 64) for each in known if each != birth.get("engine")] if isinstance(known, list) else []
    return names[:_MOST_REGIMES]


def _camera_tiles(camera: Any, good: float) -> Iterator[Tile]:
    yield _interval_tile("fidelity", value_at(camera, "fidelity"), good)
    if (accuracy := value_at(camera, "accuracy")) is not None:
        yield _interval_tile("accuracy", accuracy, good)
    yield _drift_tile(value_at(camera, "drift"))
    fps, p50, p99 = _figure(camera, "fps"), _figure(camera, "latency_ms", "p50"), _figure(camera, "latency_ms", "p99")
    yield Tile("frames per second", f"{fps:.1f}" if fps is not None else "?")
    yield Tile("latency", f"{p50:.1f} ms" if p50 is not None else "?", f"p99 {p99:.1f} ms" if p99 is not None else "")
    dropped = value_at(camera, "dropped")
    lost = sum(value for value in map(as_number, dropped.values()) if value) if isinstance(dropped, Mapping) else 0.0
    yield Tile("dropped", f"{lost:.0f}", "since the last report", "warning" if lost else "")


def _drift_tile(drift: Any) -> Tile:
    state = str(value_at(drift, "state") or "not known")
    gain_db, tolerance_db = _figure(drift, "gain_db"), _figure(drift, "tolerance_db")
    detail = f"a recalibration would gain {gain_db:.1f} dB" if gain_db is not None else ""
    gain = _figure(drift, "gain", "estimate")
    if detail and gain is not None:
        detail += f", {100.0 * gain:.1f} points of fidelity"
    if detail and tolerance_db is not None:
        detail += f", {tolerance_db:g} dB are tolerated"
    return Tile("drift", visible(state, _MOST_WORD), detail, DRIFT_COLORS.get(state, "idle"))


def _interval_tile(name: str, measured: Any, good: float) -> Tile:
    estimate, low, high, frames = (_figure(measured, key) for key in ("estimate", "low", "high", "n"))
    if estimate is None or low is None or high is None:
        return Tile(name, "not measured")
    tone = "good" if low >= good else "warning" if high >= good else "bad"
    counted = f", {frames:.0f} frames" if frames is not None else ""
    return Tile(name, f"{estimate:.3f}", f"{low:.3f} to {high:.3f}{counted}", tone)


def _figures(board: LiveBoard) -> Iterator[Figure]:
    for name, points in board.points.items():
        if len(points) < 2:
            continue
        whose = f" of {visible(name, _MOST_WORD)}" if len(board.points) > 1 else ""
        begin = points[0][0]
        marks = [
            Mark(at, visible(event["kind"]), _MARKED[str(event["kind"])])
            for at, event in board.events
            if event.get("kind") in _MARKED and at >= begin
        ]
        key = {kind: tone for kind, tone in _MARKED.items() if any(mark.text == kind for mark in marks)}
        fidelity = [(at, each) for at, each, _ in points if each is not None]
        gain = [(at, each) for at, _, each in points if each is not None]
        for title, axis, values, tone in (
            ("Fidelity", Axis("fidelity", 0.0, 1.0), fidelity, "c0"),
            ("Predicted gain of a recalibration", Axis("dB", 0.0), gain, "c1"),
        ):
            if len(values) > 1:
                chart = line_chart([Series(title, values, tone)], Axis(times=True), axis, f"{title}{whose}", marks)
                yield Figure(f"{title}{whose}", chart, key)


def _steps(job: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the states of the running job in their order, each with `done`, `now` or ""; none without a job."""
    step = value_at(job, "step")
    if step not in _STEPS:
        return []
    now = _STEPS.index(str(step))
    return [(name, "done" if index < now else "now" if index == now else "") for index, name in enumerate(_STEPS)]


def _without_repeats(events: Iterable[tuple[float, Mapping[str, Any]]]) -> Iterator[tuple[float, str, str]]:
    """Return time, kind and words of each event that says anything; of those that say the same in a row, the newest."""
    rows = ((at, visible(event.get("kind", ""), _MOST_WORD), _event_words(event)) for at, event in events)
    shown = (row for row in rows if any(row[1:]))
    return (next(same) for _, same in groupby(shown, key=itemgetter(1, 2)))


def _event_words(event: Mapping[str, Any]) -> str:
    words = (
        f"{before}{f'{value:.4g}' if isinstance(value, float) else value}{behind}"
        for key, (before, behind) in _EVENT_WORDS.items()
        if isinstance(value := event.get(key), (str, int, float)) and value != ""
    )
    return visible(", ".join(words), _MOST_TEXT)


def _fidelity(camera: Any) -> float:
    estimate = _figure(camera, "fidelity", "estimate")
    return math.inf if estimate is None else estimate


def _figure(document: Any, *keys: str) -> float | None:
    return as_number(value_at(document, *keys))
