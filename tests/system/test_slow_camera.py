"""A daemon that is too slow for a camera whose frames it must all take, and says so of what it missed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import yaml
from listening import Listening
from v4l2_driver import V4l2Driver
from worlds import make_world

from agent.config import load_config
from agent.contract.messages import Birth
from agent.daemon.supervisor import Supervisor
from agent.models.model import open_model
from agent.uplink.link import MqttLink
from engines.onnxruntime_backend import OnnxRuntimeEngine
from engines.registry import open_backend

PERIOD_S = 0.01
ENGINE_S = 0.05


class Driver(V4l2Driver):
    """A V4L2 driver with one buffer, as OpenCV shows it: what nobody fetched in time is overwritten."""

    period_s = PERIOD_S

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self._began_s = time.monotonic()

    def read(self) -> tuple[bool, np.ndarray]:
        passed = int((time.monotonic() - self._began_s) / PERIOD_S)
        self._number = max(self._number + 1, passed)
        time.sleep(max(0.0, self._began_s + self._number * PERIOD_S - time.monotonic()))
        return True, np.random.default_rng(self._number).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def test_frames_that_it_kept_waiting_for_are_counted_as_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, fast = Listening(), OnnxRuntimeEngine.infer

    def slow(*arguments: Any) -> Any:
        time.sleep(ENGINE_S)
        return fast(*arguments)

    monkeypatch.setattr(cv2, "VideoCapture", Driver)
    monkeypatch.setattr(OnnxRuntimeEngine, "infer", slow)
    (tmp_path / "video0").touch()
    world = make_world(
        tmp_path,
        lambda _: 0.5,
        0.1,
        mqtt={"telemetry_period_s": 0.1},
        camera={"source": f"v4l2:{tmp_path / 'video0'}", "policy": "every-frame"},
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(world.config))
    config = load_config(tmp_path / "config.yaml")
    model = open_model(config.model)
    link.enough = lambda: sum(camera["dropped"].get("slow", 0) for camera in link.cameras()) > 40
    birth = Birth(agent_version="0", model=model.sha256)
    summary = Supervisor(config, model, open_backend("onnxruntime"), cast(MqttLink, link), birth).run()
    assert summary.loop is not None
    missed, served = summary.loop.dropped, summary.loop.frames
    assert set(missed) == {"slow"}
    assert 0.5 < missed["slow"] / (served * (ENGINE_S / PERIOD_S - 1.0)) < 2.0
