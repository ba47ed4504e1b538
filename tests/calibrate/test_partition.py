"""Plans against the exact optimum: brute force over 14 groups, dynamic programming over a chain of 200."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.partition import FLOAT, FREE, INT8, Partition, Problem, fastest, frontier, rungs

BUDGETS = (0.1, 0.25, 0.5)
PRINTS = 1  # the seed of a network of 60 groups for which HiGHS writes lines, in SciPy 1.17


def problem(n: int, pairs: list[tuple[int, int]], **fields: np.ndarray) -> Problem:
    """Float takes 2, INT8 takes 1, noise and boundaries are nothing, labels free; `fields` say otherwise."""
    return Problem(
        **{
            "time_int8": np.ones(n),
            "time_float": np.full(n, 2.0),
            "noise": np.zeros(n),
            "edges": np.array(pairs, np.int64).reshape(-1, 2),
            "boundary": np.zeros(len(pairs)),
            "fixed": np.full(n, FREE, np.int8),
            **fields,
        }
    )


def network(seed: int, n: int = 14) -> Problem:
    """A chain with skips over three groups. Some groups are slower in INT8; noise sums to 1."""
    rng = np.random.default_rng(seed)
    time_float = rng.lognormal(0.0, 0.8, n)
    noise = rng.lognormal(0.0, 1.5, n)
    edges = [(i, i + 1) for i in range(n - 1)] + [(i, i + 3) for i in range(0, n - 3, 3)]
    return problem(
        n,
        edges,
        time_int8=time_float * rng.uniform(0.45, 1.15, n),
        time_float=time_float,
        noise=noise / noise.sum(),
        boundary=rng.uniform(0.02, 0.35, len(edges)) * time_float.mean(),
    )


def every_plan(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Time and noise (plans,) of all plans that keep the fixed labels."""
    n = problem.noise.size
    plans = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1 > 0
    plans = plans[((problem.fixed == FREE) | (plans == (problem.fixed == INT8))).all(axis=1)]
    reformatted = plans[:, problem.edges[:, 0]] != plans[:, problem.edges[:, 1]]
    times = plans @ problem.time_int8 + ~plans @ problem.time_float + reformatted @ problem.boundary
    return times, plans @ problem.noise


def optimum(times: np.ndarray, noises: np.ndarray, budget: float) -> float:
    return float(times[noises <= budget + 1e-12].min())


def check(problem: Problem, plan: Partition) -> None:
    """Check the properties of every plan."""
    ruled = problem.fixed != FREE
    assert (plan.int8[ruled] == (problem.fixed[ruled] == INT8)).all()
    assert plan.time == problem.time(plan.int8)
    assert plan.noise == problem.noise_of(plan.int8)


def exact_chain(net: Problem, budgets: list[int]) -> list[float]:
    """Least times of a chain whose noises are whole numbers: per last label and noise spent, group by group."""
    room = max(budgets) + 1
    least = np.full((2, room), np.inf)
    for group, (cost, step) in enumerate(zip(net.noise.astype(int), [0.0, *net.boundary], strict=True)):
        before = np.array([[0.0] + [np.inf] * (room - 1)] * 2) if group == 0 else least
        arrived = np.minimum(before, before[::-1] + step)
        least = np.full((2, room), np.inf)
        least[0] = arrived[0] + net.time_float[group]
        least[1, cost:] = arrived[1, : room - cost] + net.time_int8[group]
    return [float(least[:, : budget + 1].min()) for budget in budgets]


def test_groups_that_are_int8_by_rule_use_the_budget_first() -> None:
    """Of equal groups there are too many that exceed the budget to cut them off one by one."""
    noise, fixed = np.ones(60), np.full(60, FREE, np.int8)
    noise[0], fixed[0] = 50.0, INT8
    net = problem(60, [], noise=noise, fixed=fixed)
    assert [fastest(net, budget).noise for budget in (1.0, 53.0)] == [50.0, 53.0]


@pytest.mark.trial
def test_plans_for_200_groups_are_near_the_exact_optimum() -> None:
    net = network(0, 200)
    chain = replace(net, edges=net.edges[:199], boundary=net.boundary[:199], noise=np.ceil(net.noise * 5000.0))
    budgets = [int(share * chain.noise.sum()) for share in BUDGETS]
    plans = [fastest(chain, budget) for budget in budgets]
    assert all(plan.noise <= budget for plan, budget in zip(plans, budgets, strict=True))
    assert [plan.time for plan in plans] == pytest.approx(exact_chain(chain, budgets), rel=1e-5)
    front = frontier(chain)
    best = exact_chain(chain, [int(plan.noise) for plan in front])
    excess = [plan.time / least - 1.0 for plan, least in zip(front, best, strict=True)]
    assert -1e-9 < min(excess) <= max(excess) < 5e-4  # measured 2.8e-4
    assert np.mean(excess) < 1e-5


def test_the_frontier_holds_what_no_plan_beats() -> None:
    beyond_the_hull = 0
    for seed in range(3):
        net = network(seed, 10)
        times, noises = every_plan(net)
        front = frontier(net)
        assert all(np.diff([plan.time for plan in front]) > 0.0)
        assert all(np.diff([plan.noise for plan in front]) < 0.0)
        assert front[0].time == pytest.approx(times.min(), rel=1e-12)
        assert (front[-1].noise, bool(front[-1].int8.any())) == (0.0, False)
        for plan in front:
            check(net, plan)
            assert plan.time == pytest.approx(optimum(times, noises, plan.noise), rel=1e-9)
            assert fastest(net, plan.noise).time <= plan.time  # it fills the budget to the last bit
        slopes = np.diff([plan.time for plan in front]) / np.diff([plan.noise for plan in front])
        beyond_the_hull += bool((np.diff(slopes) > 0.0).any())
    assert beyond_the_hull >= 2  # of 3: no weighing of time against noise finds a plan that makes the frontier bulge


@pytest.mark.parametrize("seed", range(4))
def test_microseconds_and_seconds_meet_in_one_network(seed: int) -> None:
    """Times and boundaries of 1 and of 1e6: the small ones too are decided right."""
    rng = np.random.default_rng(seed)
    net = network(seed)
    unit = np.where(rng.random(14) < 0.5, 1e6, 1.0)
    boundary = net.boundary * np.where(rng.random(net.boundary.size) < 0.5, 1e6, 1.0)
    net = replace(net, time_int8=net.time_int8 * unit, time_float=net.time_float * unit, boundary=boundary)
    times, noises = every_plan(net)
    for budget in (*BUDGETS, np.inf):
        assert fastest(net, budget).time == pytest.approx(optimum(times, noises, budget), rel=1e-9, abs=0.0)


def test_whatever_is_equal_or_absent() -> None:
    nothing = problem(0, [])
    assert (fastest(nothing, 0.0).time, fastest(nothing, 0.0).noise, len(frontier(nothing))) == (0.0, 0.0, 1)
    assert fastest(problem(5, []), 0.0).int8.all()  # noise of nothing fits into a budget of nothing
    equal = problem(6, [(i, i + 1) for i in range(5)], time_float=np.ones(6), noise=np.ones(6), boundary=np.ones(5))
    assert fastest(equal, 3.0).time == 6.0
    assert [plan.noise for plan in frontier(equal)] == [0.0]  # INT8 that saves nothing adds no noise
    lone = problem(4, [], noise=np.full(4, 0.1))
    assert [fastest(lone, budget).int8.sum() for budget in (0.05, 0.1, 0.2, 0.35)] == [0, 1, 2, 3]
    instant = problem(3, [(0, 1)], time_int8=np.zeros(3), time_float=np.zeros(3), noise=np.ones(3))
    assert (fastest(instant, 1.0).time, len(frontier(instant))) == (0.0, 1)
    ruled = problem(2, [(0, 1)], fixed=np.array([FLOAT, INT8], np.int8), boundary=np.ones(1), noise=np.ones(2))
    assert [(plan.time, plan.noise) for plan in frontier(ruled)] == [(4.0, 1.0)]


def test_equal_noises_fill_a_budget_as_far_as_their_exact_sum_allows() -> None:
    """Three times 0.1 is more than 0.3: the plans that miss by the last bit do not hide the others."""
    for seed in range(5, 9):  # in the first and the last the miss is what hides the best plan
        net = replace(network(seed), noise=np.full(14, 0.1))
        times, noises = every_plan(net)
        for budget in (0.3, 0.6, 0.8):
            groups = max(count for count in range(15) if math.fsum([0.1] * count) <= budget)
            assert fastest(net, budget).time == pytest.approx(times[noises < 0.1 * groups + 0.05].min(), rel=1e-9)


def test_the_solver_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    frontier(network(PRINTS, 60))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_int8", np.ones(2)),
        ("time_float", np.array([1.0, 1.0, np.nan])),
        ("noise", np.array([0.1, -0.1, 0.1])),
        ("boundary", np.array([np.inf, 1.0])),
        ("edges", np.array([[0, 1], [1, 3]])),
        ("edges", np.array([0, 1])),
        ("fixed", np.array([0, 1, 2], np.int8)),
    ],
)
def test_refuses_what_is_no_problem(field: str, value: np.ndarray) -> None:
    with pytest.raises(ValueError, match=field):
        problem(3, [(0, 1), (1, 2)], **{field: value})


def test_refuses_a_budget_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="budget"):
        fastest(network(0), float("nan"))


@st.composite
def any_problem(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(1, 8))
    m = draw(st.integers(0, 12))

    def values(size: int) -> np.ndarray:
        value = st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(1e-3, 1e3))
        return np.array(draw(st.lists(value, min_size=size, max_size=size)), float)

    group = st.integers(0, n - 1)
    edges = draw(st.lists(st.tuples(group, group), min_size=m, max_size=m))
    fixed = draw(st.lists(st.sampled_from([FREE, FREE, FLOAT, INT8]), min_size=n, max_size=n))
    return problem(
        n,
        edges,
        time_int8=values(n),
        time_float=values(n),
        noise=values(n),
        boundary=values(m),
        fixed=np.array(fixed, np.int8),
    )


@given(any_problem(), st.floats(0.0, 1.0))
def test_no_plan_exceeds_its_budget_unless_forced_to(net: Problem, share: float) -> None:
    times, noises = every_plan(net)
    budget = share * net.noise.sum()
    plan = fastest(net, budget)
    check(net, plan)
    if plan.noise > budget:
        assert plan.noise == net.noise_of(net.fixed == INT8)
    else:
        strictly_within = noises <= budget - 1e-9 * net.noise.sum()
        assert plan.time <= min(times[strictly_within], default=np.inf) + 1e-9 * times.max()


def chosen_noises(front: list[tuple[float, float]], tolerance: float) -> list[float]:
    """The noise of each rung, from (noise, time)."""
    plans = [Partition(np.arange(4) < 1, time, noise) for noise, time in front]
    return [plan.noise for plan in rungs(plans, tolerance)]


def test_each_rung_is_the_quietest_of_those_as_fast_and_has_two_thirds_of_the_noise_at_most() -> None:
    front = [(8.0, 1.0), (7.0, 1.01), (4.0, 1.5), (3.0, 1.52), (1.4, 1.9), (0.1, 2.5)]
    assert chosen_noises(front, 0.0) == [8.0, 4.0, 1.4, 0.1]
    assert chosen_noises(front, 0.05) == [7.0, 3.0, 1.4, 0.1]
    near = [(1.0, 1.0), (0.7, 2.0), (0.66, 3.0), (0.45, 4.0), (0.3, 5.0)]
    assert chosen_noises(near, 0.0) == [1.0, 0.66, 0.3]


def test_the_rungs_end_at_a_plan_without_noise() -> None:
    assert chosen_noises([(1.0, 1.0), (0.0, 2.0)], 0.0) == [1.0, 0.0]
    assert chosen_noises([(0.0, 1.0)], 0.0) == [0.0]


def test_a_plan_without_int8_is_no_rung() -> None:
    assert rungs([Partition(np.zeros(4, np.bool_), 1.0, 0.0)], 0.0) == []
