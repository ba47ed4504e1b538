"""Nodes that a runtime has no INT8 kernels for: left float, remembered, and reported as one build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from candidate_bench import observed, saved_model
from fake_tensorrt import FakeTensorRt
from numpy.typing import NDArray
from zoo import residual_net

import engines.trt.backend as tensorrt_backend
from agent.collection.collection import Collected
from agent.jobs.candidate import run_job
from agent.jobs.child_process import JobOutcome
from agent.jobs.request import JobRequest, write_job
from agent.models.build import build_artefact
from agent.models.model import Model, calibrate
from engines.interface import BuildRequest, Built, Progress, silent
from engines.registry import open_backend, options_for
from engines.store.artefact import Artefact, Store, read_artefact
from engines.trt.backend import TensorRtBackend

FIRST, SECOND = "Conv_t0", "Conv_t2"
LITTLE = 0.03  # of the work, which a job may leave float where it is loud


class Bench:
    """A model with what was seen of it, and every build of its engines."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.model: Model = saved_model(folder, residual_net((1, 3, 8, 8)))
        rng = np.random.default_rng(0)
        self.frames: list[NDArray[np.float32]] = [rng.random((1, 3, 8, 8), np.float32) for _ in range(16)]
        self.histograms = observed(self.model, open_backend("onnxruntime"), self.frames[:8])
        self.builds = 0
        build = TensorRtBackend.build

        def counted(backend: TensorRtBackend, request: BuildRequest, progress: Progress = silent) -> Built:
            self.builds += 1
            return build(backend, request, progress)

        monkeypatch.setattr(TensorRtBackend, "build", counted)

    def serving(self, reported: list[float]) -> Artefact:
        """Return the artefact that a daemon serves."""
        state = self.folder / "state"
        return build_artefact(
            self.model,
            open_backend("tensorrt", options_for(state, 1, None)),
            Store(state).place,
            lambda fraction, _: reported.append(fraction),
            calibration=calibrate(self.model, self.histograms, "entropy", 8, "night"),
        )

    def recalibrate(self, name: str, serving: Path) -> tuple[Artefact, list[Mapping[str, Any]]]:
        """The artefact of a job, and its reports."""
        request = JobRequest(
            spec=self.model.spec.model_dump(mode="json"), model_sha256=self.model.sha256, backend="tensorrt", threads=1,
            method=name, frames=8, source="morning", state_dir=str(self.folder / "state"), serving=str(serving),
            max_loss=0.9,
        )  # fmt: skip
        write_job(self.folder / name, request, Collected(8, self.histograms, self.frames[8:], self.frames[:8]))
        reported: list[Mapping[str, Any]] = []
        outcome: JobOutcome = run_job(self.folder / name, reported.append)
        assert outcome.artefact is not None
        return read_artefact(outcome.artefact), reported


@pytest.fixture
def bench(fake: FakeTensorRt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    assert fake.without_int8 == set()
    return Bench(tmp_path, monkeypatch)


def test_a_recalibration_starts_from_what_the_engine_in_service_taught(bench: Bench, fake: FakeTensorRt) -> None:
    fake.without_int8 = {FIRST}
    serving = bench.serving([])
    assert (bench.builds, set(serving.manifest["without_int8"])) == (2, {FIRST})
    bench.builds = 0
    again, reported = bench.recalibrate("max", serving.path)
    assert bench.builds == 1
    assert again.manifest["without_int8"] == serving.manifest["without_int8"]
    share = serving.manifest["int8_macs_share"]
    assert share - LITTLE <= again.manifest["int8_macs_share"] <= share < 1.0
    percents = [line["percent"] for line in reported]
    assert percents == sorted(percents)
    judging = {line["percent"] for line in reported if line["step"] == "VALIDATING"}
    assert len(judging) > 2  # no daemon has built the reference here, so the job does


def test_another_board_is_asked_anew(bench: Bench, fake: FakeTensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.without_int8 = {FIRST}
    serving = bench.serving([])
    bench.builds, fake.without_int8 = 0, set()
    monkeypatch.setattr(tensorrt_backend, "board", lambda: {"power_mode": "pmode:0001"})
    again, _ = bench.recalibrate("max", serving.path)
    assert (bench.builds, again.manifest["without_int8"]) == (1, {})
    assert again.manifest["int8_macs_share"] >= 1.0 - LITTLE


def test_several_builds_are_reported_as_one(bench: Bench, fake: FakeTensorRt) -> None:
    """The second node is found only after the first is float."""
    reported: list[float] = []
    fake.without_kernel = {FIRST}
    fake.without_int8 = {SECOND}
    serving = bench.serving(reported)
    assert (bench.builds, set(serving.manifest["without_int8"])) == (3, {FIRST, SECOND})
    assert reported == sorted(reported)
    assert len(set(reported)) > 6
    assert (max(reported), reported.count(1.0)) == (1.0, 1)
