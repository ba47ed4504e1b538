"""`tared plan` for models that bring INT8 of their own: it plans the rest, if there is any."""

from __future__ import annotations

import onnx
from onnx import ModelProto
from plan_bench import Place
from zoo import by_name, residual_net

from calibrate.plan import PrecisionPlan
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.placement import place


def quantised(plan: PrecisionPlan) -> ModelProto:
    master = residual_net()
    placement = place(master, plan)
    return insert_qdq(master, placement, dict.fromkeys(placement.taps, 4.0))


def test_a_model_that_is_int8_already_leaves_nothing_to_plan(plan_bench: Place) -> None:
    onnx.save(quantised(PrecisionPlan()), plan_bench / "model.onnx")
    plan_bench.change_spec(task="classify")
    printed = plan_bench.refuses(*plan_bench.arguments())
    assert printed.startswith(
        "plan.nothing: model.onnx, which brings its own INT8 and has no other layer that may be INT8;"
    )


def test_the_rest_of_a_partly_int8_model_is_planned(plan_bench: Place) -> None:
    onnx.save(quantised(PrecisionPlan({"Conv_t4": ""})), plan_bench / "model.onnx")
    plan_bench.change_spec(task="classify")
    calibration = ["--frames", plan_bench / "clip.avi", "-o", plan_bench / "calibration.json"]
    plan_bench.says("calibrate", plan_bench / "model.yaml", *calibration)
    plan_bench.plan()
    evidence = plan_bench.evidence()
    assert [group["name"] for group in evidence["groups"]] == ["Conv_t4"]
    assert evidence["chosen"] is not None


def test_readers_of_dequantised_values_are_planned_without_a_calibration(plan_bench: Place) -> None:
    """None can be made: there is no tensor to observe."""
    model, whole = quantised(PrecisionPlan()), residual_net()
    last, original = by_name(model)["Conv_t4"], by_name(whole)["Conv_t4"]
    last.input[1] = original.input[1]
    model.graph.initializer.extend(each for each in whole.graph.initializer if each.name == original.input[1])
    onnx.save(model, plan_bench / "model.onnx")
    plan_bench.change_spec(task="classify")
    plan_bench.plan()
    evidence = plan_bench.evidence()
    assert [group["name"] for group in evidence["groups"]] == ["Conv_t4"]
    assert evidence["chosen"] is not None
