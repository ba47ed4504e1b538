"""Which state of a job may follow which."""

from __future__ import annotations

import itertools

import pytest

from agent.core.state import JobState

STATES = tuple(JobState)
PATH = STATES[: STATES.index(JobState.COMMITTED)]  # all but the ends, in order


def test_a_job_goes_forward_only() -> None:
    for earlier, later in itertools.product(PATH, PATH):
        assert earlier.may_become(later) is (PATH.index(earlier) < PATH.index(later))


@pytest.mark.parametrize("end", [JobState.FAILED, JobState.CANCELLED])
def test_a_job_may_come_to_nothing_at_any_time(end: JobState) -> None:
    assert all(state.may_become(end) for state in PATH)


def test_a_job_is_committed_after_probation_or_a_build() -> None:
    before = [state for state in STATES if state.may_become(JobState.COMMITTED)]
    assert before == [JobState.BUILDING, JobState.VALIDATING, JobState.PROBATION]


def test_only_a_job_on_probation_is_rolled_back() -> None:
    assert [state for state in STATES if state.may_become(JobState.ROLLED_BACK)] == [JobState.PROBATION]


def test_an_end_is_an_end() -> None:
    ends = [state for state in STATES if state.is_finished]
    assert ends == [JobState.COMMITTED, JobState.ROLLED_BACK, JobState.FAILED, JobState.CANCELLED]
    assert not any(end.may_become(state) for end in ends for state in STATES)
