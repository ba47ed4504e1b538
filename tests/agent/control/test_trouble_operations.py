"""Decisions while the view is in trouble, state by state: to report, and to wait; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from trouble_bench import TROUBLES, Desk, desk

from calibrate.statistics.evidence import Interval

__all__ = ["desk"]  # the fixture


@pytest.mark.parametrize("trouble", TROUBLES)
def test_an_alarm_in_trouble_is_reported_with_its_evidence_and_starts_nothing(
    desk: Callable[..., Desk], trouble: str
) -> None:
    at = desk()
    assert at.tick(trouble, telling=9) == ""
    (alarm,) = at.events("alarm")
    assert (alarm["trouble"], alarm["alike"]) == (trouble, 0.123)
    assert at.tick() == "alarm"  # what ends the trouble lets it act


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_regime_is_switched_to_for_a_view_in_trouble(desk: Callable[..., Desk], trouble: str) -> None:
    at = desk()
    serving = at.executor.service.serving.id
    at.tick(trouble, state="calm", switch_to=at.other.id)
    assert at.executor.service.serving.id == serving
    at.tick(state="calm", switch_to=at.other.id)
    assert at.executor.service.serving.id == at.other.id


@pytest.mark.parametrize("trouble", TROUBLES)
def test_precision_is_not_raised_for_a_view_in_trouble(desk: Callable[..., Desk], trouble: str) -> None:
    at = desk()
    assert at.tick(trouble, state="calm", serving_db=0.0) == ""
    assert at.tick(state="calm", serving_db=0.0) == "precision"


@pytest.mark.parametrize(
    ("task", "trouble", "telling", "trigger"),
    [
        ("detect", "blind", 1, "alarm"),
        ("detect", "blind", 0, ""),
        ("classify", "blind", 1, ""),
        ("detect", "moved", 1, ""),
        ("detect", "blurred", 1, ""),
    ],
)
def test_a_dark_street_with_cars_is_something_to_go_by(
    desk: Callable[..., Desk], task: str, trouble: str, telling: int, trigger: str
) -> None:
    at = desk(task)
    assert at.tick(trouble, telling) == trigger


def test_a_dark_street_with_cars_is_given_its_regime(desk: Callable[..., Desk]) -> None:
    at = desk("detect")
    at.tick("blind", telling=1, state="calm", switch_to=at.other.id)
    assert at.executor.service.serving.id == at.other.id


def test_frames_collected_by_day_do_not_count_in_the_dark(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of another view count neither as a sign that something is seen nor as a cure."""
    at = desk("detect")
    begun: list[str] = []
    monkeypatch.setattr(at.gathering, "restart", lambda **_: begun.append("afresh"))
    at.tick(telling=5, state="calm", serving_db=9.0)
    assert at.tick("blind", telling=5, times=1) == ""
    assert len(begun) == 1
    for trouble in ("blind", "frozen", "blind"):  # a frozen view adds nothing to what is collected
        at.tick(trouble)
    assert len(begun) == 1
    at.tick(times=1)
    assert len(begun) == 2


def test_no_regime_is_switched_to_that_another_camera_would_be_left_by(desk: Callable[..., Desk]) -> None:
    at = desk()
    serving, wanted = at.executor.service.serving.id, at.other.id
    assert at.state.drift is not None
    faithful = replace(at.state.settled, interval=Interval(0.95, 0.93, 0.97, 200))
    calm = replace(at.state, settled=faithful, drift=replace(at.state.drift, state="calm", serving_db=0.5))
    assert calm.drift is not None
    asks = replace(calm, drift=replace(calm.drift, switch_to=wanted, serving_db=9.0))
    left = replace(calm, drift=replace(calm.drift, gains_db={serving: 0.5, wanted: 9.0}))
    suited = replace(calm, drift=replace(calm.drift, gains_db={serving: 0.5, wanted: 1.0}))
    at.executor.tick({"yard": asks, "hall": left})
    assert at.executor.service.serving.id == serving
    at.executor.tick({"yard": asks, "hall": suited})
    assert at.executor.service.serving.id == wanted
