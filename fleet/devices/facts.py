"""Reduce a device to figures and words that can be compared and selected by; of several cameras the worst counts.

name           the device
state          online, degraded, stopping, offline; silent: said to be there, and not heard for long
engine         the id of the artefact that serves
regime         that id, if it is kept as the engine of a light
model          the model's SHA-256
calibration    the id of the calibration
agent          the version of its tared
schema         the version of the contract that it speaks; of a newer one than this tared's nothing else is read
drift          calm, warning, alarm
gain_db        predicted gain of a recalibration, dB
gain           fidelity that a recalibration is expected to gain
fidelity       estimate since the last swap or change of drift
fidelity_low   the lower end of its 95 % interval
fidelity_high  the upper end of its 95 % interval
fidelity_n     frames behind it
accuracy       of the engine that serves, by labels of frames drawn at random
accuracy_low   the lower end of its 95 % interval
accuracy_high  the upper end of its 95 % interval
accuracy_n     labelled frames behind it
fps            frames per second
latency_p50    milliseconds
latency_p99    milliseconds
seen_s         seconds since anything was heard of it; None if the broker had kept all that is known
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fleet.devices.devices import Device
from fleet.untrusted import printable

SILENT_S = 600.0
Fact = str | float | None
_TOO_MUCH = 1e15

WORDS = ("name", "state", "engine", "regime", "model", "calibration", "agent", "drift")
_FIDELITY = ("fidelity", "fidelity_low", "fidelity_high", "fidelity_n")
_ACCURACY = ("accuracy", "accuracy_low", "accuracy_high", "accuracy_n")
FIGURES = ("schema", "gain_db", "gain", *_FIDELITY, *_ACCURACY, "fps", "latency_p50", "latency_p99", "seen_s")


def facts(device: Device, now: float, silent_s: float = SILENT_S) -> dict[str, Fact]:
    """Return the facts of a device by the names of WORDS and FIGURES; None for unknown ones.

    now: Unix time in s. silent_s: after so many seconds without a message an online device is `silent`.
    """
    if device.is_newer:
        device = replace(device, agent_version=None, model=None, engine=None, calibration=None, telemetry={}, regime={})
    seen_s = max(0.0, now - device.last_seen) if device.last_seen else None
    unheard = seen_s is None or seen_s > silent_s
    state = "silent" if device.state in ("online", "degraded") and unheard else device.state
    cameras = cameras_of(device.telemetry).values()
    regime = value_at(device.regime, "artefact")
    fidelity = least_fidelity(device.telemetry)
    drift = max((value_at(each, "drift", "state") for each in cameras), key=_severity, default=None)
    return {
        "name": device.name,
        "state": state,
        "engine": device.engine,
        "regime": device.engine if device.engine is not None and device.engine == regime else None,
        "model": device.model,
        "calibration": device.calibration,
        "agent": device.agent_version,
        "schema": None if device.schema is None else float(device.schema),
        "drift": printable(drift) if isinstance(drift, str) else None,
        "gain_db": _worst(max, cameras, "drift", "gain_db"),
        "gain": _worst(max, cameras, "drift", "gain", "estimate"),
        **dict(zip(_FIDELITY, fidelity, strict=True)),
        **dict(zip(_ACCURACY, _bounds(value_at(device.telemetry, "labelled_accuracy", "accuracy")), strict=True)),
        "fps": _worst(min, cameras, "fps"),
        "latency_p50": _worst(max, cameras, "latency_ms", "p50"),
        "latency_p99": _worst(max, cameras, "latency_ms", "p99"),
        "seen_s": seen_s,
    }


def least_fidelity(telemetry: Mapping[str, Any]) -> tuple[float | None, ...]:
    """Return estimate, low end, high end and frames of the least faithful camera; None for what is not known."""
    each = (_bounds(value_at(camera, "fidelity")) for camera in cameras_of(telemetry).values())
    return min(each, key=_lower_bound, default=(None,) * 4)


def cameras_of(telemetry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what telemetry, which may have any shape, says of each camera, by name."""
    reported = telemetry.get("cameras")
    return reported if isinstance(reported, Mapping) else {}


def _bounds(interval: Any) -> tuple[float | None, ...]:
    return tuple(as_number(value_at(interval, key)) for key in ("estimate", "low", "high", "n"))


def _lower_bound(fidelity: tuple[float | None, ...]) -> float:
    return fidelity[1] if fidelity[1] is not None else math.inf


def _severity(state: object) -> int:
    return ("calm", "warning", "alarm").index(state) if state in ("calm", "warning", "alarm") else -1


def _worst(pick: Callable[[Iterable[float]], float], cameras: Iterable[Any], *keys: str) -> float | None:
    known = [number for each in cameras if (number := as_number(value_at(each, *keys))) is not None]
    return pick(known) if known else None


def as_number(value: object) -> float | None:
    """Return a number from a board's document; None for anything else, and from 1e15 on, where no figure of a board is.

    Charts and sums would overflow with numbers near the end of the range of floats.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < _TOO_MUCH else None  # False for NaN


def value_at(document: Any, *keys: str) -> Any:
    """Return the value at this path of a board's document, which may have any shape; None if there is none."""
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document
