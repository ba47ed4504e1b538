"""A new model is tried before it is taken up: built, opened and run on one frame, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from worlds import SPEC
from zoo import residual_net

from agent.common.errors import ConfigError
from agent.common.schema import validate
from agent.config import Config
from agent.daemon import run as daemon
from agent.jobs.candidate import build_reference
from agent.jobs.request import write_reference_job
from calibrate.errors import TaredError


def config_in(folder: Path, **spec: object) -> Config:
    onnx.save(residual_net(), folder / "model.onnx")
    content = {
        "model": {**SPEC, "path": folder / "model.onnx", **spec},
        "camera": {"source": "rtsp://camera"},
        "state_dir": folder / "state",
    }
    return validate(Config, content, "test")


def test_a_model_that_can_be_served_is_built(tmp_path: Path) -> None:
    write_reference_job(tmp_path / "job", config_in(tmp_path), tmp_path / "model.onnx")
    said: list[Mapping[str, Any]] = []
    outcome = build_reference(tmp_path / "job", said.append)
    assert outcome.artefact is not None
    assert outcome.artefact.is_dir()
    assert said[0] == {"step": "BUILDING", "percent": 0}


@pytest.mark.parametrize("spec", [{"labels": ["a", "b"]}, {"task": "detect", "decoder": "yolox"}])
def test_a_model_whose_answers_cannot_be_read_is_refused(tmp_path: Path, spec: Mapping[str, object]) -> None:
    """It builds; but every start with it would end at its decoder."""
    write_reference_job(tmp_path / "job", config_in(tmp_path, **spec), tmp_path / "model.onnx")
    with pytest.raises(TaredError):
        build_reference(tmp_path / "job", lambda _: None)


def test_a_model_that_goes_while_it_is_read_is_told_as_one_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path)

    def gone(_: Path) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(daemon, "content_of", gone)
    with pytest.raises(ConfigError, match=r"model\.unreadable"):
        daemon._open_model(config)
