"""The verdict on a candidate, and the child process that reaches it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from candidate_bench import backend as backend
from candidate_bench import collected, frames, request, run_child, saved_model
from candidate_bench import model as model
from raising_world import collapsing_net

from agent.jobs.candidate import run_job
from agent.jobs.child_process import JobOutcome
from agent.jobs.request import JobRequest, write_job
from agent.models.model import Model
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.calibration import load_calibration
from engines.interface import Backend
from engines.quantise.costs import Costs, macs_costs
from engines.quantise.fusion import Grouping
from engines.store.artefact import read_artefact


def test_the_child_builds_judges_and_stores(model: Model, backend: Backend, tmp_path: Path) -> None:
    tensors = frames(24)
    seen = collected(model, backend, tensors[:16], tensors[16:])
    write_job(tmp_path / "job", request(model, tmp_path), seen)
    *progress, last = run_child(tmp_path / "job")
    outcome = JobOutcome.from_message(last)
    assert (progress[0]["step"], progress[-1]["step"]) == ("CALIBRATING", "VALIDATING")
    percents = [line["percent"] for line in progress]
    assert percents == sorted(percents)
    assert outcome.artefact is not None
    assert outcome.verdict is not None
    artefact = read_artefact(outcome.artefact)
    assert artefact.manifest["verdict"] == outcome.verdict.as_dict()
    assert set(artefact.manifest["files"]) == {"engine.onnx", "calibration.json", "calibration.npz", "plan.json"}
    extremes = load_calibration(artefact.path / "calibration.json").extremes
    assert set(extremes) == set(model.divisible)
    for layer, values in extremes.items():
        np.testing.assert_array_equal(values, seen.extremes[layer])


def test_a_job_that_searches_goes_by_kept_costs_and_says_so(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are measured for the first of three jobs, kept for the second, and damaged before the third."""

    def measured(grouping: Grouping, *_: object, **__: object) -> Costs:
        return replace(macs_costs(grouping), source="measured", passes=1)

    monkeypatch.setattr("agent.planning.costs.measure_costs", measured)
    model = saved_model(tmp_path, collapsing_net(7))
    tensors = [tensor * (0.2 if number % 2 else 0.5) for number, tensor in enumerate(frames(40))]
    warnings: list[object] = []
    kept = []
    for number in range(3):
        state = tmp_path / "state"
        if number:
            shutil.rmtree(state / "artefacts")
        if number == 2:
            (file,) = state.glob("cache/*.costs")
            file.write_text("{}")
        job = request(model, tmp_path, max_loss=0.1)
        write_job(tmp_path / str(number), job, collected(model, backend, tensors[:16], tensors[16:]))
        artefact = run_job(tmp_path / str(number), lambda line: warnings.append(line.get("warning"))).artefact
        assert artefact is not None
        costs = PrecisionPlan.from_json((artefact / "plan.json").read_text()).evidence["costs"]
        assert costs["source"] == "measured"
        kept.append(costs["kept"])
    assert kept == [False, True, False]
    assert len([warning for warning in warnings if warning]) == 1


def broken_requests(model: Model, folder: Path) -> Iterator[tuple[JobRequest, str]]:
    yield request(model, folder, model_sha256="0" * 64), "calibration.model"
    yield request(model, folder, method="guess"), "threshold.method"
    yield request(model, folder, folder / "gone"), "artefact.missing"
    yield request(model, folder, max_loss=-1.0), "recalibration.refused"


def test_a_failed_job_reports_the_parts_of_its_error_and_leaves_no_artefact(
    model: Model, backend: Backend, tmp_path: Path
) -> None:
    tensors = frames(24)
    seen = collected(model, backend, tensors[:16], tensors[16:])
    for number, (job, code) in enumerate(broken_requests(model, tmp_path)):
        write_job(tmp_path / str(number), job, seen)
        try:
            error = run_job(tmp_path / str(number), lambda _: None).error
        except TaredError as raised:
            error = raised
        assert error is not None
        assert error.code == code
    reported = run_child(tmp_path / "0")[-1]["error"]
    assert set(reported) == {"code", "found", "expected", "remedy"}
    assert list((tmp_path / "state").glob("artefacts/*")) == []
