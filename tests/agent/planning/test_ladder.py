"""The plans that a job tries: which come first, what brings the next one, and what is said when none will do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from candidate_bench import saved_model
from raising_world import COLLAPSES, collapsing_net, count_macs, scene_of
from transformer_nets import ints
from turned_clock import TurnedClock
from zoo import Net, residual_net

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.models.model import Model
from agent.planning.costs import GroupCosts
from agent.planning.ladder import FindCosts, Ladder, LadderOptions, Scene
from agent.planning.what_if import RepairChoice
from calibrate.plan import PrecisionPlan, Repairs
from calibrate.repair import divided_ends, kept_amax
from engines.interface import Progress, silent
from engines.quantise.costs import HasTime, macs_costs
from engines.quantise.equalise import equalised_name
from engines.quantise.fusion import Grouping
from engines.registry import open_backend

OPTIONS = LadderOptions(max_loss=0.1, budget_s=60.0)
AS_IT_IS = PrecisionPlan(evidence={"by": "a person"})  # plain INT8, without repairs


def ladder_of(
    model: Model,
    start: PrecisionPlan | None = None,
    without_int8: Mapping[str, str] | None = None,
    options: LadderOptions = OPTIONS,
    scene: Scene | None = None,
    find_costs: FindCosts = count_macs,
    clock: Clock = SYSTEM_CLOCK,
) -> Ladder:
    runtime, scene, missing = open_backend("onnxruntime"), scene or scene_of(model), without_int8 or {}
    return Ladder(model, start or model.plan, scene, missing, runtime, options, silent, find_costs, clock=clock)


def channels_net() -> onnx.ModelProto:
    """Two channels of one tensor, a thousand apart, of which the quiet one decides: a repair saves it in INT8."""
    net = Net()
    loud = np.zeros((2, 3, 1, 1), np.float32)
    loud[0], loud[1] = 1000.0 / 3.0, 1.0 / 3.0
    pair = net.node("Relu", net.node("Conv", "image", net.constant(loud)))
    quiet = np.array([0.0, 1.0], np.float32).reshape(1, 2, 1, 1)
    level = net.node("Relu", net.node("Conv", pair, net.constant(quiet)))
    pooled = net.node("Flatten", net.node("GlobalAveragePool", level))
    bright = np.array([[0.0], [1.0], [0.0], [0.0], [0.0]], np.float32)
    bias = np.array([0.17, 0.0, -9.0, -9.0, -9.0], np.float32)
    return net.model(net.node("Gemm", pooled, net.constant(bright), net.constant(bias), transB=1))


def test_a_layer_that_a_repair_saves_stays_int8(tmp_path: Path) -> None:
    model = saved_model(tmp_path, channels_net())
    plain, found = ladder_of(model, AS_IT_IS), ladder_of(model)
    assert next(plain.plans(), None) is not None
    assert plain.findings.tried[0].loss == 0.5
    plan = next(found.plans())
    assert plan.floats == {}
    assert "Conv_t2" in plan.repairs.divisors
    assert [(each.loss, each.int8_macs_share) for each in found.findings.tried] == [(0.0, 1.0)]
    assert plan.evidence["repairs_tried"]["divisors"]["kept"]
    (tried,) = plan.evidence["candidates"]
    assert (tried["plan"], tried["int8_macs_share"], tried["predicted_loss"]) == ("all that may be INT8", 1.0, 0.0)


def attending_net() -> onnx.ModelProto:
    """Says class 1 of a bright image, by attention over four tokens whose values cancel but for the brightness."""
    net = Net()
    spread = net.node("Conv", "image", net.constant(np.full((64, 3, 1, 1), 1.0 / 3.0, np.float32)))
    level = net.node("Conv", spread, net.constant(np.full((1, 64, 4, 4), 1.0 / 1024.0, np.float32)), strides=[4, 4])
    tokens = net.node("Transpose", net.node("Reshape", level, ints(net, 1, 1, 4)), perm=[0, 2, 1])
    query, key = (net.node("MatMul", tokens, net.constant(np.full((1, 2), 0.1, np.float32))) for _ in range(2))
    logits = net.node("MatMul", query, net.node("Transpose", key, perm=[0, 2, 1]))
    loud = np.array([[[0.0, 200.0], [0.0, -200.0], [0.0, 200.0], [0.0, -200.0]]], np.float32)
    value = net.node("MatMul", tokens, net.constant(np.array([[1.0, 0.0]], np.float32)))
    mixed = net.node("MatMul", net.node("Softmax", logits, axis=-1), net.node("Add", value, net.constant(loud)))
    bright = np.array([[0.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 5], np.float32)
    bias = np.array([0.17, 0.0, -9.0, -9.0, -9.0], np.float32)
    taken = net.node("Add", net.node("MatMul", mixed, net.constant(bright)), net.constant(bias))
    return net.model(net.node("ReduceMean", taken, axes=[1], keepdims=0))


def test_the_product_of_attention_that_loses_the_answers_is_found(tmp_path: Path) -> None:
    found = ladder_of(saved_model(tmp_path, attending_net()), AS_IT_IS)
    plan = next(found.plans())
    assert found.findings.tried[0].loss >= 0.4
    assert "MatMul_t11" in plan.floats
    assert not {"Conv_t0", "Conv_t1"} & plan.floats.keys()
    groups = {group["name"]: group["sensitivity"] for group in plan.evidence["groups"]}
    assert max(groups, key=groups.__getitem__) == "MatMul_t11"
    assert found.findings.tried[-1].loss == 0.0


def masking_net() -> onnx.ModelProto:
    """A mask whose left half is far from the threshold, with much noise, and whose right half is near it, with little.

    Near it is "Conv_t5", which reads a tensor of two channels that are a hundred apart.
    """
    net = Net()
    level = net.node("Conv", "image", net.constant(np.full((1, 3, 1, 1), 1.0 / 3.0, np.float32)))
    steep = net.node("Conv", level, net.constant(np.full((1, 1, 1, 1), 1000.0, np.float32)))
    sign = np.where(np.indices((8, 8)).sum(axis=0) % 2, 3000.0, -3000.0).astype(np.float32)
    far = net.node("Add", steep, net.constant(sign[np.newaxis, np.newaxis]))
    loud = net.node("Mul", level, net.constant(np.array(100.0, np.float32)))
    pair = net.node("Concat", level, loud, axis=1)
    near = net.node("Conv", pair, net.constant(np.array([1.0, 0.0], np.float32).reshape(1, 2, 1, 1)))
    ends = [net.constant(np.array([value], np.int64)) for value in (0, 4, 8, 3)]
    left, right = net.node("Slice", far, ends[0], ends[1], ends[3]), net.node("Slice", near, ends[1], ends[2], ends[3])
    return net.model(net.node("Concat", left, right, axis=3))


def test_a_search_for_masks_finds_the_layer_that_changes_pixels(tmp_path: Path) -> None:
    spec = {"task": "segment", "labels": ["bright"], "score_threshold": 0.12}
    found = ladder_of(saved_model(tmp_path, masking_net(), **spec), AS_IT_IS)
    for _ in found.plans():
        found.note("refused by the test")
    groups = {group["name"]: group["sensitivity"] for group in found.report(AS_IT_IS)["groups"]}
    assert groups["Conv_t1"] < 0.01 * groups["Conv_t5"]


@pytest.mark.parametrize(("gemm_nsr", "floats"), [(0.002, {"Gemm_t9"}), (0.0005, set())])
def test_a_layer_that_is_loud_and_hardly_works_stays_float(
    gemm_nsr: float, floats: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsr = {"Conv_t2": 0.3, "Gemm_t9": gemm_nsr}  # one does two fifths of the work, the other a hundredth
    chosen = RepairChoice(Repairs(), nsr, {}, {})
    monkeypatch.setattr("agent.planning.ladder.choose_repairs", lambda *_: chosen)
    found = ladder_of(saved_model(tmp_path, residual_net()))
    plan = next(found.plans())
    assert plan.floats.keys() == floats
    assert found.findings.tried[0].name == ("all INT8 but the loudest" if floats else "plain INT8")
    assert all("27 dB below" in reason for reason in plan.floats.values())


def test_a_layer_that_no_repair_saves_is_left_float_and_the_others_are_not(tmp_path: Path) -> None:
    found = ladder_of(saved_model(tmp_path, collapsing_net(7)))
    (plan,) = found.plans()  # all INT8 loses too much on the frames that try plans, and is not even built
    assert "Conv_t0" not in plan.floats
    assert plan.floats[COLLAPSES].endswith("and makes 100 % of the noise")
    assert [each.loss for each in found.findings.tried] == [0.5, 0.0]
    loudest = max(plan.evidence["groups"], key=lambda group: group["sensitivity"])
    assert (loudest["name"], loudest["measured"]) == (COLLAPSES, True)


def test_a_plan_that_suits_brings_others_only_once_its_engine_is_refused(tmp_path: Path) -> None:
    model = saved_model(tmp_path, collapsing_net(7))
    found = ladder_of(model, options=LadderOptions(max_loss=0.6, budget_s=60.0))
    plans = found.plans()
    first = next(plans)
    assert (first.floats, len(found.findings.tried)) == ({}, 1)
    found.note("refused on its frames")
    second = next(plans)
    assert COLLAPSES in second.floats
    assert second.evidence["candidates"][0]["outcome"] == "refused on its frames"


def test_plans_go_by_the_costs_of_the_runtime_once_they_are_searched(tmp_path: Path) -> None:
    """By multiply-accumulates a plan with the first layer in INT8 is faster; here that layer is slower in INT8."""
    model, asked = saved_model(tmp_path, collapsing_net(7)), list[bool]()

    def slow_first(grouping: Grouping, _repairs: Repairs, _progress: Progress, has_time: HasTime) -> GroupCosts:
        asked.extend((has_time(15.0), has_time(31.0)))
        costs = macs_costs(grouping)
        slower = np.array([group.name == "Conv_t0" for group in grouping.groups])
        int8_ms = np.where(slower, 1.5 * costs.float_ms, costs.int8_ms / 100.0)
        free = np.zeros_like(costs.boundary_ms)
        return GroupCosts(replace(costs, int8_ms=int8_ms, boundary_ms=free), "", "a board", kept=True)

    found = ladder_of(model, find_costs=slow_first)
    plans = found.plans()
    assert "Conv_t0" in next(plans).floats
    assert asked == [True, False]  # half of the budget that is left
    costs = found.report(AS_IT_IS)["costs"]
    assert (costs["source"], costs["why"], costs["on"], costs["kept"]) == ("measured", "", "a board", True)
    counted = ladder_of(model)
    assert "Conv_t0" not in next(counted.plans()).floats
    assert counted.report(AS_IT_IS)["costs"]["source"] == "macs"


@pytest.mark.parametrize("is_too_loud", [True, False])
def test_plans_after_one_that_lost_too_much_are_quieter(is_too_loud: bool, tmp_path: Path) -> None:
    """Where its engine was refused for being slow, a louder plan may be the faster one."""
    model = saved_model(tmp_path, collapsing_net(7))
    start = PrecisionPlan({COLLAPSES: "as a job before left it"}, evidence={"by": "job"})

    def slow_in_float(grouping: Grouping, *_: object) -> GroupCosts:
        costs = macs_costs(grouping)
        float_ms = np.where([group.name == COLLAPSES for group in grouping.groups], 100.0, costs.float_ms)
        return GroupCosts(replace(costs, float_ms=float_ms), "", "a board")

    options = LadderOptions(max_loss=0.6, budget_s=60.0)
    found = ladder_of(model, start, options=options, find_costs=slow_in_float)
    plans = found.plans()
    next(plans)
    found.note("refused", is_too_loud)
    second = next(plans, None)
    assert (second is not None and COLLAPSES not in second.floats) is not is_too_loud


def test_no_costs_are_found_where_the_first_plan_suits(tmp_path: Path) -> None:
    def never(*_: object) -> GroupCosts:
        raise AssertionError

    found = ladder_of(saved_model(tmp_path, channels_net()), find_costs=never)
    assert next(found.plans()).evidence["costs"]["why"] == "no other costs were needed"


def test_time_in_which_its_clock_stands_still_is_not_spent(tmp_path: Path) -> None:
    """As that of a child process does, which is stopped while the board is too hot."""
    model, options = saved_model(tmp_path, collapsing_net(7)), LadderOptions(max_loss=0.1, budget_s=1e-6)
    for clock, is_measured in ((TurnedClock(), True), (SYSTEM_CLOCK, False)):
        plans = list(ladder_of(model, options=options, clock=clock).plans())
        assert any(group["measured"] for group in plans[-1].evidence["groups"]) is is_measured
        assert plans[-1].evidence["sensed"] is is_measured


def test_forced_int8_is_named_when_no_plan_will_do(tmp_path: Path) -> None:
    found = ladder_of(saved_model(tmp_path, collapsing_net(7), precision={"force_int8": [COLLAPSES]}))
    refused = AgentError("recalibration.refused", "loss 0.5", "less", "none")
    for plan in found.plans():
        assert COLLAPSES not in plan.floats
        found.note("loss 0.5 on its frames")
    error = found.refusal(refused)
    assert error.code == "recalibration.refused"
    assert "all that may be INT8: loss 0.5 on its frames" in error.found
    assert f"'{COLLAPSES}' (100 %)" in error.remedy
    assert "recalibration.max_loss" in error.remedy


def test_layers_without_a_kernel_or_kept_float_are_never_int8(tmp_path: Path) -> None:
    model = saved_model(tmp_path, collapsing_net(7), precision={"keep_float": ["Gemm"]})
    found = ladder_of(model, without_int8={COLLAPSES: "no kernel"})
    plan = next(found.plans())
    assert "Gemm_t7" in plan.floats
    assert (found.findings.tried[0].loss, found.findings.tried[0].int8_macs_share < 1.0) == (0.0, True)


def test_the_plan_of_the_job_before_comes_first_with_ranges_of_todays_calibration(tmp_path: Path) -> None:
    model = saved_model(tmp_path, channels_net())
    earlier = next(ladder_of(model).plans())
    tensor = equalised_name("Conv_t2")
    older = Repairs.from_dict({**earlier.repairs.as_dict(), "ranges": {tensor: 1e6}, "reach": {}})
    stale = Repairs.from_dict({**earlier.repairs.as_dict(), "ranges": {tensor: 1e6}})
    for repairs in (stale, older):  # of this tared, and of the one before
        found = ladder_of(model, PrecisionPlan(earlier.floats, repairs, earlier.evidence))
        again = next(found.plans())
        assert found.findings.choice is None
        assert again.repairs.divisors == earlier.repairs.divisors
        assert again.repairs.ranges[tensor] < 1e3
        assert found.findings.tried[0].loss == 0.0


def test_ranges_are_those_of_the_whole_calibration_whatever_the_sample_shows(tmp_path: Path) -> None:
    model = saved_model(tmp_path, channels_net())
    scene = scene_of(model, brighter=4.0)
    plan = next(ladder_of(model, scene=scene).plans())
    tensor, divisors = equalised_name("Conv_t2"), plan.repairs.divisors["Conv_t2"]
    offsets, reach = plan.repairs.offsets.get("Conv_t2"), plan.repairs.reach[tensor]
    ends = divided_ends(scene.calibration.extremes["Conv_t2"], divisors, 0.0 if offsets is None else offsets)
    assert plan.repairs.ranges[tensor] == pytest.approx(kept_amax(ends, reach, offsets is not None), rel=0.01)
    assert plan.repairs.ranges[tensor] > 2.0 * next(ladder_of(model).plans()).repairs.ranges[tensor]


def test_a_fleets_calibration_is_tried_with_the_ranges_of_the_plan_in_service(tmp_path: Path) -> None:
    """It has no extremes, and ranges of the board's own frames would hide a bad one."""
    model = saved_model(tmp_path, channels_net())
    earlier, scene = next(ladder_of(model).plans()), scene_of(model, brighter=4.0)
    merged = replace(scene, calibration=replace(scene.calibration, extremes={}, merged={"boards": 2}))
    assert ladder_of(model, earlier, scene=merged).start == earlier
    assert ladder_of(model, earlier, scene=scene).start != earlier


def test_a_plan_of_the_owners_search_is_tried_as_it_is_and_one_by_hand_with_repairs(tmp_path: Path) -> None:
    by_hand = PrecisionPlan({"Gemm_t6": "by hand"})
    model = saved_model(tmp_path, channels_net()).with_plan(by_hand)
    searched = PrecisionPlan(by_hand.floats, evidence={"verdict": "certified"})
    as_it_is, repaired = ladder_of(model, searched, options=LadderOptions(0.6, 0.0)), ladder_of(model)
    assert next(as_it_is.plans()) is searched
    plan = next(repaired.plans())
    assert (dict(plan.floats), bool(plan.repairs)) == (dict(by_hand.floats), True)
