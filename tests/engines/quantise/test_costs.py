"""Costs of groups on a machine whose times are known: found while it slows down, and by MACs where they are noise."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto
from zoo import Net, residual_net

from calibrate.plan import PrecisionPlan
from engines.errors import EngineError
from engines.interface import Array
from engines.quantise.costs import OutOfTimeError, layer_shares, macs_costs, measure_costs
from engines.quantise.fusion import Grouping, fusion_groups
from engines.quantise.placement import place

BATCH = np.zeros((1, 3, 8, 8), np.float32)


class Machine:
    """Builds engines that report planted times, each inference `slowdown` times slower than the one before."""

    def __init__(self, grouping: Grouping, slowdown: float = 1.0) -> None:
        self.grouping, self.slowdown, self.clock = grouping, slowdown, 1.0
        self.boundary = np.arange(1, len(grouping.edges) + 1) / 10.0
        self.open = self.most_open = self.built = 0
        self.int8: float | NDArray[np.float64] = 0.4  # of a group's time in float
        self.decode_int8_ms = 7.0
        self.noise = 1.0
        self.random: np.random.Generator | None = None
        self.burst: NDArray[np.float64] | None = None
        self.burst_left = 0

    def build(self, plan: PrecisionPlan) -> PlantedEngine:
        self.built += 1
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        return PlantedEngine(self, [group.name not in plan.floats for group in self.grouping.groups])

    def layers(self, labels: list[bool]) -> dict[str, tuple[float, tuple[str, ...]]]:
        """Per layer its time and nodes: the groups', reformats by name of their reader, and what no plan changes."""
        groups = self.grouping.groups
        times = 5.0 * np.where(labels, self.int8, 1.0) * (1.0 + np.arange(len(groups)))
        made = {group.name: (float(time_ms), group.nodes) for group, time_ms in zip(groups, times, strict=True)}
        for (i, j, _), time_ms in zip(self.grouping.edges, self.boundary, strict=True):
            if labels[i] != labels[j]:
                made[f"reformat {i} {j}"] = time_ms, groups[j].nodes
        return {**made, "decode": (self.decode_int8_ms if any(labels) else 7.0, ("Reshape_9",))}

    def disturbance(self, layers: int) -> NDArray[np.float64]:
        """The factors by which a busy machine multiplies times: for some profiles in a row much the same."""
        assert self.random is not None
        if not self.burst_left or self.burst is None or self.burst.size != layers:
            self.burst = self.random.lognormal(0.0, self.noise, layers)
            self.burst_left = int(self.random.integers(2, 7))
        self.burst_left -= 1
        return self.burst * self.random.lognormal(0.0, 0.3 * self.noise, layers)


class PlantedEngine:
    """Return the machine's times of one plan."""

    def __init__(self, machine: Machine, labels: list[bool]) -> None:
        self.machine, self.labels = machine, labels
        self.inputs, self.outputs = (), ()

    def infer(self, batch: Array) -> dict[str, Array]:
        raise AssertionError(f"a planted engine is profiled, and never infers: {batch.shape}")

    def layer_times_ms(self, batch: Array, runs: int = 20) -> dict[str, float]:  # noqa: ARG002  planted
        machine = self.machine
        machine.clock *= machine.slowdown
        layers = machine.layers(self.labels)
        times = {layer: time_ms * machine.clock for layer, (time_ms, _) in layers.items()}
        if machine.random is None:
            return times
        factors = machine.disturbance(len(layers))
        return {layer: time_ms * factor for (layer, time_ms), factor in zip(times.items(), factors, strict=True)}

    def layer_nodes(self) -> Mapping[str, tuple[str, ...]]:
        return {layer: nodes for layer, (_, nodes) in self.machine.layers(self.labels).items()}

    def close(self) -> None:
        self.machine.open -= 1


@pytest.fixture
def machine() -> Machine:
    model = residual_net()
    return Machine(fusion_groups(model, place(model)))


def straight_net(layers: int) -> ModelProto:
    net, x = Net(), "image"
    for number in range(layers):
        x = net.node("Relu", net.conv(x, 4 if number else 3, 4))
    return net.model(x)


def unseen(grouping: Grouping) -> NDArray[np.bool_]:
    return np.random.default_rng(3).random((20, len(grouping.groups))) < 0.5


@pytest.mark.parametrize("slowdown", [1.0, 1.01])
def test_planted_costs_are_found_while_the_machine_slows_down(machine: Machine, slowdown: float) -> None:
    machine.slowdown = slowdown
    shown: list[float] = []
    costs = measure_costs(machine.grouping, machine.build, BATCH, lambda fraction, _: shown.append(fraction))
    assert shown == sorted(shown)
    assert shown[-1] == 1.0
    assert (costs.source, costs.builds) == ("measured", machine.built)
    assert machine.built <= 8
    assert (machine.open, machine.most_open) == (0, 2)
    assert costs.residual < 0.01
    scale = costs.fixed_ms / 7.0
    for labels in unseen(machine.grouping):
        expected = sum(time_ms for time_ms, _ in machine.layers(labels.tolist()).values())
        assert costs.total_ms(machine.grouping, labels) == pytest.approx(scale * expected, rel=0.02)


def test_random_times_fall_back_to_macs_and_say_so(machine: Machine) -> None:
    machine.random, machine.int8 = np.random.default_rng(0), 1.0
    reported: list[str] = []
    costs = measure_costs(machine.grouping, machine.build, BATCH, lambda _, doing: reported.append(doing))
    assert costs.source == "macs"
    assert costs.builds == machine.built
    assert costs.passes == 3
    assert costs.noise > 0.1
    np.testing.assert_array_equal(costs.int8_ms, macs_costs(machine.grouping).int8_ms)
    assert costs.doubt.startswith("INT8 and float cannot be distinguished within a spread of ")
    assert costs.doubt.endswith(" %, measured 3 times")
    assert "multiply-accumulates" in reported[-1]


@pytest.mark.parametrize(("designs", "passes"), [(1.0, "once"), (1.6, "once"), (2.0, "2 times")])
def test_noise_is_measured_again_only_while_there_is_time(machine: Machine, designs: float, passes: str) -> None:
    """A pass that would not end in time is given up, and the one before counts."""
    builds = measure_costs(machine.grouping, machine.build, BATCH).builds
    machine.built, machine.random, machine.int8 = 0, np.random.default_rng(0), 1.0
    asked: list[float] = []

    def has_time(seconds: float) -> bool:
        if machine.built >= builds and machine.open < 2:
            asked.append(seconds)
        return machine.built < round(designs * builds) or machine.open == 2

    costs = measure_costs(machine.grouping, machine.build, BATCH, has_time=has_time)
    assert machine.built == round(designs * builds)
    assert costs.passes == int(designs)
    assert costs.doubt.endswith(f"measured {passes}, as the budget left no time for more")
    assert machine.open == 0
    assert min(asked) > 0.0


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("designs", "source"), [(0, "macs"), (1, "macs"), (2, "macs"), (-1, "measured")])
def test_a_first_pass_ends_in_time_and_counts_if_every_boundary_was_cut(
    machine: Machine, designs: int, source: str, raises: bool
) -> None:
    """Whether the time ends between two profiles or within a build."""
    whole = measure_costs(machine.grouping, machine.build, BATCH)
    most, machine.built = designs % whole.builds, 0

    def build(plan: PrecisionPlan) -> PlantedEngine:
        if raises and machine.built == most:
            raise OutOfTimeError
        return machine.build(plan)

    costs = measure_costs(
        machine.grouping, build, BATCH, has_time=lambda _: raises or machine.built < most or machine.open == 2
    )
    assert (costs.source, machine.open, machine.built) == (source, 0, most)
    if source == "macs":
        assert costs.doubt == "there was no time to measure"
        return
    assert (costs.passes, costs.builds) == (1, most)
    for labels in unseen(machine.grouping):
        known = whole.total_ms(machine.grouping, labels)
        assert costs.total_ms(machine.grouping, labels) == pytest.approx(known, rel=0.05)


def test_a_quiet_measurement_is_not_repeated(machine: Machine) -> None:
    machine.random, machine.noise = np.random.default_rng(0), 0.03
    costs = measure_costs(machine.grouping, machine.build, BATCH)
    assert (costs.source, costs.passes, costs.doubt) == ("measured", 1, "")
    assert not costs.by_macs.any()


def test_hardly_a_group_is_slower_in_int8_for_a_disturbance_alone() -> None:
    """INT8 saves 30 % everywhere; a group whose own saving is lost in the noise goes by the others'."""
    model, slower = straight_net(24), 0
    for seed in range(10):
        machine = Machine(fusion_groups(model, place(model)))
        machine.random, machine.noise, machine.int8 = np.random.default_rng(seed), 0.5, 0.7
        costs = measure_costs(machine.grouping, machine.build, BATCH)
        assert costs.source == "measured"
        assert costs.by_macs.any()
        slower += np.count_nonzero(costs.int8_ms >= costs.float_ms)
    assert slower <= 3  # of 240; 25 as each was measured


def test_groups_that_differ_are_not_all_taken_for_the_same() -> None:
    """Every other group takes half the time in INT8, the rest half as much again: more than the noise."""
    model = straight_net(24)
    machine = Machine(fusion_groups(model, place(model)))
    machine.random, machine.noise = np.random.default_rng(0), 0.3
    machine.int8 = np.tile([0.5, 1.5], 12)
    costs = measure_costs(machine.grouping, machine.build, BATCH)
    assert costs.by_macs.sum() > 6
    faster = costs.int8_ms < costs.float_ms
    assert np.count_nonzero(faster == (machine.int8 < 1.0)) >= 22


def test_groups_that_contradict_the_network_are_not_believed(machine: Machine) -> None:
    machine.decode_int8_ms = 90.0  # a cost of INT8 that no group has
    costs = measure_costs(machine.grouping, machine.build, BATCH)
    assert (costs.source, costs.passes) == ("macs", 3)
    expected = r"the groups in INT8 should take \d+ % less of the float engine's time, and the network \d+ % more, "
    assert re.fullmatch(expected + "measured 3 times", costs.doubt)


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_cancelled_measurement_closes_its_engines(machine: Machine, at: int) -> None:
    def progress(_fraction: float, _doing: str) -> None:
        if machine.built == at:
            raise Cancelled

    with pytest.raises(Cancelled):
        measure_costs(machine.grouping, machine.build, BATCH, progress)
    assert machine.open == 0


def test_an_engine_that_does_not_list_its_layers_is_closed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_engine: PlantedEngine) -> Mapping[str, tuple[str, ...]]:
        raise EngineError("engine.layers", "names only", "JSON", "build it again")

    monkeypatch.setattr(PlantedEngine, "layer_nodes", damaged)
    with pytest.raises(EngineError, match=r"engine\.layers"):
        measure_costs(machine.grouping, machine.build, BATCH)
    assert (machine.built, machine.open) == (1, 0)


def test_a_group_that_cannot_be_int8_costs_the_same_in_both() -> None:
    model = residual_net()
    machine = Machine(fusion_groups(model, place(model, PrecisionPlan({"Conv_t2": "no kernel"}))))
    costs = measure_costs(machine.grouping, machine.build, BATCH)
    assert costs.int8_ms[1] == costs.float_ms[1] == pytest.approx(10.0, rel=0.05)
    assert macs_costs(machine.grouping).int8_ms[1] == macs_costs(machine.grouping).float_ms[1]


def test_macs_without_a_measurement(machine: Machine) -> None:
    costs = macs_costs(machine.grouping)
    assert (costs.source, costs.builds) == ("macs", 0)
    np.testing.assert_allclose(costs.int8_ms, costs.float_ms / 2.0)
    assert costs.boundary_ms.tolist() == [edge[2] * 9.0 / 1e6 for edge in machine.grouping.edges]
    assert costs.float_ms[0] == 64 * 27 * 4 / 1e6


@pytest.mark.parametrize(
    ("nodes", "shares"),
    [
        (("Conv_t0", "Relu_t1", "t1.int8"), {0: 1.0}),  # the next layer's Q is fused into this one
        (("Conv_t0", "Conv_t2"), {0: 27 / 63, 1: 36 / 63}),  # by their multiply-accumulates
        (("t1.int8",), {1: 1.0}),  # there for the reader that is INT8, not for the other
        (("Flatten_t8",), {3: 1.0}),
        (("GlobalAveragePool_t7",), {}),
        ((), {}),
    ],
)
def test_the_time_of_a_layer_goes_to_its_groups(
    machine: Machine, nodes: tuple[str, ...], shares: dict[int, float]
) -> None:
    labels = np.array([True, True, False, True])
    assert layer_shares(machine.grouping, labels, nodes) == pytest.approx(shares)
