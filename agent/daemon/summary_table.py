"""Print the summary of a run for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.control.summary import Alarm, Rollback, RunSummary, Score, Swap
from agent.daemon.review import REFERENCE
from calibrate.statistics.evidence import Interval

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 50


def print_summary(summary: RunSummary, console: Console, report: str = "") -> None:
    """Print tables of the run and, if there were labels, of the engines' F1; and fidelity over time as bars.

    report: where the report on the run lies, if there is one.
    """
    table = Table(title="tared run", show_header=False, title_justify="left")
    for name, value in _rows(summary):
        table.add_row(name, Text(value, overflow="fold"))
    if report:
        table.add_row("report", Text(report, overflow="fold"))
    console.print(table)
    if summary.accuracy:
        console.print(_accuracy_table(summary.accuracy, summary.swaps))


def sparkline(points: Sequence[tuple[float, float]], columns: int = _COLUMNS) -> str:
    """Draw points (time, value in [0, 1]) as a row of bars, one per time slice.

    A bar is the mean of its slice; a slice without points repeats the last bar.
    """
    points = sorted(points)  # a clock that was set back must not upset the picture
    first, last = points[0][0], points[-1][0]
    slices: list[list[float]] = [[] for _ in range(columns)]
    for ts, value in points:
        slices[min(int((ts - first) / max(last - first, 1e-9) * columns), columns - 1)].append(value)
    bars = ""
    for values in slices:
        mean = sum(values) / len(values) if values else None
        bars += bars[-1] if mean is None else _BARS[min(int(mean * len(_BARS)), len(_BARS) - 1)]
    return bars


def _rows(summary: RunSummary) -> Iterator[tuple[str, str]]:
    loop, fidelity, history = summary.loop, summary.fidelity, summary.fidelity_history
    if loop is not None:
        yield "frames", str(loop.frames)
        yield "dropped", ", ".join(f"{count} {cause}" for cause, count in loop.dropped.items()) or "none"
        yield "frames per second", f"{loop.fps:.1f}"
        yield "latency p50 / p99", f"{loop.p50_ms:.1f} / {loop.p99_ms:.1f} ms"
    events: list[Alarm | Swap | Rollback] = sorted(
        [*summary.alarms, *summary.swaps, *summary.rollbacks],
        key=lambda event: float("inf") if event.ts is None else event.ts,
    )
    alarm: Alarm | None = None
    for event in events:
        if isinstance(event, Alarm):
            alarm = event
            waited = f"{alarm.ts - alarm.onset_ts:.0f} s after onset at {alarm.onset_ts:.1f} s"
            worth = f", {100.0 * alarm.gain:.1f} points of fidelity" if alarm.gain is not None else ""
            yield f"{alarm.ts:.1f} s  alarm", f"{waited}; a recalibration would gain {alarm.gain_db:.1f} dB{worth}"
        elif isinstance(event, Rollback):
            at = "at the end" if event.ts is None else f"{event.ts:.1f} s"
            served = f"{event.frames} frames on probation, {event.suffered} suffered, {event.missed} missed"
            yield f"{at}  taken back", f"INT8 {event.artefact}, {served} ({event.reason})"
        else:
            yield _swap_row(event, alarm)
    if fidelity is not None and fidelity.n:
        yield "fidelity", _interval_row(fidelity, summary.fidelity_since)
    if summary.live_accuracy is not None:
        yield "accuracy, live", _interval_row(summary.live_accuracy.interval, summary.live_accuracy.since)
    if len(history) > 1:
        start, end = f"{history[0][0]:.0f} s", f"{history[-1][0]:.0f} s"
        yield "fidelity over time", f"{sparkline(history)}\n{start}{end:>{_COLUMNS - len(start)}}"
    for swap in summary.swaps[::-1]:
        if swap.latency_ms and swap.latency_float_ms:
            yield "INT8 and float", _speed_row(swap.artefact, swap.latency_ms, swap.latency_float_ms)
            break
    if any(summary.results_dropped.values()):
        yield "results lost", ", ".join(f"{count} by {output}" for output, count in summary.results_dropped.items())
    if summary.stopped_by:
        yield "stopped by", summary.stopped_by
    if summary.degraded:
        yield "degraded", summary.degraded
    elif summary.held_back:
        yield "held back", summary.held_back
    yield "artefact", summary.artefact
    yield "backend", summary.backend


def _interval_row(mean: Interval, since: float) -> str:
    interval = f"95 % interval [{mean.low:.3f}, {mean.high:.3f}] from {mean.n} frames"
    return f"{mean.estimate:.3f} since {since:.0f} s, {interval}"


def _speed_row(artefact: str, int8_ms: float, float_ms: float) -> str:
    if int8_ms <= float_ms:
        comparison = f"INT8 is {float_ms / int8_ms:.1f} times as fast as float"
    else:
        comparison = f"INT8 takes {int8_ms / float_ms:.1f} times as long as float"
    return f"{comparison} on this machine\n{artefact}: {int8_ms:.2f} against {float_ms:.2f} ms, in turn"


def _swap_row(swap: Swap, alarm: Alarm | None) -> tuple[str, str]:
    at = "at the end" if swap.ts is None else f"{swap.ts:.1f} s"
    text = f"INT8 {swap.artefact}, {swap.seconds:.1f} s of wall time after its trigger ({swap.trigger})"
    if swap.trigger == "alarm" and alarm is not None and swap.ts is not None:
        text += (
            f"\nlive {swap.ts - alarm.ts:.0f} s of video after the alarm, {swap.ts - alarm.onset_ts:.0f} s after onset"
        )
    if swap.fidelity is not None:
        previous = "" if swap.fidelity_before is None else f"{swap.fidelity_before:.3f} -> "
        text += f"\nfidelity on held-out frames {previous}{swap.fidelity:.3f}"
    return f"{at}  new engine", text


def _accuracy_table(accuracy: Mapping[str, Mapping[str, Score]], swaps: Sequence[Swap]) -> Table:
    table = Table(title="F1 against the labels, on the same frames (fidelity to the reference)", title_justify="left")
    table.add_column("engine")
    for period, scores in accuracy.items():
        frames = next(iter(scores.values())).frames if scores else 0
        table.add_column(f"{period}\n({frames} frames)", justify="right")
    for engine in dict.fromkeys(name for scores in accuracy.values() for name in scores):
        title = "FP32 reference"
        if engine != REFERENCE:
            swap = next(swap for swap in swaps if swap.artefact == engine)
            title = f"INT8 {engine}, {swap.trigger}"
        table.add_row(title, *(_cell(scores.get(engine)) for scores in accuracy.values()))
    return table


def _cell(score: Score | None) -> str:
    if score is None:
        return "-"
    values = score.as_dict()
    return f"{values['f1']:.3f} ({values['fidelity']:.3f})"
