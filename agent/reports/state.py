"""Show a board's state: its engines, its jobs, and how fidelity and drift went, from what its state directory keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from agent.common.html.charts import Axis, Mark, Series, line_chart, timeline
from agent.common.html.pages import Figure, Section, Table, render_report, show_bytes, show_share, show_time
from agent.monitoring.history import HistoryRow, read_history
from agent.reports.labels import label_sections
from calibrate.errors import TaredError
from engines.store.artefact import Artefact, read_artefact

_SHEET = "selection.png"
_COUNTED = {"considered": "considered", "taken": "taken", "duplicate": "left out, too alike", "held_out": "held out"}
_STATES = {
    "COMMITTED": "good", "ROLLED_BACK": "bad", "FAILED": "bad", "CANCELLED": "warning",
}  # fmt: skip
_LONGEST_GAP_S = 600.0  # between two points of a line; it is interrupted where the daemon was not running
_MOST_JOBS = 200


@dataclass(frozen=True)
class JobRow:
    """A job of the journal. created, updated: Unix time in s. reason: of a job that failed."""

    trigger: str
    state: str
    artefact: str
    reason: str
    created: float
    updated: float


def state_report(state_dir: Path, jobs: Sequence[JobRow], key: bytes | None) -> str:
    """Return the report on a state directory, one HTML file.

    Args:
        jobs: Of its journal, the oldest first.
        key: Verifies signed artefacts.
    """
    artefacts, damaged = _artefacts(state_dir, key)
    current = _name_of(state_dir / "current")
    history = read_history(state_dir)
    sections = [
        *_over_time(history),
        *_labels(state_dir, artefacts.get(current)),
        *_engines(artefacts, damaged, current, _name_of(state_dir / "previous")),
        *_jobs(jobs),
        *_selection(state_dir),
    ]
    return render_report(f"Board state in {state_dir}", _lead(artefacts, current, history), sections)


def _lead(artefacts: Mapping[str, Artefact], current: str, history: Sequence[HistoryRow]) -> str:
    serving = artefacts.get(current)
    if serving is None:
        return "No engine has been committed yet: the float reference serves."
    share = serving.manifest.get("int8_macs_share", 0.0)
    words = f"Engine {current} is in service, with {show_share(share)} of the multiply-accumulates in INT8"
    measured = [row for row in history if row.fidelity and row.engine == current]
    if measured:
        estimate, low, high = measured[-1].fidelity
        words += f"; its fidelity to float is {estimate:.3f}, between {low:.3f} and {high:.3f}"
    return f"{words}."


# ---- over time


def _over_time(history: Sequence[HistoryRow]) -> Iterator[Section]:
    if not history:
        return
    cameras = list(dict.fromkeys(row.camera for row in history))
    figures = []
    for camera in cameras:
        rows = [row for row in history if row.camera == camera]
        whose = f" of {camera}" if len(cameras) > 1 else ""
        marks = [
            Mark(after.ts, f"engine {after.engine}{', INT8' if after.is_int8 else ', float'}", "c2")
            for before, after in pairwise(rows)
            if after.engine != before.engine
        ]
        key = {"new engine": "c2"} if marks else {}
        measures = (
            ("fidelity", "fidelity", "c0", Axis("fidelity", high=1.0)),
            ("accuracy", "accuracy by labels", "c3", Axis("accuracy by labels", high=1.0)),
            ("gain", "fidelity that a recalibration would gain", "c1", Axis("fidelity", low=0.0)),
        )
        for name, title, color, axis in measures:
            series = list(_measured(rows, name, title, color))
            if series:
                chart = line_chart(series, _TIME, axis, f"{title}{whose}", marks)
                figures.append(Figure(f"{title.capitalize()}{whose}, with its interval", chart, {title: color, **key}))
        gains = [row for row in rows if row.gain_db is not None]
        if gains:
            alarms = (row for row in gains if row.drift == "alarm")
            # The first row of each alarm; an alarm belongs to an engine.
            first = [next(each) for _, each in groupby(alarms, key=lambda row: row.engine)]
            points = [Series("gain", [(row.ts, row.gain_db or 0.0) for row in part], "c1") for part in _unbroken(gains)]
            risen = [Mark(row.ts, "drift alarm", "bad") for row in first]
            chart = line_chart(points, _TIME, Axis("dB", low=0.0), f"Predicted gain{whose}", [*marks, *risen])
            title = f"Drift{whose}: what a recalibration would gain in signal to noise"
            figures.append(Figure(title, chart, {"gain, dB": "c1", **key, **({"alarm": "bad"} if risen else {})}))
    text = ["Lines are interrupted where nothing was measured. The older a stretch, the fewer points are kept of it."]
    yield Section("Over time", text, figures=figures)


_TIME = Axis(times=True)


def _measured(rows: Sequence[HistoryRow], name: str, title: str, color: str) -> Iterator[Series]:
    """Yield a line for each stretch of time, with its interval."""
    known = [row for row in rows if getattr(row, name)]
    for part in _unbroken(known):
        values = [(row.ts, *getattr(row, name)) for row in part]
        yield Series(
            title,
            [(ts, estimate) for ts, estimate, *_ in values],
            color,
            [(ts, low, high) for ts, _, low, high in values],
        )


def _unbroken(rows: Sequence[HistoryRow]) -> Iterator[list[HistoryRow]]:
    """Split rows where time is missing, the clock was set back, or another engine began."""
    part: list[HistoryRow] = []
    for row in rows:
        if part and (not 0.0 <= row.ts - part[-1].ts <= _LONGEST_GAP_S or row.engine != part[-1].engine):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _labels(state_dir: Path, serving: Artefact | None) -> Iterator[Section]:
    inputs = serving.manifest.get("inputs", {}) if serving is not None else {}
    model, task = inputs.get("model"), inputs.get("spec", {}).get("task")
    if isinstance(model, str) and isinstance(task, str):
        yield from label_sections(state_dir, model, task)


# ---- engines


def _artefacts(state_dir: Path, key: bytes | None) -> tuple[dict[str, Artefact], list[tuple[str, str]]]:
    """Return the artefacts that can be read, by id, the newest first; and those that cannot, with the reason."""
    found, damaged = dict[str, Artefact](), list[tuple[str, str]]()
    folders = [each for each in (state_dir / "artefacts").glob("*") if (each / "manifest.json").exists()]
    for folder in sorted(folders, key=lambda each: -(each / "manifest.json").stat().st_mtime):
        try:
            found[folder.name] = read_artefact(folder, key)
        except TaredError as error:  # noqa: PERF203  # one damaged artefact hides no other
            damaged.append((folder.name, str(error)))
    return found, damaged


def _name_of(link: Path) -> str:
    """Return the id of the artefact that a link leads to; empty without one."""
    return link.resolve().name if link.exists() else ""


def _engines(
    artefacts: Mapping[str, Artefact], damaged: Sequence[tuple[str, str]], current: str, previous: str
) -> Iterator[Section]:
    heads = (
        ("engine", False), ("made, UTC", False), ("", False), ("precision", False), ("work in INT8", True),
        ("fidelity", True), ("time, ms", True), ("size", True),
    )  # fmt: skip
    rows = [_engine_row(artefact, current, previous) for artefact in artefacts.values()]
    chosen = [number for number, name in enumerate(artefacts) if name == current]
    tables = [Table(heads, rows, chosen=chosen)]
    if damaged:
        tables.append(Table((("engine", False), ("why it cannot be used", False)), damaged, "Not usable"))
    yield Section(
        "Engines",
        ["Each engine that a job made has a report of its own, in reports/."],
        tables=tables,
    )


def _engine_row(artefact: Artefact, current: str, previous: str) -> tuple[Any, ...]:
    manifest = artefact.manifest
    verdict, made = manifest.get("verdict") or {}, (artefact.path / "manifest.json").stat().st_mtime
    share, size = manifest.get("int8_macs_share"), manifest.get("engine_bytes", 0)
    place = "in service" if artefact.id == current else "the one before" if artefact.id == previous else ""
    fidelity, latency = verdict.get("fidelity"), verdict.get("latency_ms")
    return (
        artefact.id,
        (show_time(made), made),
        place,
        str(manifest["inputs"].get("precision", "")),
        (show_share(share), share if share is not None else ""),
        ("" if fidelity is None else f"{fidelity:.3f}", "" if fidelity is None else fidelity),
        ("" if latency is None else f"{latency:.3g}", "" if latency is None else latency),
        (show_bytes(size), size),
    )


# ---- jobs


def _jobs(jobs: Sequence[JobRow]) -> Iterator[Section]:
    if not jobs:
        return
    shown = list(jobs)[-_MOST_JOBS:]
    lanes: dict[str, list[tuple[float, str, str]]] = {}
    for job in shown:
        words = f"{show_time(job.created)}: {job.trigger}, {job.state}{f', {job.reason}' if job.reason else ''}"
        lanes.setdefault(job.trigger, []).append((job.created, _STATES.get(job.state, "idle"), words))
    rows = [
        (
            (show_time(job.created), job.created),
            job.trigger,
            job.state,
            (f"{job.updated - job.created:.0f}", job.updated - job.created),
            job.artefact,
            job.reason,
        )
        for job in reversed(shown)
    ]
    heads = (
        ("began, UTC", False), ("trigger", False), ("state", False), ("took, s", True), ("engine", False),
        ("reason", False),
    )  # fmt: skip
    key = {"committed": "good", "failed or rolled back": "bad", "cancelled": "warning"}
    figure = Figure("Jobs by what started them", timeline(lanes, "Jobs over time"), key)
    yield Section("Jobs", figures=[figure], tables=[Table(heads, rows, filters=len(rows) > 10)])


# ---- the frames of the calibration


def _selection(state_dir: Path) -> Iterator[Section]:
    try:
        counts = json.loads((state_dir / "selection.json").read_text(encoding="utf-8"))
        facts = {words: str(counts[name]) for name, words in _COUNTED.items() if name in counts}
    except (OSError, ValueError, TypeError):
        facts = {}
    try:
        pictures = [((state_dir / _SHEET).read_bytes(), "each with its time of day and its brightness")]
    except OSError:
        pictures = []
    if facts or pictures:
        text = ["The frames that made the newest calibration. They stay on this board."]
        yield Section("Frames of the calibration", text, facts, pictures=pictures)
