"""Boards unlike their group are found by the cost of sharing a calibration, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from merge_bench import TENSORS, counted, frames_of

from calibrate.histogram import AbsHistogram
from fleet.merge.calibration import Merger
from fleet.merge.outliers import LEAST_LIMIT_DB, Distance, Group, OutlierLimits, Sketch


def distances(boards: list[dict[str, AbsHistogram]]) -> list[Distance]:
    sketches = [Sketch.from_histograms(each, TENSORS) for each in boards]
    group, merger = Group(TENSORS, sketches), Merger()
    for each in boards:
        merger.add(each.items())
    costs = group.costs_to_group_db(merger.histograms, sketches)
    return [Distance(group.cost_to_board_db(each), cost) for each, cost in zip(boards, costs, strict=True)]


def found(boards: list[dict[str, AbsHistogram]]) -> list[int]:
    """The outliers by their number."""
    each = distances(boards)
    limits = OutlierLimits.from_distances(each)
    return [number for number, distance in enumerate(each) if limits.reason(distance)]


def alike(count: int, light: float = 1.0) -> list[dict[str, AbsHistogram]]:
    return [counted(frames_of(seed, light * (0.9 + 0.2 * (seed % 5) / 4))) for seed in range(count)]


@pytest.mark.parametrize("light", [0.1, 0.3, 4.0, 30.0])
@pytest.mark.parametrize("count", [3, 12])
def test_a_board_in_another_light_is_found(light: float, count: int) -> None:
    assert found([*alike(count), counted(frames_of(99, light))]) == [count]


def test_two_boards_that_disagree_are_both_kept() -> None:
    assert found([*alike(1), counted(frames_of(1, 1.7))]) == []


def test_nearly_half_may_lie_without_moving_the_group() -> None:
    boards = [*alike(7), *(counted(frames_of(seed, 50.0)) for seed in range(5))]
    each = distances(boards)
    assert max(distance.to_board_db for distance in each[:7]) < LEAST_LIMIT_DB
    assert min(distance.to_board_db for distance in each[7:]) > LEAST_LIMIT_DB


def test_a_board_cannot_count_more_in_one_small_tensor() -> None:
    boards = [{**each, "head": counted({"head": frames_of(0, values=50)["head"]})["head"]} for each in alike(5)]
    head = boards[0]["head"]
    liar = {**boards[0], "head": AbsHistogram(head.counts * 100, head.range_exp, head.amax, 0, 0)}
    sketches = [Sketch.from_histograms(each, TENSORS) for each in [*boards, liar]]
    assert sketches[-1].values.sum() < 2 * sketches[0].values.sum()
    group = Group(TENSORS, sketches)
    assert [group.outweighed(each).partition(",")[0] for each in sketches] == [*[""] * 5, "5000 values of 'head'"]


def test_a_tensor_that_a_board_has_only_seen_zeros_of_says_nothing_of_it() -> None:
    boards = alike(5)
    dead = dict(boards[0])
    dead["head"] = AbsHistogram(np.eye(1, 4096, dtype=np.int64)[0] * 1000, -100, 0.0, 1000, 0)
    assert found([*boards, dead]) == []


def test_a_group_that_is_spread_out_has_a_wider_limit() -> None:
    spread = OutlierLimits.from_distances([Distance(each, 0.0) for each in (0.0, 2.0, 4.0, 6.0, 8.0, 20.0)])
    assert spread.limit.to_board_db > 20.0
    assert spread.limit.to_group_db == LEAST_LIMIT_DB
    assert "would cost this board 40.0 dB, the median of all is 5.0" in spread.reason(Distance(40.0, 0.0))
    assert "this board's scales would cost the group 3.5 dB" in spread.reason(Distance(0.0, 3.5))
