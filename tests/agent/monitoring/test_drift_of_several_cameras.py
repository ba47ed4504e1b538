"""Cameras of different light that share a calibration: a recalibration has to suit all, and one of them raises it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
from drift_bench import CONFIG, scene

from agent.monitoring.drift import DriftMonitor, Regime
from calibrate.histogram import AbsHistogram, merge_all
from engines.calibration import calibrate_histograms

LIGHT, DIM = 1.0, 1 / 16
ALONE_S = 200  # what a camera alone needs to raise an alarm, and more


def shared() -> Regime:
    """Made of frames of both cameras."""
    frames = [scene(brightness, 12345 + number) for number in range(8) for brightness in (LIGHT, DIM)]
    together = {name: merge_all(frame[name] for frame in frames) for name in frames[0]}
    made = calibrate_histograms(together, (), model_sha256="m", method="entropy", frames=16, source="test")
    return Regime.from_calibration("both", made, made.scales, dict.fromkeys(made.scales, 1.0))


def two_cameras(know_each_other: bool = True) -> tuple[DriftMonitor, DriftMonitor]:
    monitors: list[DriftMonitor] = []

    def recent_of(other: int) -> list[Mapping[str, AbsHistogram]]:
        return [monitors[other].recent] if know_each_other and monitors[other].recent else []

    regime = shared()
    monitors += [DriftMonitor(CONFIG, 1.5, regime, (), partial(recent_of, other)) for other in (1, 0)]
    return monitors[0], monitors[1]


def watch(lit: DriftMonitor, dim: DriftMonitor, lights: list[float]) -> tuple[set[str], set[str]]:
    """The states that each went through, the lit one under these lights, second by second."""
    seen: tuple[set[str], set[str]] = (set(), set())
    for second, brightness in enumerate(lights):
        for monitor, light, states in ((lit, brightness, seen[0]), (dim, DIM, seen[1])):
            monitor.update(float(second), scene(light, second))
            states.add(monitor.state.state)
    return seen


def test_the_dim_one_asks_for_nothing_that_the_lit_one_could_not_bear() -> None:
    assert watch(*two_cameras(), [LIGHT] * ALONE_S) == ({"calm"}, {"calm"})


def test_alone_it_would() -> None:
    """Or the test above proves nothing."""
    assert "alarm" in watch(*two_cameras(know_each_other=False), [LIGHT] * ALONE_S)[1]


@pytest.mark.parametrize("later", [8.0, 1 / 256])
def test_the_one_that_has_changed_raises_the_alarm(later: float) -> None:
    lit, dim = two_cameras()
    lights, dims = watch(lit, dim, [LIGHT] * 90 + [later] * 110)
    if later > LIGHT:
        assert "alarm" in lights
        assert dims == {"calm"}
    else:  # both are dim now, and a recalibration would be good for both
        assert "alarm" in lights | dims
