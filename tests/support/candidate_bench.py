"""A job's child process, and what it is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from runtime_under_test import RUNTIME
from warm_start import TalkingProcess
from worlds import SPEC
from zoo import residual_net

from agent.collection.collection import CalibrationSet, Collected
from agent.jobs.request import JobRequest
from agent.models.model import Model, open_model
from agent.vision.spec import ModelSpec
from calibrate.histogram import AbsHistogram
from engines.interface import Array, Backend
from engines.registry import open_backend


@pytest.fixture
def backend() -> Backend:
    return open_backend(RUNTIME)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return saved_model(tmp_path, residual_net((1, 3, 8, 8)))


def saved_model(folder: Path, graph: onnx.ModelProto, **spec: object) -> Model:
    """A model in a folder, under the usual spec but for these keys."""
    onnx.save(graph, folder / "model.onnx")
    return open_model(ModelSpec.model_validate({**SPEC, "path": folder / "model.onnx", **spec}))


def frames(count: int, brightness: float = 1.0) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    return [(rng.uniform(size=(1, 3, 8, 8)) * brightness).astype(np.float32) for _ in range(count)]


def collection_of(model: Model, backend: Backend, tensors: Sequence[Array]) -> CalibrationSet:
    collection = CalibrationSet(held_out_size=0)
    with closing(model.open_observer(backend)) as observer:
        for tensor in tensors:
            collection.add(tensor, observer.observe(tensor))
    return collection


def observed(model: Model, backend: Backend, tensors: list[NDArray[np.float32]]) -> dict[str, AbsHistogram]:
    return collection_of(model, backend, tensors).histograms


def collected(
    model: Model, backend: Backend, calibrating: list[NDArray[np.float32]], held_out: Sequence[Array]
) -> Collected:
    seen = collection_of(model, backend, calibrating)
    return Collected(len(calibrating), seen.histograms, list(held_out), list(calibrating[:8]), seen.extremes)


def request(model: Model, folder: Path, serving: Path | None = None, **changes: Any) -> JobRequest:
    keys: dict[str, Any] = {
        "spec": model.spec.model_dump(mode="json"),
        "model_sha256": model.sha256,
        "backend": RUNTIME,
        "threads": 1,
        "method": "max",
        "frames": 16,
        "source": "test",
        "state_dir": str(folder / "state"),
        "serving": str(serving) if serving else None,
        "max_loss": 0.5,
    }
    return JobRequest(**{**keys, **changes})


def run_child(directory: Path) -> list[dict[str, Any]]:
    """Run `python -m agent.jobs.candidate`; return all its messages."""
    child = TalkingProcess([str(directory)], "import runpy; runpy.run_module('agent.jobs.candidate', None, '__main__')")
    output, errors = child.communicate(timeout=60.0)
    assert child.wait() == 0, errors
    return [json.loads(line) for line in output.splitlines()]
