"""river's drift detectors, in their own environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from river import drift


def alarms(name: str, parameter: float, values: np.ndarray) -> np.ndarray:
    """The indices of the values at which a detector says drift. parameter: its reluctance, in a unit of its own."""
    detector = _open(name, parameter)
    found = []
    for index, value in enumerate(values.tolist()):
        detector.update(value)
        if detector.drift_detected:
            found.append(index)
    return np.array(found, np.int64)


def _open(name: str, parameter: float) -> Any:
    if name == "ADWIN":
        return drift.ADWIN(delta=parameter)
    if name == "Page-Hinkley":
        return drift.PageHinkley(threshold=parameter, mode="up")
    return drift.DummyDriftDetector(trigger_method="fixed", t_0=int(parameter))
