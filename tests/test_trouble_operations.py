"""What the daemon decides while the view is in trouble, state by state: to tell, and to wait; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import onnx
import pytest
from raising_world import collapsing_net, observer_state, observing
from test_raising_operations import frame_path, stored
from test_view import camera, scene, watched
from worlds import SPEC

from agent.commands import Report
from agent.config import Config
from agent.errors import AgentError, CommandError
from agent.findings import Findings, ObserverState
from agent.gathering import Gathering
from agent.job_journal import JobJournal
from agent.job_states import JobState
from agent.messages import Birth
from agent.operations import Operations
from agent.orders import Orders
from agent.outcome import Outcome
from agent.pipeline import Pipeline
from agent.reporting import Reporter
from agent.requests import CommandResult, RecalibrateArgs, RollbackArgs
from agent.schema import validate
from agent.view import ViewState
from calibrate.evidence import Interval
from engines.artefact import Artefact

TROUBLES = ["blind", "moved", "blurred", "frozen"]


@dataclass
class Desk:
    """Operations on two engines, the first of which serves; an alarm is on."""

    operations: Operations
    journal: JobJournal
    findings: Findings
    gathering: Gathering
    other: Artefact
    state: ObserverState
    told: list[tuple[str, dict[str, Any]]]
    results: list[CommandResult] = field(default_factory=list)

    def tick(self, trouble: str = "", telling: int = 0, times: int = 2, **drift: Any) -> str:
        """So many looks at one state; what the running job was started by."""
        assert self.state.drift is not None
        view = ViewState(trouble, {"alike": 0.12345} if trouble else {})
        state = replace(self.state, view=view, telling=telling, drift=replace(self.state.drift, **drift))
        for _ in range(times):
            self.operations.tick({"camera": state})
        job = self.operations._jobs.job
        return job.trigger if job is not None else ""

    def recalibrate(self) -> None:
        assert self.operations.recalibrate(Report("c1", self.results.append), RecalibrateArgs())

    def accept(self) -> None:
        """The running job has built an engine that passed."""
        job, self.operations._jobs.job = self.operations._jobs.job, None
        assert job is not None
        self.operations._on_candidate(job, Outcome(artefact=self.other.path))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [detail for each, detail in self.told if each == kind]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Desk]:
    onnx.save(collapsing_net(), tmp_path / "model.onnx")

    def make(task: str = "classify", frames: int = 1) -> Desk:
        content = {
            "model": {**SPEC, "path": tmp_path / "model.onnx"},
            "camera": {"source": "rtsp://camera"},
            "state_dir": tmp_path / "state",
            "probation": {"frames": frames, "seconds": 0.0},
        }
        config = validate(Config, content, "test")
        service, artefacts = stored(config)
        told: list[tuple[str, dict[str, Any]]] = []
        reporter = Reporter(None, Birth(agent_version="0"))
        monkeypatch.setattr(reporter, "event", lambda kind, *_, **detail: told.append((kind, detail)))
        state = observer_state(config, drift="alarm", serving_db=9.0)
        observer = observing(config, state)
        pipeline = SimpleNamespace(is_live=False, observer=observer, last_ts=0.0, **frame_path())
        spec = config.model.model_copy(update={"task": task})
        config = config.model_copy(update={"model": spec})
        journal = JobJournal(config.state_dir / "jobs.sqlite", lambda error: pytest.fail(str(error)))
        operations = Operations(
            config, service, cast(Pipeline, pipeline), reporter, lambda function: function(), journal
        )
        operations.start(0)
        other = next(each for each in artefacts if each.id != service.serving.id)
        return Desk(operations, journal, observer.findings["camera"], observer.gathering, other, state, told)

    return make


@pytest.mark.parametrize("trouble", TROUBLES)
def test_an_alarm_is_told_with_the_trouble_and_its_evidence_and_starts_nothing(
    desk: Callable[..., Desk], trouble: str
) -> None:
    at = desk()
    assert at.tick(trouble, telling=9) == ""
    (alarm,) = at.events("alarm")
    assert (alarm["trouble"], alarm["alike"]) == (trouble, 0.123)
    assert at.tick() == "alarm"  # what ends the trouble lets it act


def test_an_alarm_in_a_good_view_names_no_trouble_and_is_answered(desk: Callable[..., Desk]) -> None:
    at = desk()
    assert at.tick(times=1) == "alarm"
    assert "trouble" not in at.events("alarm")[0]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_regime_is_switched_to_for_a_view_in_trouble(desk: Callable[..., Desk], trouble: str) -> None:
    at = desk()
    serving = at.operations._service.serving.id
    at.tick(trouble, state="calm", switch_to=at.other.id)
    assert at.operations._service.serving.id == serving
    at.tick(state="calm", switch_to=at.other.id)
    assert at.operations._service.serving.id == at.other.id


@pytest.mark.parametrize("trouble", TROUBLES)
def test_precision_is_not_raised_for_a_view_in_trouble(desk: Callable[..., Desk], trouble: str) -> None:
    at = desk()
    assert at.tick(trouble, state="calm", serving_db=0.0) == ""
    assert at.tick(state="calm", serving_db=0.0) == "precision"


@pytest.mark.parametrize(
    ("task", "trouble", "telling", "trigger"),
    [
        ("detect", "blind", 1, "alarm"),
        ("detect", "blind", 0, ""),
        ("classify", "blind", 1, ""),
        ("detect", "moved", 1, ""),
        ("detect", "blurred", 1, ""),
    ],
)
def test_a_dark_street_with_cars_is_something_to_go_by(
    desk: Callable[..., Desk], task: str, trouble: str, telling: int, trigger: str
) -> None:
    at = desk(task)
    assert at.tick(trouble, telling) == trigger


def test_a_dark_street_with_cars_may_have_its_regime(desk: Callable[..., Desk]) -> None:
    at = desk("detect")
    at.tick("blind", telling=1, state="calm", switch_to=at.other.id)
    assert at.operations._service.serving.id == at.other.id


def test_what_was_found_by_day_is_no_car_in_the_dark(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was collected of another view counts no more: neither as a sign that something is seen nor as a cure."""
    at = desk("detect")
    begun: list[str] = []
    monkeypatch.setattr(at.gathering, "collect_afresh", lambda: begun.append("afresh"))
    at.tick(telling=5, state="calm", serving_db=9.0)
    assert at.tick("blind", telling=5, times=1) == ""
    assert len(begun) == 1
    for trouble in ("blind", "frozen", "blind"):  # a frozen view adds nothing to what is collected
        at.tick(trouble)
    assert len(begun) == 1
    at.tick(times=1)
    assert len(begun) == 2


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_operators_word_starts_a_job_and_a_trouble_then_takes_nothing_from_it(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    at = desk()
    at.tick(trouble)
    at.recalibrate()
    monkeypatch.setattr(at.gathering, "collect_afresh", pytest.fail)
    assert at.tick() == at.tick(trouble) == "command"


def moved(at: Desk) -> Desk:
    """Its camera looks elsewhere."""
    at.findings._view = watched(lambda number: camera(number, scene(5)), 20)
    assert trouble(at) == "moved"
    return at


def trouble(at: Desk) -> str:
    return at.findings._view.state.trouble


def test_an_operators_recalibration_makes_the_present_view_the_usual_one(desk: Callable[..., Desk]) -> None:
    at = moved(desk())
    at.recalibrate()
    assert trouble(at) == "moved"
    at.accept()
    assert at.results[-1].status == "SUCCEEDED"
    for number in range(100):
        at.findings._view.look(float(number), camera(number, scene(5)))
        assert trouble(at) == ""


def test_what_comes_of_an_alarm_or_of_nothing_leaves_the_usual_view_as_it_was(desk: Callable[..., Desk]) -> None:
    at = moved(desk())
    at.recalibrate()
    at.operations.stop("the operator thinks again")
    assert trouble(at) == "moved"
    assert at.tick() == "alarm"
    at.accept()
    assert at.events("swap")[-1]["trigger"] == "alarm"
    assert trouble(at) == "moved"


def test_a_rollback_on_probation_takes_the_candidate_back_and_keeps_what_was_current(
    desk: Callable[..., Desk],
) -> None:
    at = desk(frames=100)
    before = at.operations.summary.artefact
    at.recalibrate()
    at.accept()
    assert at.operations.exchanging
    assert at.tick(state="alarm", serving_db=9.0) == ""  # nothing else is begun meanwhile
    handlers = Orders(at.operations, at.operations._service, at.operations._pipeline).handlers
    answers: list[CommandResult] = []
    handlers["rollback"](RollbackArgs(), Report("c2", answers.append))
    assert [answer.status for answer in answers] == ["ACCEPTED", "IN_PROGRESS", "SUCCEEDED"]
    assert at.results[-1].error is not None
    assert at.results[-1].error.code == "probation.recalled"
    assert at.events("rollback")[-1]["reason"] == "probation.recalled"
    assert not at.operations.exchanging
    assert at.operations.summary.artefact == before
    current = at.operations._service.store.read("current")
    assert current is None or current.id != at.other.id
    assert [(job.trigger, job.state.value) for job in at.journal.records()] == [
        ("command", "ROLLED_BACK"),
        ("rollback", "COMMITTED"),
    ]


def test_after_rollbacks_a_recalibration_that_stays_is_the_word_that_jobs_start_again(
    desk: Callable[..., Desk],
) -> None:
    at = desk()
    for _ in range(3):
        at.operations._restraint.rolled_back()
    assert at.tick() == ""
    assert at.operations.stopped_by == "recalibration.rollback_loop"
    at.recalibrate()
    at.operations.stop("the operator thinks better of it")
    assert at.tick() == ""
    assert at.operations.stopped_by
    at.recalibrate()
    report = at.operations.job
    assert report is not None
    at.operations._jobs.job = None
    for step in (JobState.COLLECTING, JobState.BUILDING, JobState.VALIDATING):
        report.progress(step.value, 0)
    report.probation(at.other.id)
    report.succeed({"artefact": at.other.id})
    at.tick()
    assert at.operations.stopped_by == ""


def test_a_rollback_that_comes_too_late_for_a_probation_takes_nothing_else_back(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame path has taken the candidate back, and has not yet told."""
    at = desk(frames=100)
    at.recalibrate()
    at.accept()
    loop = at.operations._pipeline.loop
    go_back = loop.go_back
    monkeypatch.setattr(loop, "go_back", lambda _: False)
    answers: list[CommandResult] = []
    assert at.operations.recall(Report("c2", answers.append))
    assert not answers[-1].final
    assert at.operations.exchanging
    go_back(AgentError("probation.error", "a", "b", "c"))
    assert answers[-1].status == "SUCCEEDED"
    assert at.journal.records()[-1].state.value == "COMMITTED"
    assert at.events("rollback")[-1]["reason"] == "probation.error"


@pytest.mark.parametrize("op", ["recalibrate", "rollback"])
def test_while_a_candidate_still_hangs_no_job_begins_and_a_command_is_told_why(
    desk: Callable[..., Desk], op: str
) -> None:
    at = desk()
    pipeline = cast(Any, at.operations._pipeline)
    pipeline.stuck = True
    assert at.tick(state="alarm", serving_db=9.0) == ""
    orders = Orders(at.operations, at.operations._service, pipeline)
    args = RecalibrateArgs() if op == "recalibrate" else RollbackArgs()
    with pytest.raises(CommandError, match="a candidate that still hangs") as refused:
        orders.handlers[op](args, Report("c2", lambda _: None))
    assert refused.value.code == "command.busy"
    assert at.journal.records() == []
    pipeline.stuck = False
    assert at.tick(state="alarm", serving_db=9.0) == "alarm"


def test_no_regime_is_switched_to_that_another_camera_would_be_left_by(desk: Callable[..., Desk]) -> None:
    at = desk()
    serving, wanted = at.operations._service.serving.id, at.other.id
    assert at.state.drift is not None
    faithful = replace(at.state.settled, interval=Interval(0.95, 0.93, 0.97, 200))
    calm = replace(at.state, settled=faithful, drift=replace(at.state.drift, state="calm", serving_db=0.5))
    assert calm.drift is not None
    asks = replace(calm, drift=replace(calm.drift, switch_to=wanted, serving_db=9.0))
    left = replace(calm, drift=replace(calm.drift, gains_db={serving: 0.5, wanted: 9.0}))
    suited = replace(calm, drift=replace(calm.drift, gains_db={serving: 0.5, wanted: 1.0}))
    at.operations.tick({"yard": asks, "hall": left})
    assert at.operations._service.serving.id == serving
    at.operations.tick({"yard": asks, "hall": suited})
    assert at.operations._service.serving.id == wanted
