"""How fast frames pass: the whole loop beside the bare engine, and what a frame costs outside the engine."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from agent.mqtt.client import Endpoint
from benchmarks.loop_daemon import OBSERVED, UNOBSERVED, Daemon, endless, spec
from benchmarks.peers import TARED, Worker
from benchmarks.report import Bar, Section, at_least, at_most, times
from benchmarks.workers.accounted_daemon import THREAD

_SLICE_S = 4.0
_WARM_S = 5.0
_SETTLE_S = 0.5  # after a pause: what is in flight, and what the broker has to say
_WARM_FRAMES = 300
_TOLD = 0.002  # least share of the engine's time
_FRAMES = 1500  # whose time is accounted for


def throughput(
    folder: Path, endpoint: Endpoint, models: list[str], rounds: int, progress: Progress
) -> tuple[list[Section], list[Bar]]:
    """Frames per second of the daemon on a file, over those of its engine alone; one at a time, the others paused."""
    columns = ("model", "engine alone", "loop", "loop, observed", "loop / engine", "loop, observed / engine")
    table = Section(f"Frames per second on a file, median of {rounds} slices of {_SLICE_S:g} s in turn", columns)
    bars = []
    for name in models:
        bare, lean, usual = _rates(folder / name, endpoint, name, rounds, progress)
        lean_ratio = statistics.median(ours / engine for ours, engine in zip(lean, bare, strict=True))
        usual_ratio = statistics.median(ours / engine for ours, engine in zip(usual, bare, strict=True))
        figures = [f"{statistics.median(rates):.1f}" for rates in (bare, lean, usual)]
        table.rows.append((name, *figures, times(lean_ratio), times(usual_ratio)))
        bars.append(at_least(f"{name}: frames per second of the loop", 0.95, lean_ratio))
        bars.append(at_least(f"{name}: the same, observed within the default budget", 0.95, usual_ratio))
    return [table], bars


def _rates(
    folder: Path, endpoint: Endpoint, name: str, rounds: int, progress: Progress
) -> tuple[list[float], list[float], list[float]]:
    """Of the engine alone, of the daemon that observes nothing, of the daemon that is observed within its budget."""
    folder.mkdir()
    clip = endless(folder)
    config: dict[str, Any] = {"model": spec(name), "camera": {"source": str(clip), "speed": 0}}
    worker = Worker(TARED, "benchmarks.workers.loop_engine")
    worker.call("prepare", spec(name), str(clip))
    bare, lean, usual = list[float](), list[float](), list[float]()
    with (
        Daemon(folder / "unobserved", endpoint, config | UNOBSERVED) as unobserved,
        Daemon(folder / "observed", endpoint, config | OBSERVED) as observed,
    ):
        time.sleep(_WARM_S)
        unobserved.pause()
        observed.pause()
        for _ in progress.track(range(rounds), description=f"{name}: frames per second"):
            bare.append(worker.call("inferences_per_s", _SLICE_S).value)
            for daemon, rates in ((unobserved, lean), (observed, usual)):
                daemon.go_on()
                time.sleep(_SETTLE_S)
                rates.append(daemon.fps(_SLICE_S))
                daemon.pause()
    worker.close()
    return bare, lean, usual


def overhead(
    folder: Path, endpoint: Endpoint, models: list[str], rounds: int, progress: Progress
) -> tuple[list[Section], list[Bar]]:
    """CPU time per frame by what it went to, from one process: the daemon, unobserved, on a file at full speed."""
    sections, bars = [], []
    for name in models:
        (folder / name).mkdir()
        clip = endless(folder / name)
        config = {"model": spec(name), "camera": {"source": str(clip), "speed": 0}, **UNOBSERVED}
        accounts = []
        for number in progress.track(range(rounds), description=f"{name}: time outside the engine"):
            output = folder / name / f"account{number}"
            program = ("benchmarks.workers.accounted_daemon", str(output), str(_WARM_FRAMES), str(_FRAMES))
            with Daemon(folder / name / f"daemon{number}", endpoint, config, program) as daemon:
                daemon.wait()
            accounts.append(json.loads(output.read_text()))
        sections.append(_account(name, accounts))
        bars.append(at_most(f"{name}: CPU time outside the engine, of the engine's", 0.15, _outside(accounts)))
    return sections, bars


def _outside(accounts: list[dict[str, float]]) -> float:
    """Median share, of the engine's time, of all but the engine and what decodes the video."""
    shares = []
    for account in accounts:
        parts = {part: value for part, value in account.items() if not part.startswith(THREAD)}
        shares.append((sum(parts.values()) - parts["video decoding"]) / parts["engine"] - 1.0)
    return statistics.median(shares)


def _account(name: str, accounts: list[dict[str, float]]) -> Section:
    medians_s = {
        part: statistics.median(account.get(part, 0.0) for account in accounts) for part in set().union(*accounts)
    }
    threads_s = {part: medians_s.pop(part) for part in list(medians_s) if part.startswith(THREAD)}
    columns = ("what", "ms of CPU per frame", "of the engine's")
    table = Section(f"{name}: where a frame's time goes, {_FRAMES} frames, median of {len(accounts)} runs", columns)
    engine_s = medians_s["engine"]
    for part, value_s in sorted(medians_s.items(), key=lambda item: -item[1]):
        if value_s >= _TOLD * engine_s:
            table.rows.append((part, f"{value_s / _FRAMES * 1e3:.3f}", f"{value_s / engine_s:.1%}"))
    busiest = max(threads_s, key=lambda thread: threads_s[thread])
    busy_ms = threads_s[busiest] / _FRAMES * 1e3
    table.note = (
        f"the busiest thread, {busiest.removeprefix(THREAD)}, takes {busy_ms:.3f} ms of CPU per frame: with a core for "
        f"each thread that is {engine_s / threads_s[busiest]:.2f} of the engine's frame rate at most"
    )
    return table
