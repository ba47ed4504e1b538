"""What the daemon decides about low fidelity, regimes and rollbacks, state by state; no frame is served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
from raising_world import COLLAPSES, collapsing_net, observer_state, observing
from worlds import SPEC

from agent.commands.dispatcher import Report
from agent.common.errors import AgentError
from agent.common.schema import validate
from agent.config import Config
from agent.contract.commands import CommandResult, RollbackArgs
from agent.contract.messages import Birth
from agent.control.operations import Operations
from agent.daemon.handlers import Orders
from agent.jobs.child_protocol import Outcome
from agent.jobs.job import JobJournal
from agent.jobs.limits import Attempts
from agent.models.build import build_artefact
from agent.models.engine_service import Service
from agent.models.model import calibrate, open_model
from agent.monitoring.camera_monitor import ObserverState
from agent.serving.pipeline import Pipeline
from agent.serving.trial import Record, TrialEvents
from agent.uplink.reporter import Reporter
from calibrate.plan import PrecisionPlan
from engines.interface import silent
from engines.registry import open_backend
from engines.store.artefact import Artefact
from engines.store.store import Store


@dataclass
class Desk:
    """Operations on a store of two engines: one all in INT8, and one that was raised from it, which serves."""

    operations: Operations
    service: Service
    int8: Artefact
    raised: Artefact
    told: list[str]
    state: ObserverState
    results: list[CommandResult] = field(default_factory=list)

    def tick(self, **changes: Any) -> None:
        """As of a camera at which fidelity is low, but for these changes."""
        self.operations.tick({"camera": replace(self.state, **changes)})

    @property
    def rung(self) -> int | None:
        """Of the running job."""
        job = self.operations._jobs.job
        return job.raising.rung if job is not None and job.raising is not None else None

    def cancel(self) -> None:
        self.operations.stop("the test goes on")

    def roll_back(self) -> None:
        pipeline = self.operations._pipeline
        rollback = Orders(self.operations, self.service, pipeline).handlers["rollback"]
        rollback(RollbackArgs(), Report("c1", self.results.append))


class Loop:
    """A frame path on which every engine serves at once, and is kept, or taken back, as is wished."""

    keeping = False

    def try_out(self, _identity: str, engine: Any, events: TrialEvents) -> None:
        engine.close()
        self._events = events
        events.live(1.0, 0)

    def go_back(self, error: AgentError) -> bool:
        self._events.failed(error, 2.0, False)
        return True

    def keep(self) -> bool:
        return True


def frame_path() -> dict[str, Any]:
    """What a pipeline has for a change of engine."""
    loop = Loop()
    return {
        "loop": loop, "try_out": loop.try_out, "record": Record(live=True), "dropped": Counter(), "error": None,
        "stuck": False, "remember": lambda *_: None, "since": lambda ts: {"camera": ts or 0.0}
    }  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Desk]:
    onnx.save(collapsing_net(), tmp_path / "model.onnx")

    def make(raised_serves: bool = False, live: bool = True, **recalibration: object) -> Desk:
        content = {
            "model": {**SPEC, "path": tmp_path / "model.onnx"},
            "camera": {"source": "rtsp://camera"},
            "state_dir": tmp_path / "state",
            "recalibration": recalibration,
            "probation": {"frames": 1, "seconds": 0.0},
        }
        config = validate(Config, content, "test")
        service, artefacts = stored(config)
        if not raised_serves:
            service.store.promote(artefacts[0])
            service.start(pytest.fail).close()
        told: list[str] = []
        reporter = Reporter(None, Birth(agent_version="0"))
        monkeypatch.setattr(reporter, "event", lambda kind, *_, **detail: told.append(f"{kind} {detail}"))
        state = observer_state(config)
        pipeline = SimpleNamespace(is_live=live, observer=observing(config, state), last_ts=0.0, **frame_path())
        journal = JobJournal(config.state_dir / "jobs.sqlite", lambda error: pytest.fail(str(error)))
        operations = Operations(
            config, service, cast(Pipeline, pipeline), reporter, lambda function: function(), journal
        )
        operations.start(0)
        return Desk(operations, service, *artefacts, told, state)

    return make


def stored(config: Config) -> tuple[Service, Sequence[Artefact]]:
    """A store whose raised engine is current, the other one previous."""
    model, backend, store = open_model(config.model), open_backend("onnxruntime"), Store(config.state_dir)
    with closing(backend.observer(model.reference, model.placement.taps)) as observer:
        seen = observer.observe(np.random.default_rng(0).uniform(size=(1, 3, 8, 8)).astype(np.float32)).histograms
    calibration = calibrate(model, seen, "max", 1, "test")
    service = Service(model, backend, store)
    raised = model.under(PrecisionPlan({COLLAPSES: "raised"}))
    artefacts = [
        build_artefact(under, backend, store.place, silent, calibration=calibration, raised_from=origin)
        for under, origin in ((model, ""), (raised, service.origin))
    ]
    for artefact in artefacts:
        store.promote(artefact)
    service.start(pytest.fail).close()
    return service, artefacts


def test_low_fidelity_is_answered_once_and_told_once(desk: Callable[..., Desk]) -> None:
    at = desk()
    at.tick()
    at.tick()
    assert at.rung == 1
    assert [line.split()[0] for line in at.told].count("fidelity") == 1
    at.cancel()
    at.tick()
    assert at.rung == 1  # nothing was tried


@pytest.mark.parametrize("recalibration", [{"raise_precision": False}, {"automatic": False}])
def test_low_fidelity_is_only_told_where_the_owner_wants_no_answer(
    desk: Callable[..., Desk], recalibration: dict[str, object]
) -> None:
    at = desk(**recalibration)
    at.tick()
    assert at.operations._jobs.job is None
    assert [line.split()[0] for line in at.told] == ["fidelity"]


def test_it_takes_part_in_the_daily_cap(desk: Callable[..., Desk]) -> None:
    at = desk(per_day=1)
    for _ in range(3):
        at.tick()
        at.cancel()
    assert at.operations._jobs.job is None
    assert len([line for line in at.told if "recalibration.cap" in line]) == 1
    assert any("low fidelity after 1 jobs in a day" in line for line in at.told)


@pytest.mark.parametrize("automatic", [True, False])
def test_regimes_are_switched_by_themselves_only_where_the_owner_lets_them(
    desk: Callable[..., Desk], automatic: bool
) -> None:
    at = desk(automatic=automatic)
    assert at.state.drift is not None
    at.tick(drift=replace(at.state.drift, switch_to=at.raised.id))
    assert at.service.serving.id == (at.raised.id if automatic else at.int8.id)
    assert at.service.raised is automatic


def test_a_first_calibration_is_made_all_the_same(desk: Callable[..., Desk]) -> None:
    at = desk(automatic=False)
    at.service.calibration = None
    at.tick(drift=None)
    assert at.operations._jobs.job is not None
    assert at.operations._jobs.job.trigger == "first-start"


def test_what_the_operator_took_back_is_not_raised_again_until_the_owner_says_otherwise(
    desk: Callable[..., Desk], tmp_path: Path
) -> None:
    at = desk(raised_serves=True, cooldown_s=0.0)
    at.roll_back()
    assert at.results[-1].status == "SUCCEEDED"
    assert at.service.serving.id == at.int8.id
    assert dict(at.service.plan.floats) == {}
    at.tick()
    assert at.rung is None
    kept = tmp_path / "state" / "attempts.json"
    assert Attempts(kept, at.service.origin, pytest.fail).next_rung(at.int8.id) == 0
    again = desk(cooldown_s=0.0)
    assert again.service.serving.id == at.int8.id
    again.tick()
    assert again.rung is None
    kept.write_text(kept.read_text().replace(at.service.origin, "another word"))
    otherwise = desk(cooldown_s=0.0)
    otherwise.tick()
    assert otherwise.rung == 1


def test_of_a_recording_nothing_is_kept(desk: Callable[..., Desk], tmp_path: Path) -> None:
    at = desk(raised_serves=True, live=False, cooldown_s=0.0)
    at.roll_back()
    at.tick()
    assert at.rung is None
    assert not (tmp_path / "state" / "attempts.json").exists()


def test_a_cooldown_follows_a_rollback_whatever_served(desk: Callable[..., Desk]) -> None:
    at = desk(cooldown_s=600.0)
    at.roll_back()  # to the raised one
    at.tick()
    assert at.rung is None


@pytest.mark.parametrize(("code", "rung"), [("recalibration.disk", 1), ("recalibration.refused", 2)])
def test_only_a_candidate_that_was_refused_asks_for_more(desk: Callable[..., Desk], code: str, rung: int) -> None:
    at = desk(cooldown_s=0.0)
    at.tick()
    job = at.operations._jobs.job
    assert job is not None
    at.operations._jobs._finish(job, Outcome(error=AgentError(code, "", "", "")))
    at.tick()
    assert at.rung == rung


def test_going_back_to_a_raised_engine_is_no_attempt(desk: Callable[..., Desk]) -> None:
    at = desk(cooldown_s=0.0)
    at.roll_back()  # to the raised one, which was current before
    assert at.service.raised
    at.tick()
    assert at.rung == 1
