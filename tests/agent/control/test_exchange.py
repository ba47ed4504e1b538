"""A change of engine as the supervisor sees it: journaled, judged, kept and committed; no frame is served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from exchange_bench import BAD, REFUSES, UNKNOWN, Bench, bench

from agent.common.errors import AgentError
from calibrate.statistics.evidence import Interval

__all__ = ["bench"]  # the fixture


def test_a_candidate_is_committed_after_its_frames_and_seconds_and_not_before(bench: Bench) -> None:
    bench.live()
    bench.answer(18)
    bench.tick()
    assert (bench.committed, bench.loop.asked, bench.summary.swaps) == ([], [], [])
    assert bench.exchange.is_active
    bench.answer(1)
    bench.tick()
    assert bench.committed == ["new"]
    assert bench.report == [("probation", "new"), ("succeed", "new")]
    assert bench.served == [("new", 1.0)]
    assert bench.kinds() == ["swap", "commit"]
    assert [swap.artefact for swap in bench.summary.swaps] == ["new"]
    assert not bench.exchange.is_active


def test_the_candidate_is_what_serves_on_probation(bench: Bench) -> None:
    trial = bench.start()
    assert trial is not None
    assert bench.exchange.candidate is None  # it has not answered yet
    trial.live(1.0, 0)
    assert bench.exchange.candidate == "new"
    trial.failed(AgentError("probation.error", "a", "b", "c"), 0.0, False)
    assert bench.exchange.candidate is None
    bench.live()
    bench.answer(19)
    bench.tick()
    assert (bench.committed, bench.exchange.candidate) == (["new"], None)


@pytest.mark.parametrize(("before", "judged"), [(500, False), (1000, True)])
def test_a_commit_reports_the_evidence_of_its_probation(bench: Bench, before: int, judged: bool) -> None:
    state = SimpleNamespace(fidelity=Interval(0.95, 0.9, 1.0, 12), gain=UNKNOWN, is_loss=False, drift=None)
    bench.pipeline.observer.states = lambda: {"camera": state}
    bench.answer(before, "old")
    bench.live()
    bench.answer(39)
    bench.tick()
    kind, detail = bench.events[-1]
    assert (kind, detail["frames"], detail["fidelity_frames"], detail["p99_judged"]) == ("commit", 40, 12, judged)


def test_a_change_is_under_way_until_the_frame_path_has_parted_with_the_engine_before(bench: Bench) -> None:
    """A camera that is lost then brings no frame for it."""
    bench.live()
    bench.answer(19)
    bench.loop.is_committing = True
    bench.tick()
    assert bench.committed == ["new"]
    assert bench.exchange.is_active
    bench.loop.is_committing = False
    assert not bench.exchange.is_active


@pytest.mark.parametrize(("trigger", "reported"), [("switch", "swap"), ("rollback", "rollback")])
def test_an_engine_that_has_served_before_is_committed_with_its_first_answer(
    bench: Bench, trigger: str, reported: str
) -> None:
    bench.live(trigger)
    assert bench.committed == ["new"]
    assert bench.kinds() == [reported, "commit"]


@pytest.mark.parametrize("trigger", ["switch", "rollback"])
def test_an_engine_that_has_served_before_stays_in_the_store_whatever_it_does(bench: Bench, trigger: str) -> None:
    trial = bench.start(trigger)
    assert trial is not None
    trial.failed(AgentError("probation.error", "a", "b", "c"), 0.0, False)
    bench.start(trigger)
    bench.exchange.stop("SIGTERM")
    assert (bench.rolled_back, bench.rejected) == (["new"], [])


def test_a_candidate_that_cannot_be_journaled_does_not_serve(bench: Bench) -> None:
    bench.report.journal = AgentError("state.write", "a full disk", "room", "make some")
    assert bench.start() is None
    assert bench.report == [("fail", "state.write")]
    assert bench.rejected == [("new", "state.write")]
    assert bench.closed == ["new"]
    assert not bench.exchange.is_active


def test_while_another_candidate_hangs_none_is_tried(bench: Bench) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AgentError("probation.stuck", "one that hangs", "none", "restart")

    bench.pipeline.start_trial = refuse
    assert bench.start() is None
    assert bench.report[-1] == ("fail", "probation.stuck")
    assert not bench.exchange.is_active


@pytest.mark.parametrize(("degraded", "asked"), [(False, ["probation.latency"]), (True, ["keep"])])
def test_a_first_engine_may_be_slower_than_the_reference(bench: Bench, degraded: bool, asked: list[str]) -> None:
    cast(Any, bench.exchange).service.is_degraded = degraded
    bench.answer(100, "old")
    bench.live()
    bench.answer(40, "new", 0.03)
    bench.tick()
    assert bench.loop.asked == asked


@pytest.mark.parametrize(("gain", "committed"), [(UNKNOWN, ["new"]), (BAD, [])])
def test_a_recording_that_ends_decides_by_what_it_has_shown(bench: Bench, gain: Interval, committed: list[str]) -> None:
    trial = bench.live()
    state = SimpleNamespace(fidelity=UNKNOWN, gain=gain, is_loss=False, drift=None)
    bench.pipeline.observer.states = lambda: {"camera": state}
    trial.ended()
    assert bench.committed == committed
    assert bench.report[-1] == (("succeed", "new") if committed else ("roll_back", "probation.fidelity"))


def test_a_candidate_without_further_frames_is_kept_by_its_verdict(bench: Bench) -> None:
    trial = bench.start()
    assert trial is not None
    trial.ended()
    assert bench.committed == ["new"]
    assert bench.served == [("new", 7.0)]
    assert bench.summary.swaps[0].ts is None


def test_a_frame_path_that_has_failed_commits_nothing(bench: Bench) -> None:
    trial = bench.live()
    bench.pipeline.error = RuntimeError("the old engine broke")
    trial.ended()
    assert bench.report[-1] == ("fail", "swap.stopped")
    assert bench.rejected == [("new", "swap.stopped")]
    assert bench.committed == []


def test_an_engine_that_the_disk_refuses_serves_on_and_is_made_current_later(bench: Bench) -> None:
    bench.disk.extend([REFUSES, REFUSES])
    bench.live("switch")
    assert bench.report[-1] == ("fail", "store.write")
    assert bench.kinds() == ["swap"]
    assert [swap.artefact for swap in bench.summary.swaps] == ["new"]
    for seconds in (59.0, 1.0, 59.0):
        bench.clock.turn(seconds)
        bench.tick()
        assert bench.committed == []
    bench.clock.turn(1.0)
    bench.tick()
    assert bench.committed == ["new"]
    assert bench.kinds() == ["swap", "commit"]
    bench.clock.turn(180.0)
    bench.tick()
    assert bench.committed == ["new"]


def test_the_next_engine_takes_the_place_of_one_that_the_disk_has_refused(bench: Bench) -> None:
    bench.disk.append(REFUSES)
    bench.live("switch")
    trial = bench.start("switch", "newer")
    assert trial is not None
    trial.live(2.0, 0)
    bench.clock.turn(900.0)
    bench.tick()
    assert bench.committed == ["newer"]
