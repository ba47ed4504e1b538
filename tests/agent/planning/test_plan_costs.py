"""Costs that plans go by: measured, or estimated with a reason; engines under plans; runtimes without some kernels."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt import FakeTensorRt
from plan_world import LOUD, MACS, QUIET, journal, plan_world, planner

import agent.planning.costs as costs
from agent.planning.costs import GroupCosts, PlanBuilder, find_costs, labels
from agent.planning.search import PlanSearch
from agent.reports.plan import show_costs
from calibrate.partition import FLOAT, FREE, INT8
from calibrate.plan import Repairs
from engines.errors import EngineError
from engines.interface import BackendOptions, silent
from engines.onnxruntime_backend import OnnxRuntimeEngine
from engines.quantise.costs import Costs, macs_costs
from engines.quantise.fusion import FusionGroup, Grouping
from engines.registry import open_backend
from engines.trt.backend import TensorRtBackend


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return plan_world(tmp_path / "world")


@pytest.fixture
def builder(world: Path) -> PlanBuilder:
    return planner(world).builder


def test_an_engine_is_built_once_whatever_the_reasons(builder: PlanBuilder) -> None:
    for reason in ("one", "another"):
        with closing(builder.load({LOUD: reason})) as engine:
            assert engine.inputs[0].name == "image"
    assert builder.builds == 1
    for _ in range(2):
        builder.load_float().close()
    assert builder.builds == 2
    builder.load({QUIET: ""}).close()
    builder.repairs = Repairs(shifts={LOUD: (0.0,) * 8})
    builder.load({QUIET: ""}).close()
    assert builder.builds == 4


def group(*layers: str, fixed: str = "") -> FusionGroup:
    return FusionGroup(layers[0], layers, layers, 2, fixed)


GROUPS = Grouping((group("a"), group("b", "c"), group("d", fixed="odd")), ((0, 1, 4), (1, 2, 4)), {}, {})


def test_labels_follow_nature_then_float_then_force() -> None:
    assert labels(GROUPS, {}, {}).tolist() == [FREE, FREE, FLOAT]
    assert labels(GROUPS, {}, {"a": "", "c": "", "d": ""}).tolist() == [INT8, INT8, FLOAT]
    assert labels(GROUPS, {"b": ""}, {"c": ""}).tolist() == [FREE, FLOAT, FLOAT]


def measured(int8: list[float], in_float: list[float], boundary: list[float], **changes: Any) -> Costs:
    found = Costs(
        np.array(int8), np.array(in_float), np.array(boundary), 1.0, 0.02, 0.1, 8, "measured", np.zeros(3, np.bool_), 1
    )
    return replace(found, **changes)


def found_costs(
    builder: PlanBuilder, folder: Path, monkeypatch: pytest.MonkeyPatch, found: Costs, source: str = "measured"
) -> GroupCosts:
    monkeypatch.setattr(costs, "measure_costs", lambda *_, **__: found)
    batch, remember = np.zeros(1, np.float32), journal(folder).get_or_compute
    return find_costs(GROUPS, {}, builder, batch, remember, silent, source)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (replace(macs_costs(GROUPS), doubt="cannot be distinguished"), "cannot be distinguished"),
        (
            measured([4.0, 4.0, 3.0], [2.0, 2.0, 3.0], [0.1, 0.1]),
            "INT8 is not faster on this machine: 12.1 ms all INT8",
        ),
        (measured([1.9, 1.9, 3.0], [2.0, 2.0, 3.0], [1.0, 1.0]), "INT8 is not faster on this machine"),
    ],
    ids=["noise", "slower", "boundaries"],
)
def test_costs_that_speak_against_int8_are_not_gone_by(
    builder: PlanBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Costs, why: str
) -> None:
    taken = found_costs(builder, tmp_path, monkeypatch, found)
    assert taken.why.startswith(why)
    assert (taken.costs.source, taken.tolerance) == ("macs", 0.05)


def test_costs_by_macs_measure_nothing(builder: PlanBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = found_costs(builder, tmp_path, monkeypatch, measured([], [], []), "macs")
    assert (reported.why, reported.costs.int8_ms.tolist()) == ("asked for", [1e-6, 1e-6, 2e-6])
    assert builder.builds == 0


class Busy:
    """A profiler's times on a busy machine: INT8 halves each, and a disturbance of some profiles in a row hides it."""

    def __init__(self, spread: float) -> None:
        self.rng, self.spread = np.random.default_rng(2), spread
        self.burst: dict[str, float] = {}

    def times_ms(self, engine: OnnxRuntimeEngine) -> dict[str, float]:
        if self.rng.random() < 0.3:
            self.burst = {}
        int8 = any("int8" in node for nodes in engine.layer_nodes().values() for node in nodes)
        times = {}
        for layer in engine.layer_nodes():
            self.burst.setdefault(layer, self.rng.lognormal(0.0, self.spread))
            times[layer] = (0.5 if int8 else 1.0) * self.burst[layer] * self.rng.lognormal(0.0, self.spread)
        return times


def test_a_busy_machine_does_not_make_a_plan_float(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured again, and then multiply-accumulates count; plan.json, table and --json report that."""
    busy = Busy(1.5)
    monkeypatch.setattr(OnnxRuntimeEngine, "layer_times_ms", lambda engine, _batch, _runs: busy.times_ms(engine))
    found = planner(world, replace(MACS, costs="measured"), open_backend("onnxruntime"))
    found.run(journal(world))
    plan = found.plan()
    costs = plan.evidence["costs"]
    assert (costs["source"], costs["passes"]) == ("macs", 3)
    assert costs["why"].endswith("measured 3 times")
    assert set(plan.floats) == {LOUD}
    assert show_costs(plan.evidence) == f"estimated from multiply-accumulates: {costs['why']}"


def test_layers_without_int8_kernels_stay_float_and_are_remembered(world: Path, fake: FakeTensorRt) -> None:
    fake.without_int8 = {LOUD}
    backend = open_backend("tensorrt", BackendOptions(1))
    found = planner(world, replace(MACS, costs="measured"), backend)
    found.run(journal(world))
    plan = found.plan()
    groups = {group["name"]: group for group in plan.evidence["groups"]}
    assert set(plan.floats) >= {LOUD}
    assert "INT8" in plan.floats[LOUD]
    assert plan.floats[LOUD] == groups[LOUD]["why"]
    assert groups[LOUD]["precision"] == "float"
    assert found.builder.builds <= 13 + 1  # one more, to learn of the layer
    again = planner(world, replace(MACS, costs="measured"), open_backend("tensorrt", BackendOptions(1)))
    again.run(journal(world))
    assert again.plan().essence == plan.essence
    assert again.builder.builds < found.builder.builds


def test_a_build_ends_with_the_budget(world: Path, fake: FakeTensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is going on: on a board it takes minutes."""
    started = 0
    build = TensorRtBackend.build

    def counted(*arguments: Any) -> Any:
        nonlocal started
        started += 1
        return build(*arguments)

    monkeypatch.setattr(TensorRtBackend, "build", counted)
    monkeypatch.setattr(PlanSearch, "out_of_time", lambda *_: started == 3)
    found = planner(world, replace(MACS, costs="measured"), open_backend("tensorrt", BackendOptions(1)))
    found.run(journal(world))
    assert (found.interrupted, found.ladder.findings.found_costs) == ("budget", None)
    assert (started, found.builder.builds) == (3, 2)
    assert fake.without_int8 == set()


def test_a_runtime_that_cannot_do_without_a_kernel_is_refused(
    world: Path, fake: FakeTensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = planner(world, backend=open_backend("tensorrt", BackendOptions(1))).builder
    fake.without_int8 = {LOUD}
    builder.without_int8 = {LOUD: "known"}
    lacking: Mapping[str, str] = {LOUD: "again"}
    build = builder.backend.build

    def stubborn(*arguments: Any) -> Any:
        return replace(build(*arguments), without_int8=lacking)

    monkeypatch.setattr(builder.backend, "build", stubborn)
    with pytest.raises(EngineError) as refused:
        builder.load({})
    assert refused.value.code == "engine.int8"
