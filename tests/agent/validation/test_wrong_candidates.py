"""Candidates that are wrong on purpose are refused, by the child itself or by its end; what serves goes on."""

from __future__ import annotations

import json
import queue
import shutil
import stat
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wrong_engines
from candidate_bench import saved_model
from numpy.typing import NDArray
from runtime_under_test import RUNTIME, backend_class
from zoo import residual_net

import agent.jobs.candidate
import agent.validation.verdict
from agent.collection.collection import Collected
from agent.jobs.candidate import run_job
from agent.jobs.child_process import JobOutcome, JobProcess
from agent.jobs.request import JobRequest, write_job
from agent.models.build import build_artefact
from agent.models.model import Model, calibrate
from agent.validation.comparison import Comparison
from agent.validation.verdict import Verdict, VerdictLimits, decide
from calibrate.errors import TaredError
from calibrate.histogram import AbsHistogram, merge
from calibrate.plan import PrecisionPlan
from engines.registry import open_backend
from engines.store.artefact import Store

SIDE = 96  # pixels: an inference takes nearly half a millisecond, so that five times that is noticed


class Board:
    """A model in service under a calibration of its own, and the data of a job for the next one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.model = saved_model(folder, residual_net((1, 3, SIDE, SIDE)))
        self.frames = _frames(self.model, 24)
        self.histograms = _observed(self.model, self.frames[:8])
        calibration = calibrate(self.model, self.histograms, "max", 8, "before")
        place = Store(self.state_dir).place
        backend = open_backend(RUNTIME)
        self.serving = build_artefact(self.model, backend, place, lambda *_: None, calibration=calibration)

    def request(self, folder: Path, **changes: Any) -> JobRequest:
        """state_dir is a copy in `folder`."""
        shutil.copytree(self.state_dir, folder / "state")
        asked = JobRequest(
            spec=self.model.spec.model_dump(mode="json"), model_sha256=self.model.sha256, backend=RUNTIME,
            threads=1, method="entropy", frames=8, source="now", state_dir=str(folder / "state"),
            serving=str(folder / "state" / "artefacts" / self.serving.id), max_loss=0.1,
        )  # fmt: skip
        return replace(asked, **changes)

    def write(self, request: JobRequest, folder: Path) -> Path:
        write_job(folder / "job", request, Collected(8, self.histograms, list(self.frames[8:]), list(self.frames[:8])))
        return folder / "job"

    def artefacts(self, folder: Path) -> list[str]:
        return [path.name for path in (folder / "state" / "artefacts").iterdir()]


def _frames(model: Model, count: int) -> list[NDArray[np.float32]]:
    """Return frames of every class that the model distinguishes in noise: patches of all colours."""
    rng = np.random.default_rng(3)
    colours = rng.uniform(size=(count, 3, 1, 1)) * rng.uniform(size=(count, 1, 1, 1))
    noise = rng.uniform(0.5, 1.0, size=(count, *model.input_shape[1:]))
    return [(colour * texture).astype(np.float32)[np.newaxis] for colour, texture in zip(colours, noise, strict=True)]


def _observed(model: Model, tensors: list[NDArray[np.float32]]) -> dict[str, AbsHistogram]:
    merged: dict[str, AbsHistogram] = {}
    with closing(open_backend("onnxruntime").observer(model.reference, model.placement.taps)) as observer:
        for tensor in tensors:
            for name, histogram in observer.observe(tensor).histograms.items():
                merged[name] = merge(merged[name], histogram) if name in merged else histogram
    return merged


@pytest.fixture(autouse=True)
def _need_not_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether INT8 is faster than float with this little model is chance."""
    monkeypatch.setattr(backend_class(), "int8_must_gain", False)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return Board(tmp_path_factory.mktemp("board"))


def run_with(fault: str, job: Path, monkeypatch: pytest.MonkeyPatch) -> JobOutcome:
    def open_wrong(name: str, options: Any = None) -> Any:
        return wrong_engines.WrongBackend(open_backend(name, options), fault)

    monkeypatch.setattr(agent.jobs.candidate, "open_backend", open_wrong)
    return run_job(job, lambda _: None)


def refused_with(fault: str, job: Path, monkeypatch: pytest.MonkeyPatch) -> TaredError:
    error = run_with(fault, job, monkeypatch).error
    assert error is not None
    return error


def refusals(folder: Path) -> list[Mapping[str, Any]]:
    """One of each engine: of how well it answers there may be several plans, of anything else there is one."""
    documents = {path.name: json.loads(path.read_text()) for path in (folder / "state" / "refused").iterdir()}
    assert documents.keys() == {f"{document['id']}.json" for document in documents.values()}
    return list(documents.values())


@pytest.mark.parametrize(
    ("fault", "test", "words"),
    [
        ("scales_times_ten", "fidelity", "in service on 13 held-out frames"),
        ("nan_weights", "outputs", "is not finite (13 times)"),
        ("wrong_shape", "outputs", "is float32 [1, 10], not float32 [1, 5] (13 times)"),
        pytest.param("slow", "latency", "ms in service; 1.25 times that is allowed", marks=pytest.mark.trial),
        pytest.param("fail", "outputs", "it fails: engine.run: a kernel that fails (1 times)", marks=pytest.mark.trial),
    ],
)
def test_a_wrong_one_is_refused_and_its_evidence_kept(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, test: str, words: str
) -> None:
    refused = refused_with(fault, board.write(board.request(tmp_path), tmp_path), monkeypatch)
    assert refused.code == "recalibration.refused"
    assert words in refused.found
    kept = refusals(tmp_path)
    assert (len(kept) > 1) == (test == "fidelity")
    for each in kept:
        verdict = Verdict.from_dict(each["verdict"])
        assert not verdict.accepted
        assert test in verdict.failed
        assert verdict.reason in refused.found
        assert each["inputs"]["model"] == board.model.sha256
        assert each["inputs"]["calibration"]["id"] == each["calibration"]
    assert board.artefacts(tmp_path) == [board.serving.id]


@pytest.mark.parametrize("fault", ["", "slow"])
def test_where_int8_has_to_gain_a_first_one_that_is_slower_than_float_is_refused(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Other plans are tried, since some layers may gain; a slow one is refused although nothing in INT8 serves."""
    monkeypatch.setattr(backend_class(), "int8_must_gain", fault == "slow")
    request = board.request(tmp_path, serving=None)
    place, backend = Store(tmp_path / "state").place, open_backend(RUNTIME)
    in_float = build_artefact(board.model, backend, place, lambda *_: None, calibration=None, precision="fp32")
    job = board.write(replace(request, float_engine=str(in_float.path)), tmp_path)
    if not fault:
        verdict = run_with(fault, job, monkeypatch).verdict
        assert verdict is not None
        assert verdict.latency_float_ms is None  # it is not timed where it decides nothing
        return
    refused = refused_with(fault, job, monkeypatch)
    assert "ms in float" in refused.found
    assert (refused.code, refused.expected) == ("recalibration.refused", "an engine no slower than float")
    assert refused.remedy.startswith("let float serve")
    assert len(refusals(tmp_path)) > 1


def test_a_disk_that_refuses_does_not_hide_the_refusal(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = board.write(board.request(tmp_path), tmp_path)
    (tmp_path / "state" / "refused").write_text("where a folder belongs")
    assert "is not finite" in refused_with("nan_weights", job, monkeypatch).found
    assert "refusal=not_kept error='File exists'" in caplog.text


@pytest.mark.parametrize(("kept_float", "allowed"), [(False, 1.5), (True, 2.0)])
def test_more_layers_float_may_take_more_time(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_float: bool, allowed: float
) -> None:
    asked: list[VerdictLimits] = []

    def decide_and_keep(comparison: Comparison, limits: VerdictLimits, label: Any) -> Verdict:
        asked.append(limits)
        return decide(comparison, limits, label)

    monkeypatch.setattr(agent.validation.verdict, "decide", decide_and_keep)
    layer = next(node.name for node in board.model.master.graph.node if node.op_type == "Gemm")
    plan = PrecisionPlan({layer: "by hand"} if kept_float else {})
    request = board.request(tmp_path, plan=plan.to_json(), max_slowdown=1.5, max_loss=0.9)
    run_with("", board.write(request, tmp_path), monkeypatch)
    assert asked == [VerdictLimits(0.9, allowed)]


@pytest.fixture
def outcomes(board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a real child with a fault; return its outcome as the daemon has it, and its last step."""
    found: queue.Queue[JobOutcome] = queue.Queue()
    steps: list[str] = []

    def run(fault: str) -> tuple[JobOutcome, str]:
        script = tmp_path / "child.sh"  # in the interpreter's place: -m agent.jobs.background NICE PARENT MODULE JOB
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {wrong_engines.__file__} {fault} "$6"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))
        job = board.write(board.request(tmp_path), tmp_path)
        JobProcess(job, lambda step, _: steps.append(step), found.put)
        return found.get(timeout=120.0), steps[-1]

    return run


def test_a_candidate_that_crashes_ends_its_process(board: Board, tmp_path: Path, outcomes: Any) -> None:
    outcome, step = outcomes("crash")
    assert (outcome.error.code, step) == ("recalibration.crash", "VALIDATING")
    Store(tmp_path / "state")  # sweeps away what is left of it
    assert board.artefacts(tmp_path) == [board.serving.id]


def test_a_candidate_that_hangs_ends_at_its_deadline(board: Board, tmp_path: Path, outcomes: Any) -> None:
    outcome, step = outcomes("hang")
    assert (outcome.error.code, step) == ("recalibration.deadline", "VALIDATING")
    (kept,) = refusals(tmp_path)
    assert kept["error"] == {"code": outcome.error.code, "found": outcome.error.found}
    assert kept["inputs"]["model"] == board.model.sha256
