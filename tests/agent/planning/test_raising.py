"""More layers left float: which, by how much, and when."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from candidate_bench import saved_model
from raising_world import COLLAPSES, collapsing_net, config_of, count_macs, observer_state, scene_of
from zoo import residual_net

from agent.common.errors import AgentError
from agent.core.due import is_low
from agent.models.build import build_artefact
from agent.models.model import Model, tap_weights
from agent.planning.ladder import REFUSED, Ladder, LadderOptions
from agent.planning.raising import EXHAUSTED, PrecisionRaise
from calibrate.plan import PrecisionPlan, Repairs
from engines.interface import silent
from engines.registry import open_backend
from engines.store.artefact import Store

FIRST = "Conv_t0"
REFUSAL = AgentError(REFUSED, "loss 0.3", "less", "none")


def ladder_of(
    model: Model,
    serving: PrecisionPlan | None = None,
    without_int8: Mapping[str, str] | None = None,
    rung: int = 1,
    max_loss: float = 0.1,
) -> Ladder:
    options = LadderOptions(max_loss, 60.0, PrecisionRaise(rung, 0.714))
    runtime = open_backend("onnxruntime")
    start = serving or model.plan
    return Ladder(model, start, scene_of(model), without_int8 or {}, runtime, options, silent, count_macs)


def test_the_layer_that_int8_destroys_is_left_float_with_the_reason(tmp_path: Path) -> None:
    found = ladder_of(saved_model(tmp_path, collapsing_net(7)))
    (plan,) = found.plans()
    assert plan.floats[COLLAPSES] == "raised: made 100 % of the noise while fidelity was 0.71"
    assert FIRST not in plan.floats
    assert found.findings.choice is None  # it goes on from the plan in service, and tries no other repairs
    assert found.refusal(REFUSAL).code == EXHAUSTED
    served = plan.evidence["candidates"][0]
    assert (served["plan"], served["int8_macs_share"], served["predicted_loss"]) == ("the plan in service", 1.0, 0.5)
    assert served["outcome"] == "fidelity 0.71 where it serves"


def test_the_plan_in_service_is_not_offered_where_the_frames_happen_to_be_easy(tmp_path: Path) -> None:
    found = ladder_of(saved_model(tmp_path, collapsing_net(7)), max_loss=0.6)
    plans = list(found.plans())
    assert plans
    assert all(COLLAPSES in plan.floats for plan in plans)
    assert found.refusal(REFUSAL).code == REFUSED  # by chance: a later job may have other frames


def test_a_plan_that_divides_inputs_is_offered_with_the_ranges_of_today_where_it_then_loses_little(
    tmp_path: Path,
) -> None:
    """Channels that leave their ranges are not seen by the drift of a tensor, but by the fidelity alone."""
    model = saved_model(tmp_path, collapsing_net(7)).with_plan(PrecisionPlan({}, Repairs({COLLAPSES: (1000.0,)})))
    for max_loss, is_offered in ((0.6, True), (0.1, False)):
        first = next(ladder_of(model, max_loss=max_loss).plans())
        assert (not first.floats and first.repairs.divisors == model.plan.repairs.divisors) is is_offered


def test_float_layers_keep_their_reason_and_more_follow(tmp_path: Path) -> None:
    found = ladder_of(saved_model(tmp_path, residual_net()), PrecisionPlan({FIRST: "by hand"}), max_loss=1.0)
    floats = [plan.floats for plan in found.plans()]
    assert floats
    for each in floats:
        assert each[FIRST] == "by hand"
        assert len(each) > 1


def test_each_rung_has_half_of_the_noise_and_begins_where_the_one_before_was_tried_in_vain(tmp_path: Path) -> None:
    model = saved_model(tmp_path, residual_net())
    rungs = []
    for rung in (1, 2, 9):
        found = ladder_of(model, rung=rung, max_loss=1.0)
        rungs.append([set(plan.floats) for plan in found.plans()])
    noise = {group["name"]: group["sensitivity"] for group in found.report(model.plan)["groups"]}
    left = [sum(noise.values()), *(sum(noise[name] for name in noise.keys() - floats) for floats in rungs[0])]
    assert all(2.0 * quieter <= louder for louder, quieter in pairwise(left))
    assert rungs[1] == rungs[0][1:]
    assert rungs[2] == []
    assert found.refusal(None).code == EXHAUSTED


def test_a_layer_that_becomes_float_needs_its_repair_no_more(tmp_path: Path) -> None:
    """The taps of the owner's plan are enough for the raised one."""
    repairs = Repairs(divisors={COLLAPSES: (1000.0,)})
    model = saved_model(tmp_path, collapsing_net(7), precision={"keep_float": ["Gemm"]}).with_plan(
        PrecisionPlan({}, repairs)
    )
    found = ladder_of(model)
    (plan,) = found.plans()
    raised = model.with_plan(plan)
    assert raised.placement.taps != model.placement.taps
    store, calibration = Store(tmp_path / "state"), scene_of(model).calibration
    backend = open_backend("onnxruntime")
    artefact = build_artefact(raised, backend, store.place, silent, calibration=calibration, planned_from="it")
    assert artefact.manifest["inputs"]["raised_from"] == "it"
    assert COLLAPSES not in plan.effective.divisors
    assert tap_weights(raised, calibration)


@pytest.mark.parametrize(
    ("low", "fidelity", "serving_db", "drift", "trouble", "outage"),
    [
        (True, (0.4, 0.6, 200), 0.5, "calm", "", ""),
        (False, (0.8, 0.91, 200), 0.5, "calm", "", ""),
        (False, (0.4, 0.6, 127), 0.5, "calm", "", ""),
        (False, (0.4, 0.6, 200), 0.5, "", "", ""),
        (False, (0.4, 0.6, 200), 0.5, "warning", "", ""),
        (False, (0.4, 0.6, 200), 3.5, "calm", "", ""),
        (False, (0.4, 0.6, 200), 0.5, "calm", "blurred", ""),
        (False, (0.4, 0.6, 200), 0.5, "calm", "", "preparing"),
    ],
    ids=["low", "good after all", "few frames", "degraded", "drifting", "curable", "trouble", "outage"],
)
def test_fidelity_is_low_only_beyond_doubt_and_where_the_scales_fit(
    low: bool, fidelity: tuple[float, float, int], serving_db: float, drift: str, trouble: str, outage: str
) -> None:
    config = config_of()
    state = observer_state(config, fidelity, serving_db=serving_db, drift=drift, trouble=trouble, outage=outage)
    assert is_low(state, config) is low
    assert not is_low(state, config_of(max_loss=0.7))
