"""The daemon when its observer fails, or takes long to build: in this process, with a link that only listens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import yaml
from brokers import eventually
from kept import kept_in
from listening import Listening
from observer_bench import FAULT, FULL, Faulty
from runtime_under_test import RUNTIME
from worlds import make_world

import agent.monitoring.observer as observer_module
from agent.config import load_config
from agent.contract.messages import Birth
from agent.control.summary import RunSummary
from agent.daemon.supervisor import Supervisor
from agent.models.model import open_model
from agent.mqtt.message import Message
from agent.uplink.link import MqttLink
from calibrate.errors import TaredError
from engines.interface import BuildRequest, Observer, Progress, silent
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.registry import open_backend
from fleet.operator import new_command

Change = Callable[[Observer, Progress], Observer]


class Daemon:
    """One run of a supervisor on a steady light."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link = Listening()
        self._folder = folder
        self._patch = monkeypatch

    def run(self, seconds: float, change: Change, policy: str = "auto") -> RunSummary:
        """`change` makes what serves as the observer of the observer that there is."""
        real = OnnxRuntimeBackend.observer

        def changed(
            backend: OnnxRuntimeBackend,
            request: BuildRequest,
            taps: Sequence[str],
            progress: Progress = silent,
            layers: Sequence[str] = (),
        ) -> Observer:
            return change(real(backend, request, taps, layers=layers), progress)

        self._patch.setattr(OnnxRuntimeBackend, "observer", changed)
        world = make_world(
            self._folder, lambda _: 0.5, seconds, mqtt={"telemetry_period_s": 0.1}, camera={"policy": policy}
        )
        (world.folder / "config.yaml").write_text(yaml.safe_dump(world.config))
        config = load_config(world.folder / "config.yaml")
        model = open_model(config.model)
        birth = Birth(agent_version="0", model=model.sha256)
        link = cast(MqttLink, self.link)  # as far as a supervisor knows
        return Supervisor(config, kept_in(config.state_dir), model, open_backend(RUNTIME), link, birth).run()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    for name in ("_OPENING_S", "_OBSERVING_S"):
        monkeypatch.setattr(observer_module, name, (0.01, 0.1))
    return Daemon(tmp_path, monkeypatch)


def test_an_observer_that_fails_for_a_while_is_reported_and_the_video_goes_on(daemon: Daemon) -> None:
    heard = daemon.link
    heard.enough = lambda: heard.events("swap") and heard.events("observer") and "fidelity" in heard.cameras()[-1]
    summary = daemon.run(600.0, lambda observer, _: Faulty(observer, [*[None] * 60, *[FULL] * 10]))
    assert summary.loop is not None
    assert summary.loop.dropped == {}
    assert [swap.trigger for swap in summary.swaps] == ["first-start"]
    (error,) = daemon.link.events("error")
    assert (error["code"], error["part"]) == ("cuda.memory", "observer")
    (back,) = daemon.link.events("observer")
    assert back["state"] == "back"
    silent_ones = [camera for camera in daemon.link.cameras() if "observer" in camera]
    assert {camera["observer"] for camera in silent_ones} == {"cuda.memory"}
    assert all(camera["drift"] == {} and "fidelity" not in camera for camera in silent_ones)
    assert set(daemon.link.states) == {"degraded", "online", "stopping"}


def test_a_lost_gpu_ends_the_daemon(daemon: Daemon) -> None:
    with pytest.raises(TaredError) as raised:
        daemon.run(600.0, lambda observer, _: Faulty(observer, [None, FAULT]))
    assert raised.value is FAULT


def test_the_video_does_not_wait_for_a_reference_that_has_to_be_built(daemon: Daemon) -> None:
    def is_served_meanwhile() -> bool:
        return any(camera["fps"] > 0.0 for camera in daemon.link.cameras() if camera.get("observer") == "preparing")

    def built(observer: Observer, progress: Progress) -> Observer:
        for percent in range(0, 101, 5):
            progress(percent / 100, "Timing graph nodes")
            if percent == 50:
                eventually(is_served_meanwhile, 120.0)
        return observer

    daemon.link.enough = lambda: daemon.link.events("swap")
    summary = daemon.run(600.0, built, "freshest")  # as a camera's
    assert summary.loop is not None
    assert summary.loop.frames > 100
    assert [swap.trigger for swap in summary.swaps] == ["first-start"]
    told = [event for event in daemon.link.events("job") if event["trigger"] == "start"]
    assert [event["percent"] for event in told] == sorted(event["percent"] for event in told)
    assert {event["engine"] for event in told} == {"reference"}
    assert is_served_meanwhile()
    steps = [(event["trigger"], event["step"]) for event in daemon.link.events("job")]
    assert steps.index(("first-start", "COLLECTING")) > steps.index(("start", "BUILDING"))
    assert daemon.link.events("error") == []


def test_a_source_that_ends_first_gives_the_build_up(daemon: Daemon) -> None:
    ended: list[BaseException] = []

    def endless(_observer: Observer, progress: Progress) -> Observer:
        try:
            while True:
                progress(0.1, "Timing graph nodes")
                time.sleep(0.01)
        except BaseException as error:
            ended.append(error)
            raise

    summary = daemon.run(10.0, endless, "freshest")
    assert summary.loop is not None
    assert summary.loop.frames > 50
    assert len(ended) == 1


def test_a_reference_that_never_opens_leaves_the_video_and_refuses_recalibrations(daemon: Daemon) -> None:
    def never(_observer: Observer, _progress: Progress) -> Observer:
        command = new_command("recalibrate", {}, time.time())
        daemon.link.inbox.put(Message("cmd", command.to_json(), 1, False))
        raise FULL

    summary = daemon.run(20.0, never)
    assert summary.loop is not None
    assert summary.loop.frames == 200
    assert [error["code"] for error in daemon.link.events("error")] == ["cuda.memory"]
    refused = [message for message in daemon.link.sent if message.get("error")]
    assert {message["error"]["code"] for message in refused} == {"command.observer"}
    assert not [event for event in daemon.link.events("job") if event["trigger"] == "first-start"]
