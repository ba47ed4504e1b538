"""The drift monitor on streams of histograms whose truth is known."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from drift_bench import calibration, monitor_of, regime, scene

from agent.monitoring.drift import DriftMonitor, Regime
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, abs_histogram, merge_all
from engines.calibration import calibrate_histograms


def states(monitor: DriftMonitor, light: Iterator[float]) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    for second, brightness in enumerate(light):
        monitor.update(float(second), scene(brightness, second))
        if not found or found[-1][1] != monitor.state.state:
            found.append((float(second), monitor.state.state))
    return found


@pytest.mark.parametrize("method", ["entropy", "mse", "percentile:99.9"])
def test_an_unchanged_scene_stays_calm_whatever_chose_the_scales(method: str) -> None:
    monitor = monitor_of(regime(method=method))
    assert states(monitor, iter([1.0] * 240)) == [(0.0, "calm")]
    assert monitor.state.gain_db < 1.0
    assert monitor.state.onset_ts is None


@pytest.mark.parametrize("brightness", [4.0, 1 / 16])
def test_a_scene_that_left_the_calibration_warns_and_then_alarms(brightness: float) -> None:
    monitor = monitor_of(regime())
    changes = states(monitor, iter([1.0] * 90 + [brightness] * 150))
    assert [name for _, name in changes] == ["calm", "warning", "alarm"]
    assert 90.0 < changes[1][0] < changes[2][0] < 150.0
    assert monitor.state.gain_db > 6.0
    assert (monitor.state.clipping_share > 0.5) is (brightness > 1.0)
    assert monitor.state.onset_ts == pytest.approx(90.0, abs=5.0)


def test_a_passing_cloud_raises_no_alarm() -> None:
    monitor = monitor_of(regime())
    changes = states(monitor, iter(([1.0] * 60 + [4.0] * 10) * 6))
    assert "alarm" not in [name for _, name in changes]


def test_a_known_regime_is_no_news_and_is_switched_to() -> None:
    monitor = monitor_of(regime(1.0), regime(1 / 16))
    changes = states(monitor, iter([1.0] * 60 + [1 / 16] * 60))
    assert changes == [(0.0, "calm")]
    assert monitor.state.serving_db > 6.0
    assert monitor.state.gain_db < 1.0
    assert monitor.state.switch_to == "lit 0.0625"


def test_regimes_that_are_nearly_as_good_do_not_take_turns() -> None:
    monitor = monitor_of(regime(1.0), regime(1.05))
    states(monitor, iter([1.03] * 240))
    assert monitor.state.switch_to == ""


def test_a_switch_that_was_not_made_in_time_is_not_made_later() -> None:
    monitor = monitor_of(regime(1.0), regime(1 / 16))
    states(monitor, iter([1 / 16] * 120))
    assert monitor.state.switch_to
    states(monitor, iter([1.0] * 9))
    assert monitor.state.switch_to == ""


def test_a_scene_that_no_regime_fits_alarms() -> None:
    monitor = monitor_of(regime(1.0), regime(1 / 16))
    assert [name for _, name in states(monitor, iter([16.0] * 100))] == ["calm", "warning", "alarm"]


def test_an_engine_with_more_noise_is_not_switched_to_for_its_excuses() -> None:
    """It left much on the table where it was made; what that takes off its gain takes nothing off its noise."""
    serving = regime(1.0)
    coarse = Regime(
        "coarse",
        {tensor: 3.0 * scale for tensor, scale in serving.scales.items()},
        serving.weights,
        {tensor: (9.0 * least, least) for tensor, (_, least) in serving.own.items()},
    )
    monitor = monitor_of(serving, coarse)
    states(monitor, iter([1.2] * 120))
    assert monitor.state.switch_to == ""


def lit(light: dict[str, float], seed: int) -> dict[str, AbsHistogram]:
    """A frame whose tensors are each in a light of their own."""
    return {name: scene(brightness, seed)[name] for name, brightness in light.items()}


@pytest.mark.parametrize(("moved", "alarms"), [("image", True), ("t1", False)])
def test_a_tensor_counts_by_its_weight(moved: str, alarms: bool) -> None:
    made = calibration()
    monitor = monitor_of(Regime.from_calibration("weighted", made, made.scales, {"image": 1.0, "t1": 1e-6}))
    for second in range(90):
        monitor.update(float(second), lit({"image": 1.0, "t1": 1.0, moved: 16.0}, second))
    assert (monitor.state.state == "alarm") is alarms


def test_a_regime_that_leaves_the_guilty_tensor_float_is_quieter() -> None:
    made = calibration()
    serving = Regime.from_calibration("all INT8", made, made.scales, {"image": 1.0, "t1": 1.0})
    monitor = monitor_of(serving, Regime.from_calibration("half float", made, made.scales, {"image": 5.0}))
    for second in range(90):
        monitor.update(float(second), lit({"image": 1.0, "t1": 64.0}, second))
    assert monitor.state.switch_to == "half float"


def test_two_lights_in_turn_that_one_calibration_suits_raise_no_alarm() -> None:
    """A block sees one of them, and would be better off with scales of its own; a recalibration sees both."""
    frames = [scene(1.0 if number % 2 else 8.0, 500 + number) for number in range(16)]
    together = {name: merge_all(frame[name] for frame in frames) for name in frames[0]}
    made = calibrate_histograms(together, (), model_sha256="m", method="mse", frames=16, source="test")
    monitor = monitor_of(Regime.from_calibration("both", made, made.scales, {"image": 1.0, "t1": 1.0}))
    found = states(monitor, iter(([1.0] * 9 + [8.0] * 6) * 16))
    assert found == [(0.0, "calm")]


def test_an_alarm_ends_even_if_the_clock_is_set_back_meanwhile() -> None:
    monitor = monitor_of(regime())
    states(monitor, iter([4.0] * 80))
    assert monitor.state.state == "alarm"
    for second in range(130):
        monitor.update(second - 1e6, scene(1.0, second))
    assert monitor.state.state == "calm"


def test_time_without_observations_ends_no_alarm() -> None:
    monitor = monitor_of(regime())
    states(monitor, iter([4.0] * 80))
    for second in range(10):
        monitor.update(1e6 + second, scene(1.0, second))
    assert monitor.state.state == "alarm"


def test_histograms_of_another_model_are_refused() -> None:
    monitor = monitor_of(regime())
    with pytest.raises(CalibrationError) as refused:
        monitor.update(0.0, {"somebody else's": scene(1.0, 0)["image"]})
    assert refused.value.code == "drift.tensors"
    assert monitor.state.judged is False


def test_a_regime_that_leaves_everything_float_hides_no_drift() -> None:
    made = calibration()
    monitor = monitor_of(regime(), Regime.from_calibration("all float", made, made.scales, {}))
    assert states(monitor, iter([16.0] * 100))[-1][1] == "alarm"


def test_a_regime_that_fits_is_kept_before_one_with_less_in_int8() -> None:
    made = calibration()
    serving = Regime.from_calibration("all INT8", made, made.scales, {"image": 1.0, "t1": 1.0})
    monitor = monitor_of(serving, Regime.from_calibration("half float", made, made.scales, {"image": 1.0}))
    states(monitor, iter([1.0] * 120))
    assert monitor.state.switch_to == ""


def test_gains_are_unknown_until_a_block_is_judged_and_stay_known_when_a_regime_goes() -> None:
    monitor = monitor_of(regime(1.0), regime(1 / 16))
    assert monitor.state.judged is False
    states(monitor, iter([1 / 16] * 60))
    before = monitor.state
    assert before.judged
    assert before.serving_db > 6.0
    monitor.compare([])
    after = monitor.state
    assert (after.serving_db, after.gain_db, after.switch_to) == (before.serving_db, before.serving_db, "")


@pytest.mark.parametrize(
    "spoilt",
    [{"gains_db": []}, {"gains_db": {"lit 1": float("nan")}}, {"calm_s": 10**400}, {"onset_ts": "soon"},
     {"detector": None}, {"clipping_share": None}, {"warns": None, "calm_s": []}, {"gains_db": None}, {"detector": 3}],
)  # fmt: skip
def test_a_state_that_no_monitor_wrote_is_refused_and_changes_nothing(spoilt: dict[str, object]) -> None:
    first = monitor_of(regime())
    states(first, iter([4.0] * 40))
    monitor = monitor_of(regime())
    for state in ({}, {**first.saved_state(), **spoilt}):
        with pytest.raises(CalibrationError, match=r"evidence\.state"):
            monitor.restore(state)
    assert monitor.state == monitor_of(regime()).state


def test_a_monitor_that_is_let_go_takes_its_histograms_with_it() -> None:
    """With every engine comes a new one; a circle would keep the old one's megabytes for a hundred engines or more."""
    monitor = monitor_of(regime())
    monitor.update(0.0, scene(1.0, 1))
    gone = weakref.ref(monitor)
    gc.disable()
    try:
        del monitor
        assert gone() is None
    finally:
        gc.enable()


def test_where_there_is_no_noise_nothing_is_gained_by_raising_the_precision() -> None:
    monitor = monitor_of(regime())
    dark = {name: abs_histogram(np.zeros(16, np.float32)) for name in ("image", "t1")}
    assert monitor.raised_gain_on(dark, 4) == 0.0
    assert monitor.raised_gain_on(scene(1.0, 1), 1) > 0.0
