"""The worth of dB in fidelity: the map, its prior and what it learns."""

from __future__ import annotations

import numpy as np
import pytest

from calibrate.statistics.fidelity_gain import GainMap, Prior, Recalibrated, isotonic, recoverable_loss

RNG = np.random.default_rng(0)
# benchmarks.drift_worth.fitted_prior of measured(0.9, 400)
FITTED = Prior(
    slope=0.914,
    chance=0.005,
    misses=(
        *(0.004, 0.009, 0.016, 0.022, 0.027, 0.033, 0.042, 0.048, 0.058, 0.067),
        *(0.087, 0.109, 0.128, 0.162, 0.201, 0.238, 0.303, 0.358, 0.518),
    ),
)


def measured(slope: float, count: int) -> list[Recalibrated]:
    """Recalibrations that gain the recoverable loss times `slope`, and some noise."""
    return [
        Recalibrated(gain_db, loss, float(np.clip(slope * recoverable_loss(gain_db, loss, 24) + noise, -1.0, 1.0)), 24)
        for gain_db, loss, noise in zip(
            RNG.uniform(0.0, 20.0, count), RNG.beta(0.5, 2.0, count), RNG.normal(0.0, 0.01, count), strict=True
        )
    ]


def test_nothing_is_gained_where_nothing_is_lost_and_no_more_than_is_lost() -> None:
    nothing, much = GainMap().gain(24.0, 0.0, 24), GainMap().gain(40.0, 0.3, 1000)
    assert nothing.estimate < 0.01
    assert 0.2 < much.estimate <= 0.32
    assert GainMap().gain(0.0, 0.9, 24).estimate == 0.0
    assert GainMap().gain(-5.0, 0.9, 24).estimate == 0.0


def test_more_db_and_more_loss_are_never_worth_less() -> None:
    own = GainMap(measured(0.3, 12))
    for gains in (
        [own.gain(gain_db, 0.4, 24).estimate for gain_db in np.linspace(0.0, 30.0, 31)],
        [own.gain(8.0, loss, 24).estimate for loss in np.linspace(0.0, 1.0, 31)],
    ):
        assert (np.diff(gains) >= 0.0).all()


def test_a_model_that_regains_less_than_others_is_believed() -> None:
    asked = (10.0, 0.4, 24)
    prior, few, many = (GainMap(measured(0.2, count)).gain(*asked).estimate for count in (0, 3, 64))
    assert many < few < prior
    assert many == pytest.approx(0.2 * recoverable_loss(*asked), abs=0.05)


def test_bounds_hold_as_often_as_they_say_and_widen_where_the_map_is_surprised() -> None:
    known = GainMap(prior=FITTED)
    held = [
        bounds.low <= each.gained <= bounds.high
        for each in measured(0.9, 400)
        for bounds in [known.gain(each.gain_db, each.loss, each.frames)]
    ]
    assert 0.74 < np.mean(held) < 0.88
    surprised = GainMap([Recalibrated(6.0, 0.2, (-1.0) ** which * 0.4, 64) for which in range(40)])
    assert surprised.gain(6.0, 0.2, 24).high - surprised.gain(6.0, 0.2, 24).low > 0.5
    assert GainMap().gain(6.0, 0.2, 24).high - GainMap().gain(6.0, 0.2, 24).low < 0.4


def test_a_fit_that_never_falls_is_the_nearest_one() -> None:
    values, weights = RNG.normal(size=40).cumsum() * 0.1 + RNG.normal(size=40), RNG.uniform(0.5, 2.0, 40)
    fit = isotonic(values, weights)
    assert (np.diff(fit) >= 0.0).all()
    assert fit @ weights == pytest.approx(values @ weights)
    for other in (np.maximum.accumulate(values), np.minimum.accumulate(values[::-1])[::-1], np.sort(values)):
        assert weights @ np.square(fit - values) <= weights @ np.square(other - values) + 1e-12
