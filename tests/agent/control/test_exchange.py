"""A change of engine: journaled, judged, kept and made current; no frame is served."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exchange_bench import BAD, REFUSES, UNKNOWN, Bench, bench, job_desk, two_engines

from agent.common.errors import AgentError
from agent.jobs.job import JobJournal
from calibrate.statistics.evidence import Interval

__all__ = ["bench", "job_desk", "two_engines"]  # fixtures

ERROR = AgentError("probation.error", "a", "b", "c")


def test_a_candidate_is_committed_after_its_frames_and_seconds_and_not_before(bench: Bench) -> None:
    bench.live()
    bench.answer(18)
    bench.tick()
    assert (bench.current, bench.loop.asked, bench.executor.summary.swaps) == (bench.old, [], [])
    assert bench.ends() == [("PROBATION", "")]
    bench.answer(1)
    bench.tick()
    assert bench.current == bench.new
    assert bench.ends() == [("COMMITTED", "")]
    assert bench.kinds() == ["swap", "commit"]
    assert [swap.artefact for swap in bench.executor.summary.swaps] == [bench.new]
    assert bench.executor.state.trial is None


def test_the_candidate_is_what_serves_on_probation(bench: Bench) -> None:
    trial = bench.start()
    assert bench.executor.state.candidate is None  # it has not answered yet
    trial.live(1.0, 0)
    assert bench.executor.state.candidate == bench.new
    trial.failed(ERROR, 0.0, False)
    assert bench.executor.state.candidate is None


@pytest.mark.parametrize(("before", "judged"), [(500, False), (1000, True)])
def test_a_commit_reports_the_evidence_of_its_probation(bench: Bench, before: int, judged: bool) -> None:
    bench.state = replace(bench.state, fidelity=Interval(0.95, 0.9, 1.0, 12))
    bench.answer(before, old=True)
    bench.live()
    bench.answer(39)
    bench.tick()
    detail = next(detail for kind, detail in bench.events if kind == "commit")
    assert (detail["frames"], detail["fidelity_frames"], detail["p99_judged"]) == (40, 12, judged)


@pytest.mark.parametrize(("kind", "reported"), [("switch", "swap"), ("rollback", "rollback")])
def test_an_engine_that_has_served_before_is_committed_with_its_first_answer(
    bench: Bench, kind: str, reported: str
) -> None:
    bench.live(kind)
    assert bench.current == bench.new
    assert bench.kinds()[-2:] == [reported, "commit"]


@pytest.mark.parametrize("kind", ["switch", "rollback"])
def test_an_engine_that_has_served_before_stays_in_the_store_whatever_it_does(bench: Bench, kind: str) -> None:
    bench.start(kind).failed(ERROR, 0.0, False)
    bench.start(kind)
    bench.executor.stop("SIGTERM")
    assert bench.executor.service.store.find(bench.new).id == bench.new
    assert bench.ends() == [("ROLLED_BACK", "probation.error"), ("CANCELLED", "recalibration.cancelled")]


def test_a_candidate_that_cannot_be_journaled_does_not_serve(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    enter = JobJournal.enter

    def refuse(journal: JobJournal, job: str, state: object, **outcome: object) -> None:
        if str(getattr(state, "value", "")) == "PROBATION":
            raise AgentError("state.write", "a full disk", "room", "make some")
        enter(journal, job, state, **outcome)  # type: ignore[arg-type]

    monkeypatch.setattr(JobJournal, "enter", refuse)
    with pytest.raises(AssertionError):
        bench.start()
    assert bench.ends() == [("FAILED", "state.write")]
    assert bench.executor.state.trial is None


def test_while_another_candidate_hangs_none_is_tried(bench: Bench) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AgentError("probation.stuck", "one that hangs", "none", "restart")

    bench.pipeline.start_trial = refuse
    with pytest.raises(AssertionError):
        bench.start()
    assert bench.ends() == [("FAILED", "probation.stuck")]
    assert bench.executor.state.trial is None


@pytest.mark.parametrize(("degraded", "asked"), [(False, ["probation.latency"]), (True, ["keep"])])
def test_a_first_engine_may_be_slower_than_the_reference(bench: Bench, degraded: bool, asked: list[str]) -> None:
    if degraded:
        bench.executor.service.calibration = None
    bench.answer(100, old=True)
    bench.live()
    bench.answer(40, inferred_s=0.03)
    bench.tick()
    assert bench.loop.asked == asked


@pytest.mark.parametrize(("gain", "end"), [(UNKNOWN, ("COMMITTED", "")), (BAD, ("ROLLED_BACK", "probation.fidelity"))])
def test_a_recording_that_ends_decides_by_what_it_has_shown(bench: Bench, gain: Interval, end: tuple[str, str]) -> None:
    trial = bench.live()
    bench.state = replace(bench.state, gain=gain)
    trial.ended()
    assert bench.ends() == [end]
    assert (bench.current == bench.new) is (end[0] == "COMMITTED")


def test_a_candidate_without_further_frames_is_kept_by_its_verdict(bench: Bench) -> None:
    bench.start().ended()
    assert bench.current == bench.new
    assert bench.executor.summary.swaps[0].ts is None


def test_a_frame_path_that_has_failed_commits_nothing(bench: Bench) -> None:
    trial = bench.live()
    bench.pipeline.error = RuntimeError("the old engine broke")
    trial.ended()
    assert bench.ends() == [("FAILED", "swap.stopped")]
    assert bench.current == bench.old


def test_an_engine_that_the_disk_refuses_serves_on_and_is_made_current_later(bench: Bench) -> None:
    bench.disk.extend([REFUSES, REFUSES])
    bench.live("switch")
    assert bench.ends() == [("FAILED", "store.write")]
    assert [swap.artefact for swap in bench.executor.summary.swaps] == [bench.new]
    for seconds in (59.0, 1.0, 59.0):
        bench.clock.turn(seconds)
        bench.tick()
        assert bench.current == bench.old
    bench.clock.turn(1.0)
    bench.tick()
    assert bench.current == bench.new
    assert bench.kinds().count("commit") == 1
    bench.clock.turn(180.0)
    bench.tick()
    assert bench.kinds().count("commit") == 1


def test_the_next_engine_takes_the_place_of_one_that_the_disk_has_refused(bench: Bench) -> None:
    bench.disk.append(REFUSES)
    bench.live("switch")
    trial = bench.start("switch", bench.old)
    trial.live(2.0, 0)
    bench.clock.turn(900.0)
    bench.tick()
    assert bench.current == bench.old
    assert bench.kinds().count("commit") == 1
