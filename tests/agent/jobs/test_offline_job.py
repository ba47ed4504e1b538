"""A job that begins with work that was done offline: what it takes over, what it makes anew, and what it judges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from candidate_bench import backend as backend
from candidate_bench import collected, frames, observed, request
from candidate_bench import model as model

from agent.common.errors import AgentError
from agent.jobs.candidate import run_job
from agent.jobs.request import write_job
from agent.models.build import build_artefact
from agent.models.model import Model, calibrate
from agent.models.offline_work import CALIBRATION_FILE, START
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, load_calibration, save_calibration
from engines.interface import Backend, silent
from engines.store.artefact import Artefact, read_artefact, write_artefact

PLAN = PrecisionPlan({"Conv_t2": "by hand"})


@pytest.fixture
def calibration(model: Model, backend: Backend) -> Calibration:
    """Of other frames than a job collects."""
    return calibrate(model, observed(model, backend, frames(4, 0.9)), "entropy", 4, "clip.mp4")


@pytest.fixture
def built(model: Model, backend: Backend, calibration: Calibration, tmp_path: Path) -> Artefact:
    """As the job of another board has built it."""
    planned, place = model.with_plan(PLAN), lambda _: tmp_path / "engine"
    return build_artefact(planned, backend, place, silent, calibration=calibration, planned_from="another board")


def run(model: Model, backend: Backend, folder: Path, setting: str, path: Path, **changes: Any) -> Artefact:
    """The artefact that a job stores which begins with this."""
    tensors = frames(24)
    offline = {"setting": setting, "path": str(path)}
    job = request(model, folder, offline=offline, origin="configured", **changes)
    write_job(folder / "job", job, collected(model, backend, tensors[:16], tensors[16:]))
    outcome = run_job(folder / "job", lambda _: None)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.artefact is not None
    assert outcome.verdict is not None
    artefact = read_artefact(outcome.artefact)
    assert artefact.path.parent == folder / "state" / "artefacts"
    assert artefact.manifest["verdict"] == outcome.verdict.as_dict()
    return artefact


def test_an_artefact_is_judged_and_stored_as_it_is(
    model: Model, backend: Backend, built: Artefact, calibration: Calibration, tmp_path: Path
) -> None:
    stored = run(model, backend, tmp_path, START, built.path)
    assert stored.manifest["files"] == built.manifest["files"]
    assert stored.manifest["inputs"] == {**built.manifest["inputs"], "raised_from": "configured"}
    assert load_calibration(stored.path / "calibration.json").id == calibration.id
    assert "verdict" not in read_artefact(built.path).manifest


def test_an_artefact_of_the_configured_plan_has_the_id_of_that_build(
    model: Model, backend: Backend, built: Artefact, calibration: Calibration, tmp_path: Path
) -> None:
    stored = run(model, backend, tmp_path, START, built.path, plan=PLAN.to_json())
    here = build_artefact(model.with_plan(PLAN), backend, lambda _: tmp_path / "here", silent, calibration=calibration)
    assert stored.id == here.id


@pytest.mark.parametrize("engine", [b"of another runtime", None])
def test_an_engine_that_does_not_serve_here_is_built_anew_from_its_calibration_and_plan(
    model: Model, backend: Backend, built: Artefact, calibration: Calibration, tmp_path: Path, engine: bytes | None
) -> None:
    """By what its manifest says, or by what the runtime says when it is loaded."""
    contents = {name: built.read_file(name) for name in built.manifest["files"]}
    contents["engine.onnx"] = engine or b"no graph"
    inputs = {**built.manifest["inputs"]}
    if engine is not None:
        inputs["backend"] = {"runtime": "tensorrt", "version": "8.6"}

    def fill(folder: Path) -> dict[str, object]:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        return dict(built.manifest)

    elsewhere = write_artefact(tmp_path / "elsewhere", inputs, fill)
    stored = run(model, backend, tmp_path, START, elsewhere.path)
    assert stored.read_engine() == built.read_engine()
    assert stored.manifest["inputs"]["backend"] == backend.describe()
    assert PrecisionPlan.from_json(stored.read_file("plan.json").decode()) == PLAN
    assert load_calibration(stored.path / "calibration.json").id == calibration.id


def test_a_configured_plan_takes_precedence_over_that_of_an_artefact(
    model: Model, backend: Backend, built: Artefact, tmp_path: Path
) -> None:
    configured = PrecisionPlan({"Conv_t0": "by the owner"})
    stored = run(model, backend, tmp_path, START, built.path, plan=configured.to_json())
    assert stored.manifest["inputs"]["plan"] == configured.essence
    assert "raised_from" not in stored.manifest["inputs"]


def test_a_calibration_takes_the_place_of_the_collected_frames_and_the_job_plans(
    model: Model, backend: Backend, calibration: Calibration, tmp_path: Path
) -> None:
    save_calibration(calibration, tmp_path / "calibration.json")
    stored = run(model, backend, tmp_path, CALIBRATION_FILE, tmp_path / "calibration.json")
    used = load_calibration(stored.path / "calibration.json")
    assert (used.id, used.frames, used.source) == (calibration.id, 4, "clip.mp4")
    assert PrecisionPlan.from_json(stored.read_file("plan.json").decode()).evidence["by"] == "job"


def test_an_artefact_that_loses_too_much_is_refused_without_another_plan(
    model: Model, backend: Backend, built: Artefact, tmp_path: Path
) -> None:
    with pytest.raises(AgentError, match=r"recalibration\.refused"):
        run(model, backend, tmp_path, START, built.path, max_loss=-1.0)
    assert len(list((tmp_path / "state" / "refused").iterdir())) == 1
    assert not list((tmp_path / "state" / "artefacts").iterdir())


def test_work_that_changed_since_the_daemon_saw_it_fails_the_job(
    model: Model, backend: Backend, calibration: Calibration, tmp_path: Path
) -> None:
    other = replace(calibration, model_sha256="0" * 64)
    save_calibration(other, tmp_path / "calibration.json")
    with pytest.raises(Exception, match=r"calibration\.model: a calibration of model 000000000000"):
        run(model, backend, tmp_path, CALIBRATION_FILE, tmp_path / "calibration.json")
