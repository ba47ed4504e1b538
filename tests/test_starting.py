"""What is said while engines are built before the first frame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent import starting
from agent.console import Task
from agent.messages import Birth
from agent.reporting import Reporter
from agent.starting import Starting


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What systemd hears."""
    heard: list[str] = []
    monkeypatch.setattr(starting, "notify_service_manager", heard.append)
    return heard


def reports(folder: Path, at_s: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    """Steps of a builder at these seconds; what is logged."""
    clock = iter([0.0, *at_s])
    monkeypatch.setattr(starting, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    birth = Birth(agent_version="0", hardware={}, runtimes={}, model="m")
    reporter = Reporter(folder, None, birth)
    with caplog.at_level("INFO"):
        report = Starting("reference", reporter, Task("preparing", 100, None).update)
        for number in range(len(at_s)):
            report(number / max(len(at_s) - 1, 1), "Timing graph nodes")
    return caplog.text


def test_an_engine_that_is_only_loaded_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: list[str]
) -> None:
    assert "step='BUILDING'" not in reports(tmp_path, [0.1, 0.2, 0.3], monkeypatch, caplog)
    assert told == []


def test_a_long_build_is_told_ten_percent_by_ten_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: list[str]
) -> None:
    said = reports(tmp_path, [3.0 + second for second in range(41)], monkeypatch, caplog)
    assert said.count("step='BUILDING'") == 11
    assert "trigger='start'" in said
    assert "engine='reference'" in said
    assert "percent=50" in said
    assert len(told) == 41
    assert told[0].startswith("EXTEND_TIMEOUT_USEC=")


def test_an_engine_that_is_built_beside_the_video_is_told_elsewhere_and_puts_off_no_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: list[str]
) -> None:
    clock, posted, shown = iter([0.0, 3.0, 4.0, 5.0]), list[Callable[[], None]](), list[tuple[int, str]]()
    monkeypatch.setattr(starting, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    reporter = Reporter(tmp_path, None, Birth(agent_version="0"))
    report = Starting("reference", reporter, lambda *words: shown.append(words), posted.append)
    with caplog.at_level("INFO"):
        for fraction in (0.5, 0.51, 0.6):
            report(fraction, "Timing graph nodes")
        assert caplog.text == ""
        for function in posted:
            function()
    assert [percent for percent, _ in shown] == [50, 51, 60]
    assert ("percent=50" in caplog.text, "percent=51" in caplog.text, "percent=60" in caplog.text) == (
        True,
        False,
        True,
    )
    assert told == []
