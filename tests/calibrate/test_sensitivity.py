"""Group testing for the loud fusion groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from calibrate.sensitivity import Block, measure_blocks, share_out

Floats = NDArray[np.float64]

NOISE = st.lists(st.floats(0.0, 1e3), min_size=0, max_size=60).map(np.array)


def additive(true: Floats, limit: int | None = None) -> tuple[Callable[[Sequence[int]], float | None], list[int]]:
    """A measurement under which groups add up, None after `limit` of them; and the sizes of what was measured."""
    asked: list[int] = []

    def measure(members: Sequence[int]) -> float | None:
        assert len(members) > 0
        if limit is not None and len(asked) >= limit:
            return None
        asked.append(len(members))
        return float(true[list(members)].sum())

    return measure, asked


@given(NOISE, st.integers(0, 80))
def test_blocks_cover_every_group_once_within_the_runs(predicted: Floats, runs: int) -> None:
    true = predicted[::-1].copy()
    measure, asked = additive(true)
    blocks = measure_blocks(predicted, measure, runs)
    members = [index for block in blocks for index in block.members]
    assert members == (list(range(len(predicted))) if runs else [])
    assert len(asked) <= runs
    assert all(block.divergence == pytest.approx(true[list(block.members)].sum()) for block in blocks)


@given(NOISE, st.integers(1, 40), st.integers(0, 40))
def test_a_deadline_leaves_what_was_measured(predicted: Floats, runs: int, limit: int) -> None:
    true = np.sqrt(predicted)
    measure, _ = additive(true, limit)
    blocks = measure_blocks(predicted, measure, runs)
    members = [index for block in blocks for index in block.members]
    assert members == sorted(set(members))
    assert len(blocks) <= limit
    shares = share_out(predicted, blocks)
    assert shares.shape == predicted.shape
    assert (shares >= 0.0).all()
    assert shares[members].sum() == pytest.approx(true[members].sum())
    for block in blocks:
        assert shares[list(block.members)].sum() == pytest.approx(block.divergence)


def test_loud_groups_are_found_in_fewer_runs_than_there_are_groups() -> None:
    rng = np.random.default_rng(0)
    predicted = rng.uniform(0.5, 1.5, 200)  # says nothing of the loud ones
    true = 1e-4 * predicted
    loud = [17, 18, 120]
    true[loud] = [3.0, 1.0, 2.0]
    measure, asked = additive(true)
    blocks = measure_blocks(predicted, measure, 60)
    assert len(asked) < 60
    alone = {block.members[0]: block.divergence for block in blocks if len(block.members) == 1}
    assert [alone[index] for index in loud] == [3.0, 1.0, 2.0]
    assert np.argsort(-share_out(predicted, blocks))[:3].tolist() == [17, 120, 18]


def test_a_good_prediction_finds_the_loud_ones_with_the_first_blocks() -> None:
    predicted = np.full(100, 0.01)
    predicted[[7, 60]] = 1.0
    measure, asked = additive(predicted)
    blocks = measure_blocks(predicted, measure, 30)
    assert {(7,), (60,)} <= {block.members for block in blocks}
    assert len(asked) <= 30


def test_quiet_blocks_are_not_split() -> None:
    measure, asked = additive(np.zeros(100))
    blocks = measure_blocks(np.ones(100), measure, 50)
    assert len(blocks) == len(asked) == 16


def test_no_prediction_splits_evenly() -> None:
    blocks = measure_blocks(np.zeros(64), additive(np.ones(64))[0], 16)
    assert [len(block.members) for block in blocks] == [4] * 16
    assert share_out(np.zeros(64), blocks) == pytest.approx(np.ones(64))


def test_a_layer_without_a_measurement_gets_the_others_noise_per_prediction() -> None:
    predicted = np.array([1.0, 3.0, 2.0, 5.0])
    shares = share_out(predicted, [Block((0, 1), 8.0), Block((2,), 0.0)])
    assert shares.tolist() == [2.0, 6.0, 0.0, pytest.approx(5.0 * 8.0 / 6.0)]
    assert share_out(predicted, []).tolist() == predicted.tolist()


def test_measured_silence_is_silence() -> None:
    assert not share_out(np.array([1.0, 2.0, 3.0]), [Block((0, 1), 0.0)]).any()
