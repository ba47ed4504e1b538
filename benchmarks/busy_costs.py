"""Costs of layer groups measured on a simulated busy machine: which plan they lead to, and what it really takes.

    python -m benchmarks.busy_costs          a minute, on one core; prints a table

A network is a chain of 40 groups with planted times in float and INT8. What else the machine does multiplies every
group's time by a lognormal factor that stays for one to six profiles in a row, all of them by a factor of 1 to 2, and
each profile by a smaller factor of its own. The fastest plan by the costs is then timed without a disturbance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.partition import FREE, Problem, fastest
from calibrate.plan import PrecisionPlan
from engines.interface import Array
from engines.quantise.costs import measure_costs
from engines.quantise.fusion import FusionGroup, Grouping

Floats = NDArray[np.float64]

_GROUPS = 40
_MACHINES = 8  # machines of each row
_WORTH_IT = 0.99  # share of the float time, as agent/planning/costs.py has it
_DISTURBANCES = (0.02, 0.1, 0.3, 0.5)
_INT8_PER_FLOAT: Mapping[str, Callable[[np.random.Generator], Floats]] = {
    "0.45 to 0.75": lambda rng: rng.uniform(0.45, 0.75, _GROUPS),
    "0.8 to 1.0": lambda rng: rng.uniform(0.8, 1.0, _GROUPS),
    "1.0": lambda _: np.ones(_GROUPS),
    "1.1 to 1.8": lambda rng: rng.uniform(1.1, 1.8, _GROUPS),
    "0.5 or 1.5": lambda rng: rng.choice([0.5, 1.5], _GROUPS),
}


class Machine:
    """Builds engines whose layers take planted times, under disturbances of this spread."""

    def __init__(self, ratio: Callable[[np.random.Generator], Floats], spread: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.macs = np.round(rng.lognormal(0.0, 1.0, _GROUPS) * 1e6)
        self.float_ms = self.macs / 1e6 * rng.uniform(0.7, 1.4, _GROUPS)
        self.int8_ms = self.float_ms * ratio(rng)
        self.boundary_ms = rng.uniform(0.0, 0.1, _GROUPS - 1) * self.float_ms.mean()
        names = [f"group_{index}" for index in range(_GROUPS)]
        groups = [FusionGroup(name, (name,), (name,), int(macs)) for name, macs in zip(names, self.macs, strict=True)]
        edges = tuple((index, index + 1, 1) for index in range(_GROUPS - 1))
        self.grouping = Grouping(tuple(groups), edges, {name: (index,) for index, name in enumerate(names)}, {})
        self._rng = np.random.default_rng(seed + 100)
        self._spread = spread
        self._disturbance = np.ones(_GROUPS)
        self._profiles_left = 0

    def times_ms(self, int8: NDArray[np.bool_]) -> Floats:
        """The times of the groups when nothing disturbs; a boundary counts for the later group."""
        times = np.where(int8, self.int8_ms, self.float_ms)
        times[1:] += (int8[1:] != int8[:-1]) * self.boundary_ms
        return times

    def profile_ms(self, int8: NDArray[np.bool_]) -> Floats:
        """The times that a profile reports."""
        if not self._profiles_left:
            self._disturbance = self._rng.lognormal(0.0, self._spread, _GROUPS) * self._rng.uniform(1.0, 2.0)
            self._profiles_left = int(self._rng.integers(1, 7))
        self._profiles_left -= 1
        own: Floats = self._rng.lognormal(0.0, 0.5 * self._spread, _GROUPS)
        return self.times_ms(int8) * self._disturbance * own

    def build(self, plan: PrecisionPlan) -> Engine:
        return Engine(self, np.array([group.name not in plan.floats for group in self.grouping.groups]))


class Engine:
    """A design that is only ever profiled."""

    inputs = outputs = ()

    def __init__(self, machine: Machine, int8: NDArray[np.bool_]) -> None:
        self._machine = machine
        self._int8 = int8

    def infer(self, batch: Array) -> dict[str, Array]:
        raise AssertionError(f"a planted engine is profiled, and never infers: {batch.shape}")

    def layer_nodes(self) -> Mapping[str, tuple[str, ...]]:
        return {group.name: group.nodes for group in self._machine.grouping.groups}

    def layer_times_ms(self, batch: Array, runs: int = 20) -> dict[str, float]:  # noqa: ARG002  planted
        return dict(zip(self.layer_nodes(), self._machine.profile_ms(self._int8).tolist(), strict=True))

    def close(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """The plan to which a machine's costs led. int8, time: its share of MACs and of the float time, if measured."""

    builds: int
    int8: float | None
    time: float | None


def outcome(machine: Machine) -> Outcome:
    """Measure a machine, and time the fastest plan where the costs are believed and save anything."""
    costs = measure_costs(machine.grouping, machine.build, np.zeros(1))
    edges = np.array([edge[:2] for edge in machine.grouping.edges])
    labels = np.full(_GROUPS, FREE, np.int8)
    plan = fastest(Problem(costs.int8_ms, costs.float_ms, np.zeros(_GROUPS), edges, costs.boundary_ms, labels), np.inf)
    if costs.source != "measured" or plan.time > _WORTH_IT * costs.float_ms.sum():
        return Outcome(costs.builds, None, None)
    time = float(machine.times_ms(plan.int8).sum() / machine.float_ms.sum())
    return Outcome(costs.builds, float(machine.macs[plan.int8].sum() / machine.macs.sum()), time)


def main() -> None:
    print(
        "| INT8 / float | disturbance | plans by measured costs | MACs in INT8: mean, least | time / float | engines |"
    )
    print("|---|---|---|---|---|---|")
    for name, ratio in _INT8_PER_FLOAT.items():
        for spread in _DISTURBANCES:
            found = [outcome(Machine(ratio, spread, seed)) for seed in range(_MACHINES)]
            int8 = [each.int8 for each in found if each.int8 is not None]
            times = [each.time for each in found if each.time is not None]
            shares = f"{np.mean(int8):.2f}, {min(int8):.2f} | {np.mean(times):.3f}" if int8 else "- | -"
            engines = np.mean([each.builds for each in found])
            print(f"| {name} | {spread:g} | {len(int8)} of {_MACHINES} | {shares} | {engines:.0f} |")


if __name__ == "__main__":
    main()
