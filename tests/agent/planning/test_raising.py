"""More layers left float: which, by how much, and when."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from noise_ratio import noise_to_signal
from numpy.typing import NDArray
from raising_world import COLLAPSES, collapsing_net, config_of, observer_state
from worlds import SPEC
from zoo import residual_net

from agent.common.errors import AgentError
from agent.control.triggers import is_low
from agent.models.build import build_artefact
from agent.models.model import Model, calibrate, open_model, tap_weights
from agent.planning.precision_raise import EXHAUSTED, ObservedScene, PrecisionRaise, PrecisionRaiser
from agent.vision.spec import ModelSpec
from calibrate.histogram import AbsHistogram, merge_into
from calibrate.plan import PrecisionPlan, Repairs
from calibrate.sensitivity import float_levels
from engines.interface import silent
from engines.registry import open_backend
from engines.store.artefact import Store

ONCE = PrecisionRaise(1, 0.5, 60.0)


def test_every_rung_halves_what_the_one_before_left() -> None:
    noise = np.array([0.0, 1.0, 8.0, 2.0, 4.0, 1.0])
    assert float_levels(noise) == [(2,), (2, 4), (2, 4, 3), (2, 4, 3, 1), (2, 4, 3, 1, 5)]
    assert float_levels(np.ones(8)) == [tuple(range(n)) for n in (4, 6, 7, 8)]
    assert float_levels(np.array([1e-3, 1.0])) == [(1,), (1, 0)]
    assert float_levels(np.zeros(3)) == float_levels(np.zeros(0)) == []
    assert float_levels(np.array([5e-324, 5e-324])) == [(0,), (0, 1)]


@pytest.mark.parametrize("noise", [[np.inf, 1.0], [np.nan, 1.0], [-1.0, 2.0], [1e308, 1e308]])
def test_noise_that_no_group_makes_is_refused(noise: list[float]) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        float_levels(np.array(noise))


def model_of(folder: Path, graph: onnx.ModelProto, **precision: list[str]) -> Model:
    onnx.save(graph, folder / "model.onnx")
    return open_model(ModelSpec.model_validate({**SPEC, "path": folder / "model.onnx", "precision": precision}))


def observed(model: Model, frames: list[NDArray[np.float32]]) -> dict[str, AbsHistogram]:
    merged: dict[str, AbsHistogram] = {}
    with closing(open_backend("onnxruntime").observer(model.reference, model.placement.taps)) as observer:
        for frame in frames:
            merge_into(merged, observer.observe(frame).histograms)
    return merged


def scene_of(model: Model, asked: int = 6) -> ObservedScene:
    """Dark images and bright ones, so many of which may be tried on."""
    rng = np.random.default_rng(0)
    images = [rng.uniform(size=(1, 3, 8, 8)) * (0.2 if n % 2 else 0.5) for n in range(24)]
    frames = [image.astype(np.float32) for image in images]
    histograms = observed(model, frames)
    calibration = calibrate(model, histograms, "max", len(frames), "test")
    return ObservedScene(histograms, calibration, frames[:asked])


def search(model: Model, asked: int = 6, without_int8: Mapping[str, str] | None = None) -> PrecisionRaiser:
    return PrecisionRaiser(model, scene_of(model, asked), without_int8 or {}, open_backend("onnxruntime"), silent)


def test_the_layer_that_int8_destroys_is_left_float_with_the_reason(tmp_path: Path) -> None:
    plan = search(model_of(tmp_path, collapsing_net())).plan(replace(ONCE, fidelity=0.714))
    assert plan.floats == {COLLAPSES: "raised: made 100 % of the noise while fidelity was 0.71"}


def test_what_is_float_already_stays_so_for_its_own_reason(tmp_path: Path) -> None:
    model = model_of(tmp_path, collapsing_net()).with_plan(PrecisionPlan({COLLAPSES: "by hand"}))
    found = search(model)
    assert COLLAPSES not in [found.grouping.groups[index].name for index in found.candidate_groups()]
    plan = found.plan(ONCE)
    assert plan.floats[COLLAPSES] == "by hand"
    assert len(plan.floats) == 2


def test_what_the_owner_forces_into_int8_stays_int8_and_then_a_person_is_needed(tmp_path: Path) -> None:
    found = search(model_of(tmp_path, collapsing_net(), force_int8=[COLLAPSES]))
    names = [found.grouping.groups[index].name for index in found.candidate_groups()]
    assert COLLAPSES not in names
    floats = set[str]()
    for rung in range(1, len(names) + 1):
        before, floats = floats, set(found.plan(replace(ONCE, rung=rung)).floats)
        assert before < floats
        if floats == set(names):
            break
    with pytest.raises(AgentError) as ended:
        found.plan(replace(ONCE, rung=rung + 1))
    assert ended.value.code == EXHAUSTED


def test_a_layer_without_a_kernel_is_no_candidate(tmp_path: Path) -> None:
    found = search(model_of(tmp_path, collapsing_net()), without_int8={COLLAPSES: "no kernel"})
    assert COLLAPSES not in found.plan(ONCE).floats


def test_without_frames_or_time_the_prediction_decides(tmp_path: Path) -> None:
    model = model_of(tmp_path, residual_net())
    silently, late = search(model, asked=0), search(model)
    expected = float_levels(silently.predict_noise())[0]
    names = {layer for index in expected for layer in silently.grouping.groups[index].layers}
    assert set(silently.plan(ONCE).floats) == names
    assert set(late.plan(replace(ONCE, budget_s=0.0)).floats) == names


def test_a_layer_that_becomes_float_needs_its_repair_no_more(tmp_path: Path) -> None:
    """What the observer of the owner's plan sees is enough for the raised one."""
    repairs = Repairs(divisors={COLLAPSES: (1000.0,)})
    model = model_of(tmp_path, collapsing_net(), keep_float=["Gemm"]).with_plan(PrecisionPlan({}, repairs))
    scene = scene_of(model)
    found = PrecisionRaiser(model, scene, {}, open_backend("onnxruntime"), silent)
    plan = next(plan for rung in (1, 2, 3) if COLLAPSES in (plan := found.plan(replace(ONCE, rung=rung))).floats)
    raised = model.with_plan(plan)
    assert raised.placement.taps != model.placement.taps
    store = Store(tmp_path / "state")
    backend = open_backend("onnxruntime")
    artefact = build_artefact(raised, backend, store.place, silent, calibration=scene.calibration, planned_from="it")
    assert artefact.manifest["inputs"]["raised_from"] == "it"
    assert COLLAPSES not in plan.effective.divisors
    assert tap_weights(raised, scene.calibration)


def test_the_prediction_is_of_everything_that_a_group_reads_under_its_best_scale(tmp_path: Path) -> None:
    model = model_of(tmp_path, residual_net())
    found, scene = search(model), scene_of(model)
    weights = tap_weights(model, scene.calibration)

    def least(tap: str) -> float:
        seen = scene.histograms[tap]
        return weights[tap] * float(noise_to_signal(seen, np.geomspace(0.05, 1.0, 400) * seen.amax / 127).min())

    stem, second, third, _ = found.predict_noise().tolist()
    (skip,) = {node.input[0] for node in model.observed.graph.node if node.name == found.grouping.groups[1].name}
    (inner,) = {node.input[0] for node in model.observed.graph.node if node.name == found.grouping.groups[2].name}
    assert stem == pytest.approx(least("image"), rel=0.05)
    assert second == pytest.approx(least(skip), rel=0.05)
    assert third == pytest.approx(least(inner) + least(skip), rel=0.05)  # its Add reads the skip connection


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
