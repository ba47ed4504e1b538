"""Drift monitors fed with scenes of known gain."""

from __future__ import annotations

from functools import cache

import numpy as np

from agent.config import DriftConfig
from agent.monitoring.drift import DriftMonitor, Regime
from calibrate.histogram import AbsHistogram, abs_histogram, merge_all
from engines.calibration import Calibration, calibrate_histograms

CONFIG = DriftConfig(tolerance_db=3.0, block_s=3.0, false_alarms_per_30d=1.0)


def scene(brightness: float, seed: int) -> dict[str, AbsHistogram]:
    """Two tensors of one frame, whose values grow with the light."""
    rng = np.random.default_rng(seed)
    signal = np.maximum(rng.normal(size=4000), 0.0) * brightness
    return {"image": abs_histogram(signal.astype(np.float32)), "t1": abs_histogram((signal * 7.0).astype(np.float32))}


@cache
def calibration(brightness: float = 1.0, method: str = "entropy") -> Calibration:
    frames = [scene(brightness, 12345 + number) for number in range(8)]
    together = {name: merge_all(frame[name] for frame in frames) for name in frames[0]}
    return calibrate_histograms(together, (), model_sha256="m", method=method, frames=8, source="test")


def regime(brightness: float = 1.0, method: str = "entropy") -> Regime:
    made = calibration(brightness, method)
    return Regime.from_calibration(f"lit {brightness:g}", made, made.scales, dict.fromkeys(made.scales, 1.0))


def monitor_of(serving: Regime, *others: Regime) -> DriftMonitor:
    return DriftMonitor(CONFIG, 1.5, serving, others)
