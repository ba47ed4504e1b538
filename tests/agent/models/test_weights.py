"""How much each tensor's noise counts: by what a plan measured of its readers, else by its own noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds import SPEC
from zoo import Net

from agent.models.model import Model, tap_weights
from agent.vision.spec import ModelSpec
from calibrate.histogram import abs_histogram
from calibrate.noise import tensor_noise
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.calibration import Calibration, calibrate_histograms
from engines.quantise.placement import place

RNG = np.random.default_rng(0)
TAPS = ("image", "t1", "t3")


@pytest.fixture
def model() -> Model:
    """Three convolutions in a row; the first and the last also read one tensor together with a fourth."""
    net = Net((1, 3, 8, 8))
    first = net.node("Relu", net.conv("image", 3, 4))
    second = net.node("Relu", net.conv(first, 4, 4))
    master = net.model(net.conv(second, 4, 5), net.conv(first, 4, 2))
    return Model(ModelSpec.model_validate(SPEC), master, "m", (1, 3, 8, 8), ALL_INT8, master, place(master))


@pytest.fixture
def calibration() -> Calibration:
    """One tensor of noise on the grid alone, two spread out."""
    values = {
        "image": np.repeat([0.0, 127.0], 500),
        "t1": np.abs(RNG.normal(size=4000)),
        "t3": np.abs(RNG.normal(size=4000)) ** 3,
    }
    seen = {name: abs_histogram(each.astype(np.float32)) for name, each in values.items()}
    return calibrate_histograms(seen, (), model_sha256="m", method="max", frames=1, source="test")


def under(model: Model, sensitivities: dict[str, float], floats: tuple[str, ...] = (), **evidence: Any) -> Model:
    groups = [{"layers": [layer], "sensitivity": value} for layer, value in sensitivities.items()]
    found = {"sensed": True, "groups": groups, **evidence}
    return replace(model, plan=PrecisionPlan(dict.fromkeys(floats, "for the test"), evidence=found))


def added(weights: dict[str, float], calibration: Calibration) -> dict[str, float]:
    """Return the noise that each tensor adds under its own calibration."""
    noise = tensor_noise(calibration.histograms, [calibration.scales])
    own = dict(zip(noise.names, noise.ratios[:, 0].sum(axis=1).tolist(), strict=True))
    return {name: weight * own[name] for name, weight in weights.items()}


def test_without_measurements_all_noise_weighs_alike(model: Model, calibration: Calibration) -> None:
    found = tap_weights(model, calibration)
    assert tuple(found) == TAPS
    shares = added(found, calibration)
    assert shares["t1"] == pytest.approx(1.0)
    assert shares["t3"] == pytest.approx(1.0)


def test_a_tensor_without_noise_of_its_own_does_not_drown_the_others(model: Model, calibration: Calibration) -> None:
    found = tap_weights(model, calibration)
    assert found["image"] < 2.0 * 4.0 * 127.0**2
    assert found["image"] > found["t1"]


def test_half_of_what_a_tensor_adds_is_what_was_measured_of_its_readers(model: Model, calibration: Calibration) -> None:
    planned = under(model, {"Conv_t0": 0.5, "Conv_t2": 2.0, "Conv_t4": 4.0, "Conv_t5": 1.0})
    shares = added(tap_weights(planned, calibration), calibration)
    total = (0.5 + 3.0 + 4.0) / 4.0
    assert shares["t1"] == pytest.approx(1.0 / 3.0 + 3.0 / 4.0 / total)
    assert shares["t3"] == pytest.approx(1.0 / 3.0 + 4.0 / 4.0 / total)


def test_a_tensor_read_by_an_add_alone_has_its_share_of_the_completed_group(calibration: Calibration) -> None:
    net = Net((1, 3, 8, 8))
    left, right = (net.node("Relu", net.conv("image", 3, 4)) for _ in range(2))
    both = net.node("Add", net.conv(left, 4, 4), right)
    master = net.model(net.conv(both, 4, 2))
    model = Model(ModelSpec.model_validate(SPEC), master, "m", (1, 3, 8, 8), ALL_INT8, master, place(master))
    assert model.placement.reads["Add_t5"] == (1,)
    seen = dict.fromkeys(("image", left, right, both), calibration.histograms["t1"])
    seen_there = calibrate_histograms(seen, (), model_sha256="m", method="max", frames=1, source="test")
    planned = under(model, {"Conv_t0": 1.0, "Conv_t2": 1.0, "Conv_t4": 4.0, "Conv_t6": 1.0})
    shares = added(tap_weights(planned, seen_there), seen_there)
    measured = {"image": 0.5, left: 0.5, right: 0.5, both: 0.25}
    assert shares == pytest.approx({tap: 1.0 / 4.0 + each / 1.75 for tap, each in measured.items()})


@pytest.mark.parametrize("least", [0.0, 1e-12])
def test_no_tensor_is_without_weight_because_the_plan_measured_nothing_of_it(
    model: Model, calibration: Calibration, least: float
) -> None:
    planned = under(model, {"Conv_t0": 1.0, "Conv_t2": 1.0, "Conv_t4": least, "Conv_t5": 1.0})
    shares = added(tap_weights(planned, calibration), calibration)
    assert shares["t1"] == pytest.approx(1.0 / 3.0 + 2.0 / 3.0)
    assert shares["t3"] == pytest.approx(1.0 / 3.0)


@pytest.mark.parametrize("unit", [5e-324, 1e-300, 1e300])
def test_the_unit_of_the_sensitivities_does_not_matter(model: Model, calibration: Calibration, unit: float) -> None:
    measured, found = ({"Conv_t0": n, "Conv_t2": n, "Conv_t4": n} for n in (1.0, unit))
    weights = [tap_weights(under(model, each), calibration) for each in (measured, found)]
    assert weights[1] == pytest.approx(weights[0])


def test_a_tensor_read_by_float_layers_alone_has_no_weight(model: Model, calibration: Calibration) -> None:
    planned = under(model, {"Conv_t0": 1.0, "Conv_t2": 1.0, "Conv_t4": 1.0, "Conv_t5": 1.0}, floats=("Conv_t4",))
    assert tuple(tap_weights(planned, calibration)) == ("image", "t1")


@pytest.mark.parametrize(
    "evidence",
    [{"sensed": False}, {"sensed": None}, {"groups": None}, {"groups": [{}]}, {"groups": [3]},
     {"groups": [{"layers": ["Conv_t0"], "sensitivity": "much"}]}, {"groups": []},
     {"groups": [{"layers": ["of another model"], "sensitivity": 1.0}]},
     *({"groups": [{"layers": ["Conv_t0"], "sensitivity": 1.0}, {"layers": ["Conv_t2"], "sensitivity": wrong}]}
       for wrong in (math.inf, math.nan, -1.0, 10**400))],
)  # fmt: skip
def test_evidence_that_says_nothing_is_none(model: Model, calibration: Calibration, evidence: dict[str, Any]) -> None:
    planned = under(model, {"Conv_t0": 1.0, "Conv_t2": 100.0}, **evidence)
    assert tap_weights(planned, calibration) == tap_weights(model, calibration)
