"""A change of engine that is taken back: by its judges, by itself, by the operator or by a signal."""

from __future__ import annotations

from collections import Counter

import pytest
from exchange_bench import BAD, Bench, Calls, bench

from agent.common.errors import AgentError

__all__ = ["bench"]  # the fixture


def test_an_objection_takes_the_candidate_back_and_is_reported_once(bench: Bench) -> None:
    trial = bench.live()
    bench.answer(4)
    bench.tick(BAD)
    bench.tick(BAD)
    assert bench.loop.asked == ["probation.fidelity"]
    assert bench.report == [("probation", "new")]  # until the frame path has gone back
    bench.pipeline.dropped = Counter({"stale": 3})
    trial.failed(AgentError("probation.fidelity", "a", "b", "c"), 6.0, False)
    assert bench.report[-1] == ("roll_back", "probation.fidelity")
    assert bench.served == [("new", 1.0), (None, 6.0)]
    (rollback,) = bench.summary.rollbacks
    assert (rollback.frames, rollback.suffered, rollback.missed, rollback.ts) == (5, 5, 3, 6.0)
    assert bench.kinds() == ["swap", "rollback", "error"]  # the disk refuses
    assert bench.rolled_back == ["new"]
    assert bench.rejected == [("new", "probation.fidelity")]
    assert (bench.committed, bench.summary.swaps) == ([], [])


def test_fidelity_in_a_changing_light_rolls_nothing_back_and_slowness_does(bench: Bench) -> None:
    bench.answer(100, "old")
    bench.live()
    for drift in ("warning", "alarm"):
        bench.tick(BAD, drift)
    assert bench.loop.asked == []
    bench.answer(40, "new", 0.03)
    bench.tick(BAD, "alarm")
    bench.tick(BAD, "alarm")
    assert bench.loop.asked == ["probation.latency"]


@pytest.mark.parametrize("asked", [True, False])
def test_a_candidate_that_fails_at_its_first_frame_was_never_live(bench: Bench, asked: bool) -> None:
    trial = bench.start()
    assert trial is not None
    trial.failed(AgentError("probation.error", "a", "b", "c"), 0.0, asked)
    assert bench.kinds()[0] == "rollback"
    assert bench.served == []
    assert (bench.summary.rollbacks[0].frames, bench.summary.rollbacks[0].suffered) == (0, int(asked))


def test_a_candidate_that_fails_as_it_is_committed_is_not_kept(bench: Bench) -> None:
    trial = bench.live()
    bench.answer(19)
    bench.loop.on_trial = False
    bench.tick()
    assert bench.loop.asked == ["keep"]
    assert bench.committed == []
    trial.failed(AgentError("probation.error", "a", "b", "c"), 3.0, True)
    assert bench.report[-1] == ("roll_back", "probation.error")


def test_a_recall_takes_the_candidate_back_and_counts_as_no_failure(bench: Bench) -> None:
    asks = Calls()
    assert not bench.recall(asks)
    trial = bench.live()
    assert bench.recall(asks)
    assert not bench.recall(Calls())
    trial.failed(AgentError("probation.recalled", "a", "b", "c"), 4.0, False)
    assert bench.report[-1] == ("roll_back", "probation.recalled")
    assert asks == [("succeed", "old")]
    assert (bench.rolled_back, bench.rejected) == ([], [("new", "probation.recalled")])


def test_a_recall_of_one_that_has_just_failed_by_itself_is_answered_with_what_serves(bench: Bench) -> None:
    asks, trial = Calls(), bench.live()
    bench.loop.on_trial = False
    assert bench.recall(asks)
    assert asks == []
    trial.failed(AgentError("probation.error", "a", "b", "c"), 4.0, True)
    assert asks == [("succeed", "old")]
    assert bench.report[-1] == ("roll_back", "probation.error")
    assert bench.rolled_back == ["new"]


@pytest.mark.parametrize(
    ("error", "end"), [(None, ("roll_back", "probation.recalled")), (RuntimeError("broke"), ("fail", "swap.stopped"))]
)
def test_a_recalled_candidate_is_not_kept_where_frames_have_ended(
    bench: Bench, error: RuntimeError | None, end: tuple[str, str]
) -> None:
    asks, trial = Calls(), bench.live()
    bench.loop.on_trial, bench.pipeline.error = False, error
    assert bench.recall(asks)
    trial.ended()
    assert asks == [("succeed", "old")]
    assert bench.report[-1] == end
    assert bench.committed == []


def test_an_end_by_a_signal_keeps_nothing(bench: Bench) -> None:
    trial = bench.live()
    bench.exchange.stop("SIGTERM")
    trial.ended()
    bench.exchange.stop("SIGTERM")
    assert bench.report[1:] == [("fail", "recalibration.cancelled")]
    assert bench.rejected == [("new", "recalibration.cancelled")]
    assert (bench.committed, bench.summary.swaps) == ([], [])
