"""A change of engine that is taken back: by its judges, by itself, by the operator or by a signal."""

from __future__ import annotations

from collections import Counter

import pytest
from exchange_bench import BAD, Bench, bench, job_desk, two_engines

from agent.common.errors import AgentError

__all__ = ["bench", "job_desk", "two_engines"]  # fixtures


def error(code: str) -> AgentError:
    return AgentError(code, "a", "b", "c")


def test_an_objection_takes_the_candidate_back_and_is_reported_once(bench: Bench) -> None:
    trial = bench.live()
    bench.answer(4)
    bench.tick(BAD)
    bench.tick(BAD)
    assert bench.loop.asked == ["probation.fidelity"]
    assert bench.ends() == [("PROBATION", "")]  # until the frame path has gone back
    bench.pipeline.dropped = Counter({"stale": 3})
    trial.failed(error("probation.fidelity"), 6.0, False)
    assert bench.ends() == [("ROLLED_BACK", "probation.fidelity")]
    (rollback,) = bench.executor.summary.rollbacks
    assert (rollback.frames, rollback.suffered, rollback.missed, rollback.ts) == (5, 5, 3, 6.0)
    assert bench.kinds() == ["swap", "rollback", "error"]  # the job's
    assert len(bench.executor.state.memory.restraint.rollbacks_s) == 1
    assert (bench.current, bench.executor.summary.swaps) == (bench.old, [])


def test_fidelity_in_a_changing_light_rolls_nothing_back_and_slowness_does(bench: Bench) -> None:
    bench.answer(100, old=True)
    bench.live()
    for drift in ("warning", "alarm"):
        bench.tick(BAD, drift)
    assert bench.loop.asked == []
    bench.answer(40, inferred_s=0.03)
    bench.tick(BAD, "alarm")
    bench.tick(BAD, "alarm")
    assert bench.loop.asked == ["probation.latency"]


@pytest.mark.parametrize("waited", [True, False])
def test_a_candidate_that_fails_at_its_first_frame_was_never_live(bench: Bench, waited: bool) -> None:
    bench.start().failed(error("probation.error"), 0.0, waited)
    assert bench.kinds()[0] == "rollback"
    (rollback,) = bench.executor.summary.rollbacks
    assert (rollback.frames, rollback.suffered) == (0, int(waited))


def test_a_candidate_that_fails_as_it_is_committed_is_not_kept(bench: Bench) -> None:
    trial = bench.live()
    bench.answer(19)
    bench.loop.on_trial = False
    bench.tick()
    assert bench.loop.asked == ["keep"]
    trial.failed(error("probation.error"), 3.0, True)
    assert bench.ends() == [("ROLLED_BACK", "probation.error")]
    assert bench.current == bench.old


def test_a_recall_takes_the_candidate_back_and_counts_as_no_failure(bench: Bench) -> None:
    trial = bench.live()
    assert not bench.recall("c1").final
    recalls = bench.recalls
    assert bench.recall("c2").status == "FAILED", "one is enough"
    trial.failed(error("probation.recalled"), 4.0, False)
    assert bench.ends() == [("ROLLED_BACK", "probation.recalled"), ("COMMITTED", "")]
    assert recalls[-1].result == {"artefact": bench.old}
    assert bench.executor.state.memory.restraint.rollbacks_s == ()


def test_a_recall_of_one_that_has_just_failed_by_itself_is_answered_with_what_serves(bench: Bench) -> None:
    trial = bench.live()
    bench.loop.on_trial = False
    assert not bench.recall("c1").final
    trial.failed(error("probation.error"), 4.0, True)
    assert bench.recalls[-1].result == {"artefact": bench.old}
    assert bench.ends()[0] == ("ROLLED_BACK", "probation.error")
    assert len(bench.executor.state.memory.restraint.rollbacks_s) == 1


@pytest.mark.parametrize(
    ("broken", "end"),
    [(None, ("ROLLED_BACK", "probation.recalled")), (RuntimeError("broke"), ("FAILED", "swap.stopped"))],
)
def test_a_recalled_candidate_is_not_kept_where_frames_have_ended(
    bench: Bench, broken: RuntimeError | None, end: tuple[str, str]
) -> None:
    trial = bench.live()
    bench.loop.on_trial, bench.pipeline.error = False, broken
    bench.recall("c1")
    trial.ended()
    assert bench.recalls[-1].result == {"artefact": bench.old}
    assert bench.ends()[0] == end
    assert bench.current == bench.old


def test_an_end_by_a_signal_keeps_nothing(bench: Bench) -> None:
    trial = bench.live()
    bench.executor.stop("SIGTERM")
    trial.ended()
    bench.executor.stop("SIGTERM")
    assert bench.ends() == [("CANCELLED", "recalibration.cancelled")]
    assert (bench.current, bench.executor.summary.swaps) == (bench.old, [])
