from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.serving.trial import RunningMedian


@given(st.lists(st.floats(0.0, 10.0, width=16), min_size=1, max_size=60), st.integers(1, 12))
def test_it_is_that_of_the_newest_values(values: list[float], window: int) -> None:
    median = RunningMedian(window)
    for count, value in enumerate(values, start=1):
        newest = sorted(values[max(0, count - window) : count])
        assert median.add(value) == newest[len(newest) // 2]
