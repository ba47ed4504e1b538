"""The engine that the light of this hour has needed on other days is warm before it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from operations_bench import Desk, ask, desk

from agent.common.errors import AgentError
from agent.control import expected_regime
from agent.control.expected_regime import SwitchTimes, WarmRegime
from calibrate.errors import TaredError

__all__ = ["desk"]  # the fixture

DAY_S = 86_400.0
NOON = 20_000 * DAY_S + 12 * 3600.0


def kept(path: Path | None) -> SwitchTimes:
    return SwitchTimes(path, lambda error: pytest.fail(str(error)))


def dusks(times: SwitchTimes, days: range, artefact: str = "night", drift_s: float = 120.0) -> None:
    """A switch each day, some minutes later than on the day before."""
    for day in days:
        times.note(artefact, NOON + day * (DAY_S + drift_s))


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [pytest.param(-60, "", id="long before"), (-10, "night"), (0, "night"), (20, "night"), (60, "")],
)
def test_a_switch_is_expected_at_its_time_of_day(tmp_path: Path, minutes: float, expected: str) -> None:
    times = kept(tmp_path / "switches.json")
    dusks(times, range(-5, 0))
    for known in (times, kept(tmp_path / "switches.json")):
        assert known.expected(NOON + 60.0 * minutes, ["night", "day"]) == expected
    assert times.expected(NOON, ["day"]) == "", "a regime that was forgotten"


def test_what_happened_twice_or_flickered_on_one_day_is_no_habit() -> None:
    times = kept(None)
    dusks(times, range(-2, 0))
    for second in range(100):
        times.note("night", NOON - DAY_S + second)
    assert times.expected(NOON, ["night"]) == ""


def test_a_clock_that_jumps_loses_what_it_knows_and_no_more() -> None:
    times = kept(None)
    dusks(times, range(-5, 0))
    times.note("night", NOON + 4000 * DAY_S)
    assert times.expected(NOON + 4000 * DAY_S, ["night"]) == ""
    assert times.expected(NOON, ["night"]) == ""


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 1, "switches": [["night"]]}'])
def test_damaged_times_are_learnt_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "switches.json").write_text(content)
    assert kept(tmp_path / "switches.json").expected(NOON, ["night"]) == ""


def test_the_expected_engine_is_loaded_once_and_handed_over(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_regime, "_CHECK_S", 0.0)
    at, times, errors = desk(), kept(None), list[TaredError]()
    other = at.raised.id
    dusks(times, range(-4, 0), other)
    warm = WarmRegime(at.service, times, None, errors.append)
    warm.tick(NOON - 3600.0, [other])
    assert warm.artefact == ""
    warm.tick(NOON, [other])
    assert warm.artefact == other
    assert warm.take("another") is None
    loaded = warm.take(other)
    assert loaded is not None
    assert loaded.engine.infer is not None
    loaded.engine.close()
    assert (warm.artefact, errors) == ("", [])
    warm.tick(NOON, [other])
    warm.tick(NOON + 7200.0, [other])
    assert warm.artefact == "", "its time has passed"


def test_without_memory_or_with_a_damaged_engine_nothing_is_warm(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_regime, "_CHECK_S", 0.0)
    at, times, errors = desk(), kept(None), list[TaredError]()
    dusks(times, range(-4, 0), at.raised.id)
    starved = WarmRegime(at.service, times, 1 << 60, errors.append)
    starved.tick(NOON, [at.raised.id])
    assert (starved.artefact, errors) == ("", [])
    for path in at.raised.path.iterdir():
        path.write_bytes(b"damaged")
    warm = WarmRegime(at.service, times, None, errors.append)
    for _ in range(3):
        warm.tick(NOON, [at.raised.id])
    assert (warm.artefact, len(errors)) == ("", 1)


def test_operations_switch_with_the_warm_engine(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    at = desk()
    operations, other = at.operations, at.raised.id
    assert at.state.drift is not None
    taken: list[str] = []

    def take(artefact: str) -> None:
        taken.append(artefact)

    monkeypatch.setattr(operations._warm, "take", take)
    at.tick(drift=replace(at.state.drift, switch_to=other))
    assert (taken, at.service.serving.id) == ([other], other)
    assert [artefact for artefact, _ in operations._switch_times._switches] == [other]


def test_a_switch_that_fails_is_no_habit(desk: Callable[..., Desk]) -> None:
    at = desk()
    assert at.state.drift is not None
    for path in at.raised.path.iterdir():
        path.write_bytes(b"damaged")
    at.tick(drift=replace(at.state.drift, switch_to=at.raised.id))
    assert at.service.serving.id == at.int8.id
    assert at.operations._switch_times._switches == []


def test_a_job_has_the_memory_of_the_warm_engine_whoever_starts_it(desk: Callable[..., Desk]) -> None:
    at = desk()
    operations = at.operations
    dusks(operations._switch_times, range(-4, 0), at.raised.id)
    operations._warm.tick(NOON, [at.raised.id])
    assert operations._warm.artefact == at.raised.id
    assert ask(at, "c1")
    at.tick()
    assert operations._warm.artefact == ""


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "switches.json").write_text('{"schema": 9}')
    with pytest.raises(AgentError, match=r"switches\.schema"):
        kept(tmp_path / "switches.json")
