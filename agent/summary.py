"""What a run was: kept while it runs, printed when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from agent.review import REFERENCE, Period, Score
from agent.telemetry import LoopSample
from calibrate.evidence import Interval


@dataclass(frozen=True)
class Alarm:
    """The drift alarm: when it rose, since when the gain had been above the tolerance; capture times in s."""

    ts: float
    onset_ts: float
    gain_db: float
    e_value: float


@dataclass(frozen=True)
class Swap:
    """A new engine in service from the frame of capture time `ts` (None: after the last frame).

    trigger: first-start, alarm, command or rollback. seconds: wall time from the trigger to the swap.
    fidelity: of the new engine, and of the one before it, on the held-out frames of the job.
    """

    ts: float | None
    artefact: str
    trigger: str
    seconds: float
    fidelity: float | None
    fidelity_before: float | None


@dataclass
class RunSummary:
    """One run of the daemon."""

    artefact: str
    last_ts: float = 0.0
    loop: LoopSample | None = None
    alarms: list[Alarm] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    fidelity: Interval | None = None
    accuracy: dict[str, dict[str, Score]] = field(default_factory=dict)

    def periods(self) -> list[Period]:
        """The stretches that tell the story: under the first engine until its light was over, and under the last."""
        live = [swap for swap in self.swaps if swap.ts is not None]
        if not live:
            return []
        onset = self.alarms[0].onset_ts if self.alarms else self.last_ts
        before = Period("before", live[0].ts or 0.0, onset)
        if len(live) == 1:
            return [before]
        return [before, Period("after", live[-1].ts or 0.0, self.last_ts)]

    def as_dict(self) -> dict[str, Any]:
        """The object that `tared run --json` prints."""
        loop = self.loop.as_dict() if self.loop else {}
        return {
            **loop,
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "swaps": [asdict(swap) for swap in self.swaps],
            "fidelity": asdict(self.fidelity) if self.fidelity else {},
            "accuracy": {
                period: {engine: score.as_dict() for engine, score in scores.items()}
                for period, scores in self.accuracy.items()
            },
            "artefact": self.artefact,
        }

    def print(self, console: Console) -> None:
        """The table a person reads."""
        table = Table(title="tared run", show_header=False, title_justify="left")
        for name, value in self._rows():
            table.add_row(name, value)
        console.print(table)
        if self.accuracy:
            console.print(_accuracy_table(self.accuracy, [swap.artefact for swap in self.swaps]))

    def _rows(self) -> list[tuple[str, str]]:
        rows = []
        if self.loop:
            dropped = ", ".join(f"{count} {cause}" for cause, count in self.loop.dropped.items())
            rows += [
                ("frames", str(self.loop.frames)),
                ("dropped", dropped or "none"),
                ("frames per second", f"{self.loop.fps:.1f}"),
                ("latency p50 / p99", f"{self.loop.p50_ms:.1f} / {self.loop.p99_ms:.1f} ms"),
            ]
        for alarm in self.alarms:
            waited = alarm.ts - alarm.onset_ts
            text = f"at {alarm.ts:.1f} s, {waited:.0f} s after onset; a recalibration would gain {alarm.gain_db:.1f} dB"
            rows.append(("drift alarm", text))
        for swap in self.swaps:
            at = "after the last frame" if swap.ts is None else f"at {swap.ts:.1f} s"
            text = f"{at}, {swap.artefact}, {swap.seconds:.1f} s of wall time after its trigger ({swap.trigger})"
            if swap.fidelity is not None:
                before = "" if swap.fidelity_before is None else f"{swap.fidelity_before:.3f} -> "
                text += f"; fidelity on held-out frames {before}{swap.fidelity:.3f}"
            rows.append(("engine swapped", text))
        if self.fidelity and self.fidelity.n:
            f = self.fidelity
            rows.append(("fidelity now", f"{f.estimate:.3f} in [{f.low:.3f}, {f.high:.3f}], {f.n} frames"))
        rows.append(("artefact", self.artefact))
        return rows


def _accuracy_table(accuracy: Mapping[str, Mapping[str, Score]], served: list[str]) -> Table:
    table = Table(title="F1 against the labels (fidelity to the reference)", title_justify="left")
    table.add_column("engine")
    for period, scores in accuracy.items():
        frames = next(iter(scores.values())).frames if scores else 0
        table.add_column(f"{period} ({frames} frames)", justify="right")
    engines = list(dict.fromkeys(name for scores in accuracy.values() for name in scores))
    for engine in engines:
        title = "FP32 reference" if engine == REFERENCE else f"INT8 {engine}, swap {served.index(engine) + 1}"
        cells = []
        for scores in accuracy.values():
            values = scores[engine].as_dict()
            cells.append(f"{values['f1']:.3f} ({values['fidelity']:.3f})")
        table.add_row(title, *cells)
    return table
