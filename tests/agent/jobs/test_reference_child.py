"""A new model is tried before it is taken up: built, opened, and compared with what serves; in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from raising_world import config_in
from worlds import SPEC
from zoo import image, residual_net

from agent.common.errors import AgentError, ConfigError
from agent.common.schema import validate
from agent.config import Config
from agent.daemon import run as daemon
from agent.jobs.candidate import build_reference
from agent.jobs.request import write_reference_job
from agent.models.build import build_artefact
from agent.models.model import open_model
from agent.vision.spec import ModelSpec
from calibrate.errors import TaredError
from engines.interface import silent
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.store.artefact import Store


def with_model(folder: Path, **spec: object) -> Config:
    onnx.save(residual_net(), folder / "model.onnx")
    return config_in(folder, model={**SPEC, "path": folder / "model.onnx", **spec})


def serving_in(folder: Path) -> Path:
    """Build the artefact of today's model, in float."""
    onnx.save(residual_net(), folder / "today.onnx")
    model = open_model(validate(ModelSpec, {**SPEC, "path": folder / "today.onnx"}, "test"))
    backend, store = OnnxRuntimeBackend(), Store(folder / "today")
    return build_artefact(model, backend, store.place, silent, calibration=None, precision="fp32").path


def tried(folder: Path, config: Config, frames: int = 8, accepted: bool = False) -> list[Mapping[str, Any]]:
    """Return the reports of a child that succeeds with config's model."""
    held_out = [image(residual_net(), seed) for seed in range(frames)]
    write_reference_job(folder / "job", config, folder / "model.onnx", serving_in(folder), held_out, accepted)
    said: list[Mapping[str, Any]] = []
    outcome = build_reference(folder / "job", said.append)
    assert outcome.artefact is not None
    assert outcome.artefact.is_dir()
    return said


def changed(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Another last layer in the model's file."""
    model = onnx.load(folder / "model.onnx")
    weights = model.graph.initializer[-1]
    weights.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(weights)), weights.name))
    onnx.save(model, folder / "model.onnx")


def test_a_model_that_can_be_served_is_built(tmp_path: Path) -> None:
    said = tried(tmp_path, with_model(tmp_path))
    assert said[0] == {"step": "BUILDING", "percent": 0}
    assert not any("warning" in each for each in said), "it answers as before"


def test_a_model_that_answers_no_numbers_is_refused(tmp_path: Path) -> None:
    """Its first inference ends well, and so would every other."""
    config = with_model(tmp_path)
    changed(tmp_path, lambda weights: np.full_like(weights, np.nan))
    with pytest.raises(AgentError, match=r"NaN or infinite values in"):
        tried(tmp_path, config)


@pytest.mark.parametrize("accepted", [False, True])
def test_a_model_that_answers_otherwise_takes_the_owners_consent(tmp_path: Path, accepted: bool) -> None:
    config = with_model(tmp_path)
    changed(tmp_path, lambda weights: -weights)
    if accepted:
        warnings = [each["warning"] for each in tried(tmp_path, config, accepted=True) if "warning" in each]
        assert len(warnings) == 1
        assert "the new model's answers differ by" in warnings[0]
    else:
        with pytest.raises(AgentError, match=r"model\.answers.*differ by .* on 8 frames"):
            tried(tmp_path, config)


def test_a_model_that_there_are_too_few_frames_to_compare_is_taken_and_that_is_said(tmp_path: Path) -> None:
    config = with_model(tmp_path)
    changed(tmp_path, lambda weights: -weights)
    assert {"warning": "nothing is seen on the held-out frames: the new model's answers were not compared"} in tried(
        tmp_path, config, frames=0
    )


def test_a_model_of_another_input_size_gets_the_pictures(tmp_path: Path) -> None:
    config = with_model(tmp_path)
    onnx.save(residual_net((1, 3, 24, 24)), tmp_path / "model.onnx")
    tried(tmp_path, config, accepted=True)


@pytest.mark.parametrize("spec", [{"labels": ["a", "b"]}, {"task": "detect", "decoder": "yolox"}])
def test_a_model_whose_answers_cannot_be_read_is_refused(tmp_path: Path, spec: Mapping[str, object]) -> None:
    """It builds; but every start with it would end at its decoder."""
    config = with_model(tmp_path, **spec)
    write_reference_job(tmp_path / "job", config, tmp_path / "model.onnx", serving_in(tmp_path), [])
    with pytest.raises(TaredError):
        build_reference(tmp_path / "job", lambda _: None)


def test_a_model_that_vanishes_while_it_is_read_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_model(tmp_path)

    def gone(*_: object) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(daemon, "content_of", gone)
    with pytest.raises(ConfigError, match=r"model\.unreadable"):
        daemon._open_model(config)
