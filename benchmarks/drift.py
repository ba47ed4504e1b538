"""The drift detector on simulated months of video, beside CUSUM and river's detectors on the same signal.

    python -m benchmarks.drift [--months 60] [--runs 100] [--json | --markdown]

All look at the predicted gain of a recalibration in dB, of streams that benchmarks/drift_streams.py makes: ours once a
second, and at the pace that the observation budget leaves it; the others once a second, in the same blocks. Ours is the
daemon's own judge (agent/monitoring/drift.py): it counts what a recalibration on earlier frames would gain on later
ones. Each of
the others has one parameter, tuned beforehand on other seeds: the quickest on a step of 6 dB among the values that
raised the fewest alarms in six months of S4. Delays count from the change to the alarm; on the ramp, from where the
gain crosses the tolerance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.drift_contenders import TOLERANCE_DB, Detect, Stream, budgeted, cusum, every_second, of_river
from benchmarks.drift_streams import MONTH_S, REGIMES, Change, Floats, gains_db, levels
from benchmarks.peers import RIVER, PeerError, Worker, interpreter
from benchmarks.report import Bar, Section, add_output_option, at_most, bars_section, publish

STEP_AT_S, HORIZON_S = 3 * 3600, 2 * 3600
STREAMS = {
    "S1": ("S1", (0.0,), "max"),
    "S2": ("S2", (0.0,), "max"),
    "S4": ("S4", (0.0,), "max"),
    "S3, 5 regimes": ("S3", REGIMES, "max"),
    "S4, scales of least noise": ("S4", (0.0,), "mse"),
}
CHANGES = {
    "6 dB step": Change(STEP_AT_S, -1.0),
    "12 dB step": Change(STEP_AT_S, -2.0),
    "clipping step": Change(STEP_AT_S, 1.0),
    "12 dB in an hour": Change(STEP_AT_S, -2.0, 3600.0),
}
GRIDS = {
    "CUSUM": (2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
    "ADWIN": (0.002, 1e-5, 1e-8, 1e-12, 1e-20, 1e-40),
    "Page-Hinkley": (50.0, 200.0, 1e3, 5e3, 2e4, 1e5),
    "Dummy": (1e3, 1e5, 1e7),
}

_MONTHS_OF_OTHERS = 8  # enough to show the difference; the bar asks ours for fifty


def false_alarms(detect: Detect, stream: str, seeds: Sequence[int]) -> list[int]:
    """Alarms in a month of a stream in which nothing changes, by seed."""
    kind, regimes, method = STREAMS[stream]
    return [detect(Stream(levels(kind, MONTH_S, seed), regimes, method)).size for seed in seeds]


def delays(detect: Detect, change: Change, seeds: Sequence[int]) -> Floats:
    """Seconds to the first alarm after a change of S4, by seed; infinite where there is none within the horizon."""
    since = change.at_s + _crossing_s(change)
    found = []
    for seed in seeds:
        alarms = detect(Stream(levels("S4", change.at_s + round(change.ramp_s) + HORIZON_S, seed, change)))
        later = alarms[alarms > change.at_s]
        found.append(float(later[0]) - since if later.size else np.inf)
    return np.array(found)


def _crossing_s(change: Change) -> float:
    """Seconds from the beginning of a change to where its gain exceeds the tolerance."""
    if not change.ramp_s:
        return 0.0
    progress = np.linspace(0.0, 1.0, 3601)
    return float(progress[np.argmax(gains_db(change.octaves * progress) > TOLERANCE_DB)] * change.ramp_s)


def tuned(make: Callable[[float], Detect], grid: Sequence[float]) -> tuple[float, Detect]:
    """The quickest of the parameters with the fewest false alarms, on seeds that are not used again."""
    contenders = [(parameter, make(parameter)) for parameter in grid]
    alarms = [sum(false_alarms(detect, "S4", range(900, 906))) for _, detect in contenders]
    quiet = [contender for contender, count in zip(contenders, alarms, strict=True) if count == min(alarms)]
    return min(quiet, key=lambda each: float(np.median(delays(each[1], CHANGES["6 dB step"], range(950, 970)))))


@dataclass(frozen=True)
class Row:
    """One contender: false alarms per month and device by stream, delays by change."""

    name: str
    alarms: dict[str, list[int]]
    delays: dict[str, Floats]


def measure(name: str, detect: Detect, months: int, runs: int) -> Row:
    """On streams that nobody was tuned on."""
    few = {stream: months if stream in ("S4", "S3, 5 regimes") else min(months, 4) for stream in STREAMS}
    alarms = {stream: false_alarms(detect, stream, range(100, 100 + few[stream])) for stream in STREAMS}
    return Row(
        name, alarms, {what: delays(detect, change, range(2000, 2000 + runs)) for what, change in CHANGES.items()}
    )


def contest(name: str, months: int, runs: int) -> Row | str:
    """A contender's row, tuned where it has to be; or why it takes no part."""
    if name in OURS:
        return measure(name, OURS[name], months, runs)
    months = min(months, _MONTHS_OF_OTHERS)
    try:
        if name == "CUSUM":
            parameter, detect = tuned(lambda value: partial(cusum, value), GRIDS[name])
            return measure(f"{name}, h = {parameter:g} dB", detect, months, runs)
        worker = Worker(RIVER, "drift_river")
        parameter, detect = tuned(lambda value: partial(of_river, worker, name, value), GRIDS[name])
        row = measure(f"{name}, {parameter:g}", detect, months, runs)
        worker.close()
    except PeerError as error:
        return f"{name}: {error}"
    return row


OURS: dict[str, Detect] = {"tared, every second": every_second, "tared, budgeted": budgeted}


def alarms_section(rows: Sequence[Row]) -> Section:
    section = Section("False alarms", ("contender", *STREAMS), note="In 30 days: the mean, of so many device-months.")
    for row in rows:
        told = [f"{np.mean(row.alarms[stream]):.3g} of {len(row.alarms[stream])}" for stream in STREAMS]
        section.rows.append((row.name, *told))
    return section


def delays_section(rows: Sequence[Row]) -> Section:
    note = "Seconds to the alarm: median, 90th percentile; and how many of the runs ended without, where any did."
    section = Section("Delays", ("contender", *CHANGES), note=note)
    for row in rows:
        section.rows.append((row.name, *(_shown(row.delays[what]) for what in CHANGES)))
    return section


def _shown(found: Floats) -> str:
    missed = int(np.isinf(found).sum())
    told = ", ".join(f"{np.quantile(found, share, method='higher'):.0f}" for share in (0.5, 0.9))
    return f"{told}; {missed} of {found.size} never" if missed else told


def bars(rows: Sequence[Row]) -> list[Bar]:
    """What was asked of ours; for the larger step, the budgeted one may take twice as long."""
    found = list[Bar]()
    for row, longer in zip((row for row in rows if row.name in OURS), (1.0, 2.0), strict=True):
        alarms = {stream: float(np.mean(row.alarms[stream])) for stream in ("S4", "S3, 5 regimes")}
        found += [at_most(f"{row.name}: alarms in 30 days, {each}", 0.1, mean, "") for each, mean in alarms.items()]
        step, larger, ramp = (row.delays[what] for what in ("6 dB step", "12 dB step", "12 dB in an hour"))
        found += [
            at_most(f"{row.name}: 6 dB step, median", 120.0, float(np.median(step)), " s"),
            at_most(f"{row.name}: 6 dB step, p90", 180.0, float(np.quantile(step, 0.9, method="higher")), " s"),
            at_most(f"{row.name}: 12 dB step, median", longer * 60.0, float(np.median(larger)), " s"),
            at_most(f"{row.name}: ramp, median after 3 dB", 480.0, float(np.median(ramp)), " s"),
        ]
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The drift detector on simulated months, beside others.")
    parser.add_argument("--months", type=int, default=60, help="of S4 and of S3, per contender")
    parser.add_argument("--runs", type=int, default=100, help="of each change")
    parser.add_argument("--processes", type=int, default=2)
    add_output_option(parser)
    options = parser.parse_args()
    with suppress(PeerError):  # it has a row that says why
        interpreter(RIVER)  # two processes would make it twice
    rows = []
    with ProcessPoolExecutor(options.processes) as pool:
        names = [*OURS, *GRIDS]
        for name, row in zip(
            names, pool.map(partial(contest, months=options.months, runs=options.runs), names), strict=True
        ):
            print(row if isinstance(row, str) else f"{name}: done", file=sys.stderr)
            rows += [row] if isinstance(row, Row) else []
    publish([alarms_section(rows), delays_section(rows), bars_section(bars(rows))], options)


if __name__ == "__main__":
    main()
