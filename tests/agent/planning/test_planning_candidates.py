"""Which plans are tried for a certificate: the fastest first where it hardly loses."""

from __future__ import annotations

import numpy as np
import pytest

from agent.planning.search import choose_candidates
from agent.planning.what_if import WhatIfResult
from calibrate.partition import Partition


def partition(noise: float, time: float, int8: int = 1) -> Partition:
    return Partition(np.arange(4) < int8, time, noise)


def test_a_plan_that_loses_too_much_on_the_search_frames_is_no_candidate() -> None:
    losses = iter([0.3, 0.05, 0.1, 0.0])
    plans = [partition(1.0, float(n)) for n in range(4)]
    candidates, tried = choose_candidates(plans, lambda _: WhatIfResult(0.0, next(losses), 8), 0.1, 2)
    assert [each.partition.time for each in candidates] == [1.0, 2.0]
    assert [each.partition.time for each in tried] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("loss", "first"), [(0.02, 0.0), (0.03, 1.0)])
def test_the_fastest_plan_goes_first_where_it_hardly_loses(loss: float, first: float) -> None:
    quicker, quieter = partition(2.0, 0.0), partition(1.0, 1.0)
    losses = iter([loss, 0.0])
    candidates, tried = choose_candidates(
        [quieter], lambda _: WhatIfResult(0.0, next(losses), 8), 0.1, 5, fastest=quicker
    )
    assert candidates[0].partition.time == first
    assert len(tried) == 2
