"""benchmarks/gpu_timing.py and the gate of gpu_device.py, with hosts of any pace in the place of a GPU's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.gpu_device import CudaDevice
from benchmarks.gpu_timing import Contender, Run, take_turns


class Host:
    """A GPU's clock whose host needs `pace` milliseconds to queue a run, and a gate copy takes one."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self.gates: list[int] = []

    def milliseconds(self, _run: Run, times: int, gate: int) -> tuple[float, bool]:
        self.gates.append(gate)
        ahead = gate > times * self._pace
        return (1.0 if ahead else self._pace), ahead


@pytest.mark.parametrize(
    ("pace", "times", "gates", "speed"),
    [
        (0.1, 2, [1, 1, 1], "1"),
        (2.0, 2, [1, 2, 4, 8, 8, 8], "1"),
        (99.0, 2, [1, 2, 4, 8, 16, 32, 0, 0, 0], "0*"),
    ],
)
def test_a_sample_counts_once_the_gate_outlasts_the_host(pace: float, times: int, gates: list[int], speed: str) -> None:
    clock, contender = Host(pace), Contender(lambda _: None, times)
    take_turns(clock, [contender], rounds=3)
    assert clock.gates == gates
    assert contender.speed(1_000_000).text() == speed


def test_a_figure_keeps_one_rule() -> None:
    contender = Contender(lambda _: None)
    contender.sample(Host(0.1))
    contender.sample(Host(50.0))
    assert (contender.median_ms, contender.ahead) == (50.0, False)


def test_turns_and_the_budget_of_the_slow() -> None:
    order: list[str] = []

    class Clock:
        def milliseconds(self, run: Run, *_: int) -> tuple[float, bool]:
            run(0)
            return (600.0 if order[-1] == "slow" else 1.0), True

    contenders = [Contender(lambda _: order.append("slow")), Contender(lambda _: order.append("fast"))]
    take_turns(Clock(), contenders, rounds=4)
    assert order == ["slow", "fast", "slow", "fast", "fast", "fast"]


@pytest.mark.parametrize("ahead", [True, False])
def test_the_gate_goes_first_and_is_asked_before_it_is_waited_for(ahead: bool) -> None:
    calls: list[object] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def query(self) -> bool:
            calls.append("query")
            return not ahead

        def synchronize(self) -> None:
            calls.append("synchronize")

        def time_since(self, _: Event) -> float:
            return 6.0

    device = CudaDevice.__new__(CudaDevice)
    device._driver = SimpleNamespace(Event=Event, memcpy_dtod_async=lambda *_: calls.append("copy"))
    device._gate, device._gate_bytes = 0, 8
    assert device.milliseconds(calls.append, times=2, gate=3) == (3.0, ahead)
    assert calls == ["copy"] * 3 + ["record", 0, 1, "record", "query", "synchronize"]
