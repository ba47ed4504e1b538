"""Headroom: when a job waits, pauses, and is given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from turned_clock import TurnedClock

from agent.common.errors import AgentError
from agent.config import HeadroomConfig
from agent.jobs.headroom import Headroom
from agent.system.board import BoardReading, BoardState, Rail, Zone

FREE = BoardReading(
    memory_available_bytes=2**30,
    is_jetson=True,
    zones=(Zone("cpu-thermal", 60.0, 99.0), Zone("tj-thermal", 60.0, None)),
    throttling=(),
    over_current_events=3,
    rails=(Rail("VDD_IN", 5.0, 0.5), Rail("VDD_SOC", 1.0, None)),
)
HOT = replace(FREE, zones=(Zone("cpu-thermal", 99.5, 99.0),))
THROTTLED = replace(FREE, throttling=("cpufreq-cpu0",))


class Bench:
    """A board that can be changed, and a turned clock; read once a second, as `tick` would."""

    def __init__(self, **limits: Any) -> None:
        self.clock = TurnedClock()
        self.reading = FREE
        self.reads = 0
        self.headroom = Headroom(HeadroomConfig(**limits), cast(BoardState, self), self.clock)

    def read(self) -> BoardReading:
        self.reads += 1
        return self.reading

    def start(self, reading: BoardReading, after_s: float = 1.0) -> str:
        self.reading = reading
        self.clock.turn(after_s)
        return self.headroom.reason_to_wait()

    def run(self, reading: BoardReading, seconds: int = 1) -> list[str]:
        self.reading = reading
        reasons = []
        for _ in range(seconds):
            self.clock.turn(1.0)
            reasons.append(self.headroom.reason_to_pause())
        return reasons


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (replace(FREE, memory_available_bytes=2**29 - 2**20), "511 MiB of memory available, 512 MiB needed"),
        (replace(FREE, zones=(Zone("GPU-therm", 90.0, 99.0),)), "GPU-therm at 90 C, limit 99 C"),
        (replace(FREE, zones=(Zone("tj-thermal", 76.0, None),)), "tj-thermal at 76 C, limit 85 C"),
        (replace(FREE, rails=(Rail("VDD_IN", 20.0, 0.95),)), "VDD_IN at 95 % of its limit"),
        (replace(FREE, throttling=("cpufreq-cpu0", "devfreq-gpu")), "throttled by cpufreq-cpu0 devfreq-gpu"),
        (replace(HOT, throttling=("gpu",)), "cpu-thermal at 100 C, limit 99 C; throttled by gpu"),
    ],
)
def test_a_board_without_headroom(reading: BoardReading, reason: str) -> None:
    bench = Bench()
    assert bench.start(reading) == reason
    assert bench.start(FREE) == ""


@pytest.mark.parametrize(
    ("limits", "reading"),
    [
        ({"memory_bytes": None}, replace(FREE, memory_available_bytes=0)),
        ({"temperature_margin_c": None}, HOT),
        ({}, replace(FREE, is_jetson=False, zones=(Zone("x", 94.0, None), Zone("cpu", 60.0, 99.0)))),
        ({"power_share": None}, replace(FREE, rails=(Rail("VDD_IN", 90.0, 4.0),))),
        ({"throttling": False}, THROTTLED),
    ],
)
def test_a_limit_of_none_is_not_checked(limits: dict[str, Any], reading: BoardReading) -> None:
    bench = Bench(**limits)
    assert bench.start(reading) == ""
    assert bench.run(reading) == [""]


def test_a_job_that_waits_too_long_is_given_up() -> None:
    bench = Bench(max_delay_s=60.0)
    bench.start(FREE, 1000.0)  # not a refusal: the delay counts from the first one
    assert bench.start(HOT)
    assert bench.start(HOT, 60.0)
    with pytest.raises(AgentError, match=r"cpu-thermal at 100 C.*more than 60 s") as caught:
        bench.start(HOT, 1.0)
    assert caught.value.code == "headroom.delay"


def test_headroom_that_comes_late_is_headroom() -> None:
    bench = Bench(max_delay_s=60.0)
    assert bench.start(HOT)
    assert bench.start(FREE, 100.0) == ""


def test_without_limits_a_job_waits_and_pauses_without_end() -> None:
    bench = Bench(max_delay_s=None, max_pause_s=None)
    assert bench.start(HOT)
    assert bench.start(HOT, 1e9)
    assert all(bench.run(HOT, 2000))


def test_a_pause_lasts_until_nothing_was_amiss_for_ten_seconds() -> None:
    bench = Bench()
    assert bench.run(FREE, 5) == [""] * 5
    assert bench.run(HOT, 3) == ["cpu-thermal at 100 C, limit 99 C"] * 3
    assert all(bench.run(FREE, 9))
    assert bench.run(FREE, 2) == ["", ""]


def test_a_relapse_starts_the_calm_anew() -> None:
    bench = Bench()
    bench.run(THROTTLED)
    bench.run(FREE, 8)
    assert bench.run(THROTTLED) == ["throttled by cpufreq-cpu0"]
    assert all(bench.run(FREE, 9))
    assert bench.run(FREE) == [""]


def test_a_paused_process_waits_for_five_degrees_less() -> None:
    bench = Bench()
    warm = replace(FREE, zones=(Zone("cpu-thermal", 97.0, 99.0),))
    assert bench.run(warm) == [""]
    bench.run(HOT)
    assert all(bench.run(warm, 30))
    assert bench.run(replace(FREE, zones=(Zone("cpu-thermal", 93.0, 99.0),)), 10)[-1] == ""


def test_memory_pauses_at_a_quarter_and_lets_go_at_a_half() -> None:
    bench = Bench(memory_bytes=2**29)
    assert bench.run(replace(FREE, memory_available_bytes=2**27)) == [""]
    assert bench.run(replace(FREE, memory_available_bytes=2**27 - 1)) == ["128 MiB of memory available, 128 MiB needed"]
    assert all(bench.run(replace(FREE, memory_available_bytes=2**28 - 1), 30))
    assert bench.run(replace(FREE, memory_available_bytes=2**28), 10)[-1] == ""


def test_over_current_is_an_event_that_is_new() -> None:
    bench = Bench()
    assert bench.run(FREE, 2) == ["", ""]  # three of them before anybody looked
    assert bench.run(replace(FREE, over_current_events=4)) == ["throttled for over-current"]
    assert bench.run(replace(FREE, over_current_events=4), 10)[-1] == ""


def test_the_power_that_the_process_takes_does_not_pause_it() -> None:
    assert Bench().run(replace(FREE, rails=(Rail("VDD_IN", 20.0, 0.99),))) == [""]


def test_pauses_are_counted_together() -> None:
    bench = Bench(max_pause_s=60.0)
    for _ in range(3):
        assert all(bench.run(HOT, 10))
        assert bench.run(FREE, 100)[-1] == ""
    assert bench.headroom.paused_s == 3 * 19  # each from its first hot second to ten after its last
    with pytest.raises(AgentError, match=r"cpu-thermal at 100 C.*more than 60 s together") as caught:
        bench.run(HOT, 10)
    assert caught.value.code == "headroom.pause"


def test_the_board_is_read_once_a_second() -> None:
    bench = Bench()
    for _ in range(20):
        bench.clock.turn(0.125)
        bench.headroom.reason_to_pause()
    assert bench.reads == 3
