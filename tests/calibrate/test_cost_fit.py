from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrate.cost_fit import (
    Edges,
    Floats,
    Labels,
    Noise,
    designs,
    fit_costs,
    is_noise,
    spread,
    total,
    wander,
)

NO_WANDER = np.zeros((0, 0))


def chain(n: int) -> Edges:
    """Neighbours, and a skip over every third."""
    pairs = [*((i, i + 1) for i in range(n - 1)), *((i, i + 3) for i in range(0, n - 3, 3))]
    return np.array(pairs, np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class Planted:
    """A network whose costs are known: lognormal times, some groups slower in INT8, boundaries seen by both ends."""

    time_int8: Floats
    time_float: Floats
    boundary: Floats
    edges: Edges
    to_first: Floats

    @classmethod
    def random(cls, seed: int, n: int = 40) -> Planted:
        rng, edges = np.random.default_rng(seed), chain(n)
        time_float = rng.lognormal(0.0, 0.8, n)
        boundary = rng.uniform(0.0, 0.4, len(edges)) * time_float.mean()
        return cls(time_float * rng.uniform(0.45, 1.15, n), time_float, boundary, edges, rng.random(len(edges)))

    def observe(self, labels: Labels) -> Floats:
        times = np.where(labels, self.time_int8, self.time_float)
        for (i, j), boundary, share in zip(self.edges, self.boundary, self.to_first, strict=True):
            cut = labels[:, i] != labels[:, j]
            times[:, i] += cut * boundary * share
            times[:, j] += cut * boundary * (1.0 - share)
        return times

    def total(self, labels: Labels) -> Floats:
        return total(self.time_int8, self.time_float, self.boundary, self.edges, labels)


def free(n: int) -> Labels:
    return np.ones(n, np.bool_)


def repeated(times: Floats, spread: float, seed: int = 0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [row * rng.lognormal(0.0, spread, (3, row.size)) for row in times]


def medians(repeats: list[Floats]) -> NDArray[np.float64]:
    return np.array([np.median(values, axis=0) for values in repeats])


# ---- designs


@given(st.integers(2, 60), st.integers(0, 5))
def test_designs_show_every_edge_in_all_four_ways(n: int, seed: int) -> None:
    edges = chain(n)
    labels = designs(free(n), edges, seed)
    assert len(labels) <= 8
    assert not labels[0].any()
    assert labels[1].all()
    assert len(np.unique(labels, axis=0)) == len(labels)
    for i, j in edges:
        assert len({(a, b) for a, b in labels[:, [i, j]].tolist()}) == 4


def test_groups_with_many_neighbours_keep_their_edges_apart() -> None:
    hub = np.array([(0, i) for i in range(1, 19)], np.int64)
    labels = designs(free(19), hub)
    cut = labels[:, hub[:, 0]] != labels[:, hub[:, 1]]
    assert len(np.unique(cut, axis=1).T) == 18


def test_fixed_groups_are_never_int8() -> None:
    may = np.array([True, False, True])
    labels = designs(may, chain(3))
    assert not labels[:, 1].any()
    assert labels[1].tolist() == [True, False, True]


def test_without_a_choice_one_design_is_enough() -> None:
    assert designs(np.zeros(3, np.bool_), chain(3)).tolist() == [[False] * 3]
    assert len(designs(np.zeros(0, np.bool_), chain(0))) == 1


# ---- fit


@pytest.mark.parametrize(("noise", "wrong"), [(0.0, 0.002), (0.05, 0.02)])
def test_recovers_planted_costs(noise: float, wrong: float) -> None:
    errors, gains = [], []
    for seed in range(10):
        planted = Planted.random(seed)
        labels = designs(free(40), planted.edges, seed)
        fit = fit_costs(labels, medians(repeated(planted.observe(labels), noise, seed)), planted.edges)
        assert fit.residual < wrong
        unseen = np.random.default_rng(seed).random((50, 40)) < 0.5
        found = total(fit.time_int8, fit.time_float, fit.boundary, planted.edges, unseen)
        errors.append(np.abs(found / planted.total(unseen) - 1.0).mean())
        gains.append(
            np.corrcoef(fit.time_float - fit.time_int8, planted.time_float - planted.time_int8)[0, 1],
        )
        assert min(fit.time_int8.min(), fit.time_float.min(), fit.boundary.min()) >= 0.0
    assert np.mean(errors) < wrong
    assert np.min(gains) > 0.95


def test_a_group_that_is_never_int8_costs_the_same_in_both() -> None:
    may = np.array([True, False])
    edges = chain(2)
    labels = designs(may, edges)
    times = np.where(labels, 1.0, 2.0)
    times[:, 0] += 0.5 * labels[:, 0]  # paid at a boundary that is there whenever the group is INT8
    fit = fit_costs(labels, times, edges)
    assert fit.time_int8 == pytest.approx([1.5, 2.0])
    assert fit.time_float == pytest.approx([2.0, 2.0])
    assert fit.boundary == pytest.approx([0.0])


def test_edges_that_are_always_cut_together_share_evenly() -> None:
    edges = np.array([(0, 1), (0, 2)])
    labels = np.array([[0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 0, 0]], np.bool_)
    times = np.ones((4, 3))
    times[2:, 0] += 0.8
    assert fit_costs(labels, times, edges).boundary == pytest.approx([0.4, 0.4], abs=0.01)


def test_a_graph_without_groups() -> None:
    fit = fit_costs(designs(free(0), chain(0)), np.zeros((1, 0)), chain(0))
    assert (fit.time_int8.size, fit.boundary.size, fit.residual) == (0, 0, 0.0)


# ---- noise


def savings(labels: Labels, repeats: list[Floats], edges: Edges, wander: Floats = NO_WANDER) -> tuple[Floats, Floats]:
    """The saving of each group, and its standard error."""
    fit = fit_costs(labels, medians(repeats), edges)
    return fit.saving, Noise(repeats, wander).errors(fit.weights)


@pytest.mark.parametrize("n", [4, 40])
def test_random_times_are_noise_and_planted_ones_are_not(n: int) -> None:
    mistaken = 0  # measured for four groups: 5 in 200
    for seed in range(20):
        planted = Planted.random(seed, n)
        labels = designs(free(n), planted.edges, seed)
        rng = np.random.default_rng(seed)
        chance = [rng.lognormal(0.0, 0.3, (3, n)) for _ in labels]
        mistaken += not is_noise(*savings(labels, chance, planted.edges))
        assert not is_noise(*savings(labels, repeated(planted.observe(labels), 0.03, seed), planted.edges))
    assert mistaken <= 2


def test_a_network_that_is_slower_in_int8_is_no_noise() -> None:
    labels = designs(free(9), chain(9))
    times = np.where(labels, 2.0, 1.0)
    saved, errors = savings(labels, repeated(times, 0.1), chain(9))
    assert not is_noise(saved, errors)
    assert np.all(saved < -3.0 * errors)


def test_the_errors_are_those_of_the_savings() -> None:
    """They scatter by as much, from measurement to measurement."""
    labels = designs(free(9), chain(9))
    times = np.where(labels, 1.0, 1.1)
    measured = [savings(labels, repeated(times, 0.2, seed), chain(9)) for seed in range(60)]
    scatter = np.std([saved for saved, _ in measured], axis=0).mean()
    assert np.mean([errors for _, errors in measured]) == pytest.approx(scatter, rel=0.35)


def test_repeats_that_agree_are_not_believed_where_the_machine_wanders() -> None:
    labels = designs(free(9), chain(9))
    steady = [np.stack([row] * 3) for row in np.where(labels, 0.9, 1.0)]
    saved, errors = savings(labels, steady, chain(9))
    assert np.all(saved > 3.0 * errors)
    moments = np.random.default_rng(0).lognormal(0.0, 0.3, (7, 9))
    saved, errors = savings(labels, steady, chain(9), wander([moments]))
    assert is_noise(saved, errors)
    twice = Noise(steady, wander([moments]), passes=2).errors(fit_costs(labels, medians(steady), chain(9)).weights)
    assert twice == pytest.approx(errors / np.sqrt(2.0))


def test_a_group_that_happened_to_be_steady_wanders_as_the_others() -> None:
    moments = np.random.default_rng(0).lognormal(0.0, 0.3, (7, 9))
    moments[:, 4] = 1.0 + np.linspace(-1e-6, 1e-6, 7)
    spreads = wander([moments]).std(axis=0)
    assert spreads[4] == pytest.approx(np.median((moments / moments.mean(axis=0)).std(axis=0)))
    assert wander([np.zeros((0, 0))]).size == 0


def test_spread_is_relative_and_knows_no_zeros() -> None:
    repeats = [np.array([[0.0, 9.0], [0.0, 10.0], [0.0, 11.0]])]
    assert spread(repeats) == pytest.approx(0.1)
    assert spread([np.zeros((3, 2))]) == 0.0
