"""Times of day, whatever the clock does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from worlds import SPEC

from agent.common.errors import ConfigError
from agent.common.schema import validate
from agent.config import Config
from agent.core.due import scheduled


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A place with summer time; as a rule, so that no zone files are needed."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str) -> float:
    """Local time."""
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M"))


def answers(schedule: list[str], *times: float) -> list[str]:
    """Return the times that are due, each answered at once."""
    found: list[str] = []
    for now_s in times:
        due = scheduled(schedule, found, now_s)
        if due:
            found.append(due)
    return found


def test_each_time_of_each_day_counts_once() -> None:
    schedule = ["03:00", "15:30"]
    begin_s = at("2026-06-01 00:00")
    minutes = (begin_s + 60.0 * minute for minute in range(2 * 24 * 60))
    assert answers(schedule, *minutes) == [
        "2026-06-01 03:00", "2026-06-01 15:30", "2026-06-02 03:00", "2026-06-02 15:30",
    ]  # fmt: skip


@pytest.mark.parametrize(("now", "due"), [("02:59", ""), ("03:00", "03:00"), ("03:59", "03:00"), ("04:00", "")])
def test_a_time_is_made_up_for_within_the_hour(now: str, due: str) -> None:
    assert scheduled(["03:00"], (), at(f"2026-06-01 {now}")) == (due and f"2026-06-01 {due}")


@pytest.mark.parametrize("evening", ["2026-06-01", "2026-03-29", "2026-10-25"], ids=["a day", "23 h", "25 h"])
def test_an_evenings_time_may_wait_until_after_midnight(evening: str) -> None:
    assert scheduled(["23:45"], (), at(f"{evening} 23:45") + 45 * 60.0) == f"{evening} 23:45"


@pytest.mark.parametrize(
    ("times", "due"),
    [
        (["06-01 03:00", "06-02 03:00", "06-01 03:10", "06-02 02:30", "06-02 03:05"], ["06-01 03:00", "06-02 03:00"]),
        (["06-01 02:00", "06-09 03:10", "06-09 03:20"], ["06-09 03:00"]),
        (["12-31 03:00", "06-01 03:00"], ["12-31 03:00", "06-01 03:00"]),
    ],
    ids=["set back", "set forward", "far ahead, then set"],
)
def test_a_clock_that_is_set_brings_no_time_twice_and_blocks_none(times: list[str], due: list[str]) -> None:
    given = answers(["03:00"], *(at(f"2026-{each}") for each in times))
    assert given == [f"2026-{each}" for each in due]


def test_a_clock_that_was_never_set_starts_nothing() -> None:
    for year in ("1970-01-01", "2024-12-31"):
        assert scheduled(["01:00"], (), at(f"{year} 01:10")) == ""


def test_summer_time_leaves_no_time_out_and_brings_none_twice() -> None:
    schedule = ["02:30"]
    spring_s, autumn_s = at("2026-03-28 12:00"), at("2026-10-24 12:00")
    for begin_s in (spring_s, autumn_s):
        minutes = (begin_s + 60.0 * minute for minute in range(24 * 60))
        assert len(answers(schedule, *minutes)) == 1


def config(schedule: object) -> Config:
    content = {"model": SPEC, "camera": {"source": "rtsp://camera"}, "recalibration": {"schedule": schedule}}
    return validate(Config, content, "test")


def test_times_without_quotes_are_what_they_look_like(tmp_path: Path) -> None:
    (tmp_path / "times.yaml").write_text('[03:00, "03:15", 0:00, 10:05, 23:30]')
    times = yaml.safe_load((tmp_path / "times.yaml").read_text())
    assert 23 * 60 + 30 in times  # YAML 1.1
    times.remove("0:00")
    assert config(times).recalibration.schedule == ("03:00", "03:15", "10:05", "23:30")


@pytest.mark.parametrize(
    "schedule", ["03:00", ["24:00"], ["3:00"], [1440], [-1], [True], [3.5], ["03:00\n"], ["٠٣:٠٠"]]
)
def test_an_impossible_time_of_day_is_refused(schedule: object) -> None:
    with pytest.raises(ConfigError, match="schedule"):
        config(schedule)
