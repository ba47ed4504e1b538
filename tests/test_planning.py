"""The search for a plan in this process: what it finds, what it does with little time, and how it goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plan_world import LOUD, MACS, QUIET, journal, plan_world, planner
from zoo import Net

import agent.planning.search as search
from agent.errors import AgentError
from agent.planning.candidates import choose_candidates, ladder
from agent.planning.certificate import Certifier
from agent.planning.figures import Evidence
from agent.planning.found import PlanOptions
from agent.planning.journal import Journal
from agent.planning.result import planned
from agent.planning.trial import MAX_CANDIDATES
from agent.planning.what_if import Answer, WhatIf
from calibrate.cut import Partition
from calibrate.plan import PrecisionPlan


@pytest.fixture(scope="module", name="stock")
def stock_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_world(tmp_path_factory.mktemp("plans") / "world")


@pytest.fixture
def world(stock: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stock, tmp_path / "world"))


def search_in(world: Path, options: PlanOptions = MACS) -> tuple[PrecisionPlan, Evidence]:
    found = planner(world, options)
    found.run(journal(world))
    plan = planned(found)
    return plan, plan.evidence


def by_name(evidence: Evidence) -> dict[str, Any]:
    return {group["name"]: group for group in evidence["groups"]}


def partition(noise: float, time: float, int8: int = 1) -> Partition:
    return Partition(np.arange(4) < int8, time, noise)


def rungs(front: list[tuple[float, float]], tolerance: float) -> list[float]:
    """The noise of each, from (noise, time)."""
    return [plan.noise for plan in ladder([partition(*plan) for plan in front], tolerance)]


def test_the_ladder_takes_the_quietest_of_those_as_fast_and_halves_the_noise() -> None:
    front = [(8.0, 1.0), (7.0, 1.01), (4.0, 1.5), (3.0, 1.52), (1.4, 1.9), (0.1, 2.5)]
    assert rungs(front, 0.0) == [8.0, 4.0, 1.4, 0.1]
    assert rungs(front, 0.05) == [7.0, 3.0, 1.4, 0.1]


def test_the_ladder_ends_at_a_plan_without_noise() -> None:
    assert rungs([(1.0, 1.0), (0.0, 2.0)], 0.0) == [1.0, 0.0]
    assert rungs([(0.0, 1.0)], 0.0) == [0.0]


def test_a_plan_without_int8_is_no_rung() -> None:
    assert ladder([partition(0.0, 1.0, 0)], 0.0) == []


def test_a_plan_that_loses_too_much_on_the_search_frames_is_no_candidate() -> None:
    losses = iter([0.3, 0.05, 0.1, 0.0])
    plans = [partition(1.0, float(n)) for n in range(4)]
    candidates, tried = choose_candidates(plans, lambda _: Answer(0.0, next(losses), 8), 0.1, 2)
    assert [each.partition.time for each in candidates] == [1.0, 2.0]
    assert [each.partition.time for each in tried] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("loss", "first"), [(0.02, 0.0), (0.03, 1.0)])
def test_the_fastest_plan_goes_first_where_it_hardly_loses(loss: float, first: float) -> None:
    quicker, quieter = partition(2.0, 0.0), partition(1.0, 1.0)
    losses = iter([loss, 0.0])
    candidates, tried = choose_candidates([quieter], lambda _: Answer(0.0, next(losses), 8), 0.1, 5, fastest=quicker)
    assert candidates[0].partition.time == first
    assert len(tried) == 2


def test_the_branch_that_bears_no_int8_stays_float(world: Path) -> None:
    plan, evidence = search_in(world)
    groups = by_name(evidence)
    assert set(plan.floats) == {LOUD}
    assert {name: group["precision"] for name, group in groups.items()} == {LOUD: "float", QUIET: "int8"}
    assert groups[LOUD]["sensitivity"] > 100.0 * groups[QUIET]["sensitivity"] > 0.0
    assert groups[LOUD]["restored"] == pytest.approx(groups[LOUD]["sensitivity"], rel=0.2)
    assert all(group["measured"] for group in groups.values())
    assert plan.floats[LOUD] == groups[LOUD]["why"]
    assert "makes 99.9 % of the noise" in groups[LOUD]["why"]
    accepted = evidence["candidates"][evidence["accepted"]]
    assert accepted["trial"]["accepted"]
    assert accepted["trial"]["upper"] <= MACS.max_loss
    bound = accepted["trial"]["upper"]
    assert evidence["verdict"].startswith(f"Certified: a loss of at most {bound:.3g}, where 0.2 is accepted.")


def test_repairs_are_kept_where_they_measure_better_and_only_for_int8(world: Path) -> None:
    plan, evidence = search_in(world)
    assert evidence["repairs"]
    for tried in evidence["repairs"].values():
        assert tried["kept"] == (tried["divergence"] < tried["without"])
    assert any(tried["kept"] for tried in evidence["repairs"].values())
    assert set(plan.repairs.divisors) | set(plan.repairs.shifts) == {QUIET}


def chain(layers: int) -> Net:
    net = Net()
    x = "image"
    for number in range(layers):
        kernel = net.rng.normal(0.0, 0.25, (4, 3 if number == 0 else 4, 3, 3)).astype(np.float32)
        x = net.node("Relu", net.node("Conv", x, net.constant(kernel), net.weight(4), pads=[1, 1, 1, 1]))
    net.nodes[-1].output[0] = "out"
    return net


def test_most_groups_of_a_long_net_need_no_run_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_RUNS", 18)
    world = plan_world(tmp_path / "world", chain(24).model("out"), frames=60, min_sqnr_db=1.0)
    _, evidence = search_in(world, replace(MACS, max_loss=0.5))
    groups = evidence["groups"]
    measured = [group for group in groups if group["measured"]]
    assert len(groups) == 24
    assert 0 < len(measured) < 16
    assert all(group["sensitivity"] > 0.0 for group in groups)
    assert sum(group["restored"] is not None for group in groups) == search._RESTORED


def test_the_owners_rules_are_kept(world: Path) -> None:
    text = (world / "model.yaml").read_text()
    (world / "model.yaml").write_text(text + f"precision: {{keep_float: [{QUIET}]}}\n")
    plan, evidence = search_in(world)
    assert set(plan.floats) == {LOUD, QUIET}
    assert plan.floats[QUIET] == by_name(evidence)[QUIET]["rule"] == f"keep_float: {QUIET}"
    assert evidence["accepted"] is None
    assert evidence["verdict"].startswith("All float: every plan with INT8 in it lost more than 0.2 on the search fra")


def test_what_must_be_int8_and_cannot_be_certified_is_said(world: Path) -> None:
    text = (world / "model.yaml").read_text()
    (world / "model.yaml").write_text(text + f"precision: {{force_int8: [{LOUD}]}}\n")
    plan, evidence = search_in(world)
    assert set(plan.floats) == {LOUD, QUIET}
    assert evidence["verdict"].endswith("So precision.force_int8 is not kept.")


def test_what_must_be_int8_is_in_every_plan(world: Path) -> None:
    text = (world / "model.yaml").read_text()
    (world / "model.yaml").write_text(text.replace("65.0", "30.0") + f"precision: {{force_int8: [{LOUD}]}}\n")
    _, evidence = search_in(world)
    assert by_name(evidence)[LOUD]["why"] == f"force_int8: {LOUD}"
    assert by_name(evidence)[LOUD]["precision"] == "int8"
    assert all(plan["int8_macs_share"] >= 0.5 for plan in evidence["frontier"])


def test_where_all_is_float_by_rule_nothing_is_searched(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (world / "model.yaml").read_text()
    (world / "model.yaml").write_text(text + "precision: {keep_float: [Conv]}\n")
    monkeypatch.setattr(WhatIf, "ask", None)
    plan, evidence = search_in(world, replace(MACS, max_loss=0.001))  # for which there are not frames enough
    assert set(plan.floats) == {LOUD, QUIET}
    assert evidence["verdict"] == "All float: no layer may be INT8 (precision.keep_float)."
    assert evidence["frames"] == {"search": 0, "certificate": 0}


def test_frames_are_shared_between_search_and_certificate(world: Path) -> None:
    split = planner(world).split
    assert (split.search, split.certificate, split.terms.candidates) == (24, 96, MAX_CANDIDATES)
    needed = split.terms.needed
    assert f"certified after {needed} with something on them" in split.told
    fewer = planner(world, replace(MACS, max_loss=0.045)).split  # 5 candidates would take more than there are
    assert 1 <= fewer.terms.candidates < MAX_CANDIDATES
    with pytest.raises(AgentError) as refused:
        _ = planner(world, replace(MACS, max_loss=0.01)).split
    assert refused.value.code == "plan.frames"


class Clock:
    """A second passes whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(search, "time", found)
    return found


def test_no_budget_at_all_is_said_and_leaves_all_float(world: Path) -> None:
    plan, evidence = search_in(world, replace(MACS, budget_s=0.0))
    assert set(plan.floats) == {LOUD, QUIET}
    assert evidence["interrupted"] == "budget"
    assert evidence["verdict"] == "All float: the time was up before a plan with INT8 in it was certified."
    assert (evidence["builds"], evidence["candidates"], evidence["groups"][0]["measured"]) == (0, [], False)


def test_wherever_the_budget_ends_the_plan_is_certified_or_float(world: Path, clock: Clock) -> None:
    _, everything = search_in(world, replace(MACS, budget_s=1e9))
    whole = int(clock.now)
    ends = set()
    for budget in range(1, whole + 10, whole // 8):
        clock.now = 0.0
        (world / "plan.json.journal").unlink(missing_ok=True)
        plan, evidence = search_in(world, replace(MACS, budget_s=float(budget)))
        assert clock.now <= budget + 8.0
        ends.add((evidence["interrupted"], evidence["accepted"] is not None))
        if evidence["accepted"] is None:
            assert set(plan.floats) == {LOUD, QUIET}
        else:
            assert set(plan.floats) == {LOUD}
    assert {("budget", False), ("", True)} <= ends <= {("budget", False), ("budget", True), ("", True)}
    assert everything["accepted"] is not None


def test_what_is_not_sensed_in_half_the_budget_is_predicted(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.Planner, "out_of_time", lambda _, share=1.0: share < 1.0)
    plan, evidence = search_in(world)
    assert evidence["interrupted"] == "budget"
    assert not any(group["measured"] for group in evidence["groups"])
    assert all(group["sensitivity"] > 0.0 for group in evidence["groups"])
    # Noise to signal at the layers' outputs hardly tells the branches apart; the certificate does.
    assert set(plan.floats) == ({LOUD, QUIET} if evidence["accepted"] is None else {LOUD})


class Work:
    """Counts what a search asks of the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.measured = 0
        for owner, name, counter in ((WhatIf, "ask", "asked"), (Certifier, "_measure", "measured")):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name), counter))

    def _counting(self, wrapped: Callable[..., Any], counter: str) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            found = wrapped(*arguments)
            setattr(self, counter, getattr(self, counter) + 1)
            return found

        return counted


def test_wherever_it_is_interrupted_it_goes_on_to_the_same_plan(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    plan, _ = search_in(world)
    asked, measured = work.asked, work.measured
    assert asked > 5
    assert measured > 10
    put = Journal.put
    for last in range(0, asked + measured, 6):
        (world / "plan.json.journal").unlink()
        left = last

        def torn(self: Journal, key: str, value: Any) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            put(self, key, value)

        work.asked = work.measured = 0
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "put", torn)
            with pytest.raises(KeyboardInterrupt):
                search_in(world)
        again, _ = search_in(world)
        assert again.essence == plan.essence
        assert work.asked + work.measured == asked + measured + 1  # the one that was not written


def test_a_torn_journal_is_measured_again_from_there(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = search_in(world)
    kept = world / "plan.json.journal"
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join(lines[:12]) + lines[12][:-4])
    work = Work(monkeypatch)
    again, _ = search_in(world)
    assert again.essence == plan.essence
    assert work.asked + work.measured == len(lines) - 12
    assert journal(world).size == len(lines) - 1


def test_frames_on_which_nothing_is_found_certify_nothing(tmp_path: Path) -> None:
    """A detector whose scores are far below its threshold, whatever it is shown."""
    net = Net((1, 3, 8, 8))
    net.conv("image", 3, 6)
    boxes = net.node("Reshape", "t0", net.constant(np.array([1, 6, 64], np.int64)))
    scaled = net.node("Mul", boxes, net.constant(np.array(1e-4, np.float32)))
    world = plan_world(
        tmp_path / "world", net.model(scaled), task="detect", decoder="yolov8", labels=["a", "b"], score_threshold=0.5
    )
    plan, evidence = search_in(world)
    assert plan.floats
    assert evidence["accepted"] is None
    trials = [candidate["trial"] for candidate in evidence["candidates"]]
    assert {trial["frames"] for trial in trials} == {0}
    assert "nothing found on any of" in evidence["verdict"]


def test_an_image_size_that_is_left_open(tmp_path: Path) -> None:
    from plan_world import two_branches

    open_shape = two_branches((1, 3, "height", "width"))
    profile = {name: [1, 3, size, size] for name, size in (("min", 8), ("opt", 12), ("max", 16))}
    world = plan_world(tmp_path / "world", open_shape, profiles=[{"image": profile}])
    plan, evidence = search_in(world)
    assert set(plan.floats) == {LOUD}
    assert evidence["groups"][0]["macs_share"] == pytest.approx(0.5)


def several_outputs() -> Any:
    net = Net((1, 3, 8, 8))
    stem = net.node("Relu", net.conv("image", 3, 8))
    return net.model(net.conv(stem, 8, 4), net.node("Sigmoid", net.conv(stem, 8, 4)))


def test_several_outputs_are_all_looked_at(tmp_path: Path) -> None:
    world = plan_world(tmp_path / "world", several_outputs(), min_sqnr_db=20.0)
    _, evidence = search_in(world)
    assert evidence["accepted"] is not None
    assert all(group["sensitivity"] > 0.0 for group in evidence["groups"])


def test_equal_searches_give_equal_plans(world: Path) -> None:
    first, _ = search_in(world)
    (world / "plan.json.journal").unlink()
    second, _ = search_in(world)
    assert first.essence == second.essence
    assert threading.active_count() == 1


def test_fast_enough_is_more_than_chance(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import agent.planning.certificate as certificate

    def timed(ratio: float) -> Evidence:
        (world / "plan.json.journal").unlink(missing_ok=True)
        infer = certificate._infer_timed

        def told(engine: Any, tensor: NDArray[np.float32]) -> Any:
            outputs, _ = infer(engine, tensor)
            return outputs, 10.0 * ratio if engine is not float_engines[-1] else 10.0

        with monkeypatch.context() as patch:
            float_engines: list[Any] = []
            load_float = search.Builder.load_float

            def remembered(*arguments: Any) -> Any:
                float_engines.append(load_float(*arguments))
                return float_engines[-1]

            patch.setattr(search.Builder, "load_float", remembered)
            patch.setattr(certificate, "_infer_timed", told)
            return search_in(world)[1]

    half, same = timed(0.5), timed(0.99)
    assert (half["faster"], half["latency_ms"], half["latency_float_ms"]) == (True, 5.0, 10.0)
    assert half["verdict"].endswith("5 ms against 10 ms in float.")
    assert not same["faster"]
    assert same["verdict"].endswith(
        "INT8 is not faster on this machine, 9.9 ms against 10 ms in float: serve float here."
    )
