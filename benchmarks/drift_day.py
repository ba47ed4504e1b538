"""A day in which nothing drifts, and yet nothing stands still: does the alarm keep quiet?

    python -m benchmarks.drift_day [--models fastestdet yolox_nano] [--hours 24] [--seed 0] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data). A model's clips of the ladder (benchmarks/drift_rungs.py) are shown in
random order, each from a random offset on, cropped at random to 80 % or more and half of the time mirrored, anew every
10 to 60 s. 128 frames of an hour before calibrate. Then the observer sees what the daemon's own budget lets it see of
30 frames per second, with a reference that takes twice as long as the engine: one frame in 6.7 s, and one a second
while one of the monitors looks closely. The real drift monitor judges their histograms; once with sensitivities as a
plan has them, once with the weights of a board without a plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.progress import Progress

from agent.config import DriftConfig, RegimesConfig
from agent.monitoring.drift import DriftMonitor, Regime
from agent.monitoring.observation_budget import ObservationBudget
from benchmarks.corruption import Image
from benchmarks.drift_rungs import CLIPS, LAYOUT, Ladder
from benchmarks.drift_signals import OURS, OWN
from benchmarks.report import Bar, Section, add_output_option, at_most, bars_section, publish
from engines.calibration import Calibration

_FPS, _COST, _SHARE = 30, 2.0, 0.01  # as in benchmarks/drift.py
_INFERENCE_S = 0.01
_SHOWN_S = (10.0, 60.0)
_CROPPED = 0.8
_CALIBRATING = 128
_HOUR_S = 3600


class Programme:
    """What the camera shows: one piece of a clip after another."""

    def __init__(self, model: str, seed: int) -> None:
        self._clips = [clip.images() for clip in CLIPS[model].values()]
        self._rng = np.random.default_rng(seed)
        self._since_s = self._until_s = 0.0
        self._next()

    def at(self, ts: float) -> Image:
        """The frame of capture time `ts`, BGR uint8 (H, W, 3); times come in order."""
        while ts >= self._until_s:
            self._since_s = self._until_s
            self._next()
        frame = self._clip[min(self._offset + int((ts - self._since_s) * _FPS), len(self._clip) - 1)]
        top, left, height, width = self._crop
        cropped = frame[top : top + height, left : left + width]
        return np.ascontiguousarray(cropped[:, ::-1] if self._mirrored else cropped)

    def _next(self) -> None:
        rng = self._rng
        self._clip = self._clips[rng.integers(len(self._clips))]
        self._offset = int(rng.integers(len(self._clip) // 2))
        self._until_s = self._since_s + min(rng.uniform(*_SHOWN_S), (len(self._clip) - self._offset) / _FPS)
        size = np.array(self._clip[0].shape[:2])
        height, width = (size * rng.uniform(_CROPPED, 1.0)).astype(int)
        top, left = rng.integers(size - (height, width) + 1)
        self._crop = int(top), int(left), int(height), int(width)
        self._mirrored = bool(rng.integers(2))


@dataclass
class Watched:
    """What one monitor said in a day. gains_db: by block."""

    monitor: DriftMonitor
    gains_db: list[float] = field(default_factory=list)
    warnings: int = 0
    alarms: int = 0
    _state: str = "calm"

    def note(self) -> None:
        """A block is over."""
        state = self.monitor.state
        self.gains_db.append(state.gain_db)
        if state.state != self._state:
            self.warnings += state.state == "warning" and self._state == "calm"
            self.alarms += state.state == "alarm"
            self._state = state.state


def watch(name: str, hours: float, seed: int, advance: Callable[[float], object]) -> tuple[int, dict[str, Watched]]:
    """One model's day: observations, and what each monitor said of them, by its weights."""
    programme = Programme(name, seed)
    with closing(Ladder(name)) as ladder:
        times = np.linspace(0.0, _HOUR_S, _CALIBRATING)
        tensors = ladder.tensors([programme.at(ts) for ts in times], "dark", 0, seed)
        calibration = ladder.calibrate(ladder.observe(tensors))
        weights = ladder.weights(ladder.measure_sensitivities(calibration, tensors[:: _CALIBRATING // 8]), calibration)
        watched = {each: Watched(_monitor(name, calibration, weights[each])) for each in (OURS, OWN)}
        budget = ObservationBudget(_SHARE, 1.0, 1.0, burst=256)
        observed = 0
        for second in range(_HOUR_S, _HOUR_S + round(hours * _HOUR_S)):
            budget.earn(_FPS * _INFERENCE_S)
            advance(1.0)
            if not budget.due(float(second)):
                continue
            budget.spend(_COST * _INFERENCE_S)
            observed += 1
            (histograms,) = ladder.observe(ladder.tensors([programme.at(float(second))], "dark", 0, second))
            for each in watched.values():
                if each.monitor.update(float(second), histograms):
                    each.note()
            budget.set_pace(alert=any(each.monitor.state.closely for each in watched.values()))
    return observed, watched


def _monitor(name: str, calibration: Calibration, weights: dict[str, float]) -> DriftMonitor:
    serving = Regime.from_calibration(name, calibration, calibration.scales, weights)
    return DriftMonitor(DriftConfig(), RegimesConfig().switch_db, serving)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Does a day without drift raise an alarm?")
    parser.add_argument("--models", nargs="+", choices=LAYOUT, default=list(LAYOUT))
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=0)
    add_output_option(parser)
    options = parser.parse_args()
    columns = ("model", "weights", "observed", "gain, dB: mean", "95 %", "largest", "warnings", "alarms")
    table, bars = Section(f"{options.hours:g} hours in which nothing drifts", columns), list[Bar]()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("seconds", total=len(options.models) * options.hours * _HOUR_S)
        for name in options.models:
            observed, watched = watch(name, options.hours, options.seed, lambda by: progress.advance(task, by))
            for weights, each in watched.items():
                gains_db = np.array(each.gains_db)
                figures = (gains_db.mean(), np.percentile(gains_db, 95.0), gains_db.max())
                shown = (f"{figure:.2f}" for figure in figures)
                table.rows.append((name, weights, str(observed), *shown, str(each.warnings), str(each.alarms)))
                bars.append(at_most(f"{name}, {weights}: alarms", 0, each.alarms, ""))
    publish([table, bars_section(bars)], options)


if __name__ == "__main__":
    main()
