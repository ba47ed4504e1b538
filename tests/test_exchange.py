"""A change of engine as the supervisor sees it: journaled, judged, kept or taken back; no frame is served."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from worlds import SPEC

import agent.exchange as exchange_module
from agent.capture import Frame
from agent.change import Cause
from agent.config import Config
from agent.errors import AgentError
from agent.exchange import Exchange, Witnesses
from agent.findings import ObserverState, Served
from agent.messages import Birth
from agent.pipeline import Pipeline
from agent.probation import Record
from agent.reporting import Reporter
from agent.schema import validate
from agent.service import Loaded, Service
from agent.summary import RunSummary
from agent.trial import TrialEvents
from agent.verdict import Verdict
from calibrate.errors import TaredError
from calibrate.evidence import Interval
from engines.backend import EngineError

UNKNOWN, BAD = Interval(0.0, -1.0, 1.0, 0), Interval(-0.4, -0.6, -0.2, 30)
VERDICT = Verdict(True, "", 32, 0, 0.95, 0.9, 0.0, 0.0, 1.0, 1.0, 1.0)
IMAGE = np.zeros((2, 2, 3), np.uint8)
REFUSES = EngineError("store.write", "no space left", "a writable store", "check the disk")


class Told(list[Any]):
    """A JobObserver that keeps what it hears; `journal` is what it answers to a probation."""

    journal: AgentError | None = None

    def progress(self, step: str, _percent: int) -> None:
        self.append(("progress", step))

    def probation(self, artefact_id: str) -> None:
        if self.journal is not None:
            raise self.journal
        self.append(("probation", artefact_id))

    def succeed(self, result: dict[str, Any]) -> None:
        self.append(("succeed", result["artefact"]))

    def fail(self, error: TaredError) -> None:
        self.append(("fail", error.code))

    def roll_back(self, error: TaredError) -> None:
        self.append(("roll_back", error.code))


class Loop:
    """Of the frame path: what it was asked for; `on_trial` is false once it has gone back by itself."""

    on_trial = True
    keeping = False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def keep(self) -> bool:
        self.asked.append("keep")
        return self.on_trial

    def go_back(self, error: AgentError) -> bool:
        self.asked.append(error.code)
        return self.on_trial


@dataclass
class Bench:
    """An exchange of engine `old` for engine `new`."""

    exchange: Exchange
    record: Record
    pipeline: Any
    loop: Loop
    summary: RunSummary
    events: list[tuple[str, dict[str, Any]]]
    served: list[tuple[str | None, float]]
    rolled_back: list[str]
    rejected: list[tuple[str, str]]  # artefact, reason
    committed: list[str]
    disk: list[TaredError]  # what it refuses next, with
    closed: list[str] = field(default_factory=list)
    report: Told = field(default_factory=Told)
    frames: int = 0

    def start(self, trigger: str = "alarm", name: str = "new") -> TrialEvents | None:
        """What the frame path would tell, None where it has no trial."""
        artefact = SimpleNamespace(id=name, path=Path(name))
        engine = SimpleNamespace(close=lambda: self.closed.append(name))
        loaded = cast(Loaded, SimpleNamespace(artefact=artefact, engine=engine))
        self.pipeline.trial = None
        self.exchange.start(loaded, Cause(trigger, time.monotonic(), self.report, VERDICT))
        return cast("TrialEvents | None", self.pipeline.trial)

    def live(self, trigger: str = "alarm") -> TrialEvents:
        trial = self.start(trigger)
        assert trial is not None
        self.answer(1)
        trial.live(1.0, 0)
        return trial

    def answer(self, count: int, name: str = "new", inferred_s: float = 0.01) -> None:
        for _ in range(count):
            self.frames += 1
            frame = Frame(self.frames, self.frames / 10.0, 0, IMAGE)
            self.record.add(Served(frame, name, {}, 0, inferred_s))

    def tick(self, gain: Interval = UNKNOWN, drift: str = "calm") -> None:
        state = SimpleNamespace(gain=gain, drift=SimpleNamespace(state=drift))
        self.exchange.tick(cast(ObserverState, state))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    content = {
        "model": {**SPEC, "path": tmp_path / "model.onnx"},
        "camera": {"source": "clip.avi"},
        "state_dir": tmp_path,
        "probation": {"frames": 20, "seconds": 1.0},
    }
    config = validate(Config, content, "test")
    reporter = Reporter(None, Birth(agent_version="0"))
    events: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(reporter, "event", lambda kind, *_, **detail: events.append((kind, detail)))
    loop, record, committed, disk = Loop(), Record(live=False), list[str](), list[TaredError]()
    pipeline = SimpleNamespace(loop=loop, record=record, error=None, last_ts=7.0, dropped=0, trial=None)
    pipeline.observer = SimpleNamespace(state=lambda: SimpleNamespace(fidelity=UNKNOWN, gain=UNKNOWN, drift=None))
    pipeline.try_out = lambda _id, _engine, told: setattr(pipeline, "trial", told)
    service = SimpleNamespace(serving=SimpleNamespace(id="old"), degraded=False)

    def commit(loaded: Loaded) -> None:
        if disk:
            raise disk.pop(0)
        committed.append(loaded.artefact.id)

    def reject(artefact: Any, rollback: dict[str, Any]) -> None:
        assert report == [("probation", "new")] * (rollback["reason"] != "journal.write")  # its end is not written yet
        rejected.append((artefact.id, rollback["reason"]))
        raise REFUSES

    service.commit, service.reject = commit, reject
    summary = RunSummary("old")
    served: list[tuple[str | None, float]] = []
    rolled_back: list[str] = []
    rejected, report = list[tuple[str, str]](), Told()
    exchange = Exchange(
        config,
        cast(Service, service),
        cast(Pipeline, pipeline),
        reporter,
        summary,
        lambda function: function(),
        Witnesses(lambda loaded, ts: served.append((loaded.artefact.id if loaded else None, ts)), rolled_back.append),
    )
    return Bench(
        exchange, record, pipeline, loop, summary, events, served, rolled_back, rejected, committed, disk, report=report
    )


def test_it_is_kept_after_its_frames_and_seconds_and_committed_only_then(bench: Bench) -> None:
    bench.live()
    bench.answer(18)
    bench.tick()
    assert (bench.committed, bench.loop.asked, bench.summary.swaps) == ([], [], [])
    assert bench.exchange.under_way
    bench.answer(1)
    bench.tick()
    assert bench.committed == ["new"]
    assert bench.report == [("probation", "new"), ("succeed", "new")]
    assert bench.served == [("new", 1.0)]
    assert bench.kinds() == ["swap", "commit"]
    assert [swap.artefact for swap in bench.summary.swaps] == ["new"]
    assert not bench.exchange.under_way


@pytest.mark.parametrize(("before", "judged"), [(500, False), (1000, True)])
def test_what_a_probation_could_judge_is_told(bench: Bench, before: int, judged: bool) -> None:
    bench.pipeline.observer.state = lambda: SimpleNamespace(
        fidelity=Interval(0.95, 0.9, 1.0, 12), gain=UNKNOWN, drift=None
    )
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
    bench.loop.keeping = True
    bench.tick()
    assert bench.committed == ["new"]
    assert bench.exchange.under_way
    bench.loop.keeping = False
    assert not bench.exchange.under_way


@pytest.mark.parametrize("trigger", ["switch", "rollback"])
def test_an_engine_that_has_served_before_is_kept_with_its_first_answer(bench: Bench, trigger: str) -> None:
    bench.live(trigger)
    assert bench.committed == ["new"]
    assert bench.kinds() == ["rollback" if trigger == "rollback" else "swap", "commit"]


@pytest.mark.parametrize("trigger", ["switch", "rollback"])
def test_an_engine_that_has_served_before_stays_in_the_store_whatever_it_does(bench: Bench, trigger: str) -> None:
    trial = bench.start(trigger)
    assert trial is not None
    trial.failed(AgentError("probation.error", "a", "b", "c"), 0.0, False)
    bench.start(trigger)
    bench.exchange.stop("SIGTERM")
    assert (bench.rolled_back, bench.rejected) == (["new"], [])


def test_what_cannot_be_journaled_does_not_serve(bench: Bench) -> None:
    bench.report.journal = AgentError("journal.write", "a full disk", "room", "make some")
    assert bench.start() is None
    assert bench.report == [("fail", "journal.write")]
    assert bench.rejected == [("new", "journal.write")]
    assert bench.closed == ["new"]
    assert not bench.exchange.under_way


def test_while_another_candidate_hangs_none_is_tried(bench: Bench) -> None:
    def refuse(*_: object) -> None:
        raise AgentError("probation.stuck", "one that hangs", "none", "restart")

    bench.pipeline.try_out = refuse
    assert bench.start() is None
    assert bench.report[-1] == ("fail", "probation.stuck")
    assert not bench.exchange.under_way


def test_a_complaint_takes_it_back_and_says_so_once(bench: Bench) -> None:
    trial = bench.live()
    bench.answer(4)
    bench.tick(BAD)
    bench.tick(BAD)
    assert bench.loop.asked == ["probation.fidelity"]
    assert bench.report == [("probation", "new")]  # until the frame path has gone back
    bench.pipeline.dropped = 3
    trial.failed(AgentError("probation.fidelity", "a", "b", "c"), 6.0, False)
    assert bench.report[-1] == ("roll_back", "probation.fidelity")
    assert bench.served == [("new", 1.0), (None, 6.0)]
    (rollback,) = bench.summary.rollbacks
    assert (rollback.frames, rollback.suffered, rollback.missed, rollback.ts) == (5, 5, 3, 6.0)
    assert bench.kinds() == ["swap", "rollback", "error"]  # the disk refuses
    assert bench.rolled_back == ["new"]
    assert bench.rejected == [("new", "probation.fidelity")]
    assert (bench.committed, bench.summary.swaps) == ([], [])


def test_fidelity_in_a_light_that_changes_condemns_nobody_and_slowness_does(bench: Bench) -> None:
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
def test_one_that_fails_at_its_first_frame_or_in_its_rehearsal_was_never_live(bench: Bench, asked: bool) -> None:
    trial = bench.start()
    assert trial is not None
    trial.failed(AgentError("probation.error", "a", "b", "c"), 0.0, asked)
    assert bench.kinds()[0] == "rollback"
    assert bench.served == []
    assert (bench.summary.rollbacks[0].frames, bench.summary.rollbacks[0].suffered) == (0, int(asked))


@pytest.mark.parametrize(("degraded", "asked"), [(False, ["probation.latency"]), (True, ["keep"])])
def test_a_first_engine_may_be_slower_than_the_reference(bench: Bench, degraded: bool, asked: list[str]) -> None:
    cast(Any, bench.exchange)._service.degraded = degraded
    bench.answer(100, "old")
    bench.live()
    bench.answer(40, "new", 0.03)
    bench.tick()
    assert bench.loop.asked == asked


def test_one_that_fails_in_the_moment_it_is_to_be_kept_is_not(bench: Bench) -> None:
    trial = bench.live()
    bench.answer(19)
    bench.loop.on_trial = False
    bench.tick()
    assert bench.loop.asked == ["keep"]
    assert bench.committed == []
    trial.failed(AgentError("probation.error", "a", "b", "c"), 3.0, True)
    assert bench.report[-1] == ("roll_back", "probation.error")


def test_the_operator_takes_it_back_and_that_counts_against_nothing(bench: Bench) -> None:
    asks = Told()
    assert not bench.exchange.recall(asks)
    trial = bench.live()
    assert bench.exchange.recall(asks)
    assert not bench.exchange.recall(Told())
    trial.failed(AgentError("probation.recalled", "a", "b", "c"), 4.0, False)
    assert bench.report[-1] == ("roll_back", "probation.recalled")
    assert asks == [("succeed", "old")]
    assert (bench.rolled_back, bench.rejected) == ([], [("new", "probation.recalled")])


def test_a_recall_of_one_that_has_just_failed_by_itself_is_answered_with_what_serves(bench: Bench) -> None:
    asks, trial = Told(), bench.live()
    bench.loop.on_trial = False
    assert bench.exchange.recall(asks)
    assert asks == []
    trial.failed(AgentError("probation.error", "a", "b", "c"), 4.0, True)
    assert asks == [("succeed", "old")]
    assert bench.report[-1] == ("roll_back", "probation.error")
    assert bench.rolled_back == ["new"]


@pytest.mark.parametrize(
    ("error", "end"), [(None, ("roll_back", "probation.recalled")), (RuntimeError("broke"), ("fail", "swap.stopped"))]
)
def test_what_the_operator_wants_back_is_not_kept_where_frames_have_ended(
    bench: Bench, error: RuntimeError | None, end: tuple[str, str]
) -> None:
    asks, trial = Told(), bench.live()
    bench.loop.on_trial, bench.pipeline.error = False, error
    assert bench.exchange.recall(asks)
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


@pytest.mark.parametrize(("gain", "committed"), [(UNKNOWN, ["new"]), (BAD, [])])
def test_a_recording_that_ends_decides_by_what_it_has_shown(bench: Bench, gain: Interval, committed: list[str]) -> None:
    trial = bench.live()
    bench.pipeline.observer.state = lambda: SimpleNamespace(fidelity=UNKNOWN, gain=gain, drift=None)
    trial.ended()
    assert bench.committed == committed
    assert bench.report[-1] == (("succeed", "new") if committed else ("roll_back", "probation.fidelity"))


def test_one_that_no_frame_was_left_for_is_kept_by_its_verdict(bench: Bench) -> None:
    trial = bench.start()
    assert trial is not None
    trial.ended()
    assert bench.committed == ["new"]
    assert bench.served == [("new", 7.0)]
    assert bench.summary.swaps[0].ts is None


def test_a_frame_path_that_has_failed_keeps_nothing(bench: Bench) -> None:
    trial = bench.live()
    bench.pipeline.error = RuntimeError("the old engine broke")
    trial.ended()
    assert bench.report[-1] == ("fail", "swap.stopped")
    assert bench.rejected == [("new", "swap.stopped")]
    assert bench.committed == []


def test_what_the_disk_refuses_serves_on_and_is_made_current_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(exchange_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    bench.disk.extend([REFUSES, REFUSES])
    bench.live("switch")
    assert bench.report[-1] == ("fail", "store.write")
    assert bench.kinds() == ["swap"]
    assert [swap.artefact for swap in bench.summary.swaps] == ["new"]
    for now_s in (159.0, 160.0, 219.0):  # noqa: B007  # the clock that the exchange reads
        bench.tick()
        assert bench.committed == []
    now_s = 220.0
    bench.tick()
    assert bench.committed == ["new"]
    assert bench.kinds() == ["swap", "commit"]
    now_s = 400.0
    bench.tick()
    assert bench.committed == ["new"]


def test_what_is_kept_next_takes_the_place_of_what_the_disk_has_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(exchange_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    bench.disk.append(REFUSES)
    bench.live("switch")
    trial = bench.start("switch", "newer")
    assert trial is not None
    trial.live(2.0, 0)
    now_s = 1000.0
    bench.tick()
    assert bench.committed == ["newer"]
