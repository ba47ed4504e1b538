"""Each place that shows the board shows the same: what the answer to `status` says, in that place's own form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from raising_world import config_of, observer_state
from snapshots import a_board

from agent.common.errors import AgentError
from agent.contract.board_status import BoardStatus, CameraStatus
from agent.control.reasons import explain
from agent.control.snapshot import BoardSnapshot
from agent.control.summary import RunSummary
from agent.core.kinds import DriftAlarm
from agent.core.state import EngineTrial, Hindrance, Job, JobState, State
from agent.daemon.prometheus import DaemonMetrics
from agent.daemon.status import complete, history_rows, progress_line, status_of, telemetry_of
from agent.monitoring.camera_monitor import CameraState
from calibrate.statistics.evidence import Interval

_CALM = observer_state(config_of())
assert _CALM.drift is not None
SEEN = replace(
    _CALM,
    fidelity=Interval(0.9, 0.75, 0.95, 40),
    fidelity_hour=replace(_CALM.fidelity_hour, interval=Interval(0.92, 0.8, 0.97, 33), empty=4),
    empty_frames=6,
    drift=replace(
        _CALM.drift, state="warning", gain_db=2.5, serving_db=2.75, e_value=3.0, gain=Interval(0.1, 0, 0.2, 9)
    ),
)
WORSE = replace(SEEN, fidelity=Interval(0.6, 0.5, 0.7, 40), view=replace(SEEN.view, trouble="blurred"))
JOB = Job("j1", DriftAlarm(), 0.0, state=JobState.CALIBRATING, percent=41, waits="300 MiB of memory available")


def _board(name: str) -> BoardSnapshot:
    board = a_board(camera=SEEN)
    due = State(held_back=Hindrance("view.blind", "the view is blind", "check the camera"))
    failed = State(last_error=AgentError("recalibration.disk", "a full disk", "room", "free some"))
    return {
        "well": board,
        "held back": replace(board, state=due, stopped_by="recalibration.automatic"),
        "degraded": replace(a_board(camera=replace(SEEN, drift=None)), is_degraded=True, state=failed),
        "not observed": a_board(camera=replace(SEEN, outage="observer.thread")),
        "in a job": replace(board, state=State(job=JOB)),
        "on probation": replace(board, state=State(job=JOB, trial=EngineTrial("8c04be17a95d2f63", serves=True))),
        "two cameras": a_board(gate=SEEN, yard=WORSE),
        "a camera away": replace(
            board, cameras={"camera": replace(board.cameras["camera"], is_up=False, lost="camera.silent")}
        ),
    }[name]


BOARDS = (
    "well", "held back", "degraded", "not observed", "in a job", "on probation", "two cameras", "a camera away",
)  # fmt: skip


@pytest.fixture(params=BOARDS)
def board(request: pytest.FixtureRequest) -> BoardSnapshot:
    return _board(request.param)


def _cameras(board: BoardSnapshot) -> Mapping[str, CameraStatus]:
    status = status_of(board)
    return status.cameras or {status.camera: status}


def _state(board: BoardSnapshot, camera: str) -> CameraState:
    return board.cameras[camera].state


def test_the_answer_is_its_own_document_again(board: BoardSnapshot) -> None:
    status = status_of(board)
    assert BoardStatus.from_json(status.to_json()) == status
    assert json.loads(status.to_json()) == status.as_result()


def test_the_least_faithful_camera_stands_for_the_board() -> None:
    result = status_of(_board("two cameras")).as_result()
    assert isinstance(result["cameras"], dict)
    assert {key: result[key] for key in CameraStatus.model_fields} == result["cameras"]["yard"]
    assert "cameras" not in status_of(_board("well")).as_result()


def test_telemetry(board: BoardSnapshot) -> None:
    for name, sample in telemetry_of(board).items():
        camera, observed = _cameras(board)[name], not _state(board, name).outage
        assert (sample.up, sample.lost) == (camera.up, camera.lost)
        assert sample.accuracy == camera.accuracy
        assert sample.fidelity_hour == (camera.fidelity_hour if observed else None)
        fidelity = sample.fidelity.model_dump(exclude={"empty"}) if sample.fidelity is not None else None
        assert fidelity == (camera.fidelity.model_dump() if observed else None)
        drift = {**camera.drift.model_dump(), "tolerance_db": 3.0} if camera.drift is not None and observed else {}
        assert sample.drift == {key: drift[key] for key in sample.drift}
        assert bool(sample.drift) == bool(drift)


def test_rows_of_the_history(board: BoardSnapshot) -> None:
    status = status_of(board)
    for row in history_rows(board):
        camera, observed = _cameras(board)[row.camera], not _state(board, row.camera).outage
        on_probation = board.state.trial is not None
        assert row.engine == ("8c04be17a95d2f63" if on_probation else status.engine)
        assert row.is_int8 == (on_probation or not status.degraded)
        fidelity, accuracy, drift = camera.fidelity, camera.accuracy, camera.drift if observed else None
        assert row.fidelity == ((fidelity.estimate, fidelity.low, fidelity.high) if observed else ())
        assert row.accuracy == (accuracy.estimate, accuracy.low, accuracy.high)
        assert (row.drift, row.gain_db) == ((drift.state, drift.gain_db) if drift is not None else ("", None))


def test_metrics(board: BoardSnapshot) -> None:
    status, metrics = status_of(board), DaemonMetrics()
    metrics.set_source(lambda: board, None)
    samples = [sample for metric in metrics.collect() for sample in metric.samples]

    def of(name: str, label: str) -> dict[str, float]:
        return {each.labels[label]: each.value for each in samples if each.name == name}

    def labels(name: str) -> list[dict[str, str]]:
        return [dict(each.labels) for each in samples if each.name == name]

    def listed(**values: Any) -> list[dict[str, str]]:
        return [values] if values["reason"] else []

    assert labels("tared_engine_info") == [{"artefact": status.engine, "degraded": str(status.degraded).lower()}]
    assert labels("tared_degraded_info") == listed(reason=status.degraded_reason)
    assert labels("tared_job_held_back_info") == listed(code=status.held_back_code, reason=status.held_back)
    step = status.job.state if status.job is not None else "none"
    assert [name for name, value in of("tared_job_state", "tared_job_state").items() if value] == [step]
    cameras = _cameras(board)
    assert of("tared_camera_up", "camera") == {name: camera.up for name, camera in cameras.items()}
    observed = {name: camera for name, camera in cameras.items() if not _state(board, name).outage}
    estimates = {each.labels["camera"]: each.value for each in samples if each.labels.get("bound") == "estimate"
                 and each.name == "tared_fidelity_ratio"}  # fmt: skip
    assert estimates == {name: camera.fidelity.estimate for name, camera in observed.items()}
    gains_db = {name: camera.drift.gain_db for name, camera in observed.items() if camera.drift is not None}
    assert of("tared_drift_predicted_gain_db", "camera") == gains_db
    assert sum(of("tared_frames_total", "camera").values()) == status.frames * len(cameras)


def test_the_line_of_the_display(board: BoardSnapshot) -> None:
    status, line = status_of(board), progress_line(board, 0)
    assert ("reference" if status.degraded else f"INT8 {status.engine[:6]}") in line
    assert f"fidelity {status.fidelity.estimate:.3f}  accuracy {status.accuracy.estimate:.3f}" in line
    drift = f"drift {status.drift.state} {status.drift.gain_db:.1f} dB  " if status.drift is not None else ""
    assert line[line.find("drift") : line.find("fidelity")] == drift
    assert (status.job is not None) == line.endswith("CALIBRATING 41 %, waits: 300 MiB of memory available")
    assert (status.observer != "observing") == ("observer" in line)
    assert (f"  {status.camera}  " in line) == bool(status.cameras)


def test_the_summary_of_the_run(board: BoardSnapshot) -> None:
    status, summary = status_of(board), RunSummary("current")
    complete(summary, board)
    shown = summary.as_dict()
    assert shown["fidelity"] == status.fidelity.model_dump()
    assert shown["live_accuracy"] == status.accuracy.model_dump()
    assert (shown["degraded"], shown.get("held_back")) == (status.degraded_reason, status.held_back)
    assert shown["frames"] == status.frames
    assert {name: each["fidelity"] for name, each in shown.get("cameras", {}).items()} == {
        name: camera.fidelity.model_dump() for name, camera in status.cameras.items()
    }


def test_reasons_of_telemetry(board: BoardSnapshot) -> None:
    status = status_of(board)
    assert explain(board).as_dict() == {
        "degraded": status.degraded_reason, "held_back": status.held_back, "held_back_code": status.held_back_code,
    }  # fmt: skip
