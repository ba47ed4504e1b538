"""A disk on a network hangs under the daemon: the video goes on where it can, and SIGTERM ends the process in time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher, eventually
from daemon_life import LIMIT_S, TOPICS, Life, living
from hanging_mount import HangingMount, mounted
from worlds import World

END_S = 3.0
IMPATIENT = f"from agent.system import process\nprocess.END_S = {END_S}\n"  # the rest as in `tared run`

pytestmark = [pytest.mark.trial, pytest.mark.broker]


@contextmanager
def on_a_mount(world: World, broker: RealBroker, *names: str, **mqtt: Any) -> Iterator[tuple[HangingMount, Life]]:
    """A daemon with a live camera, and these of its files on a mount that may hang."""
    real, shown = world.folder / "real", world.folder / "mount"
    with mounted(real, shown) as mount:
        for name in names:
            os.replace(world.folder / name, real / name)
            (world.folder / name).symlink_to(shown / name)
        address = {"host": broker.host, "port": broker.port, "telemetry_period_s": 0.5, "keepalive_s": 5}
        world.change(mqtt={**address, **mqtt}, camera={"source": "rtsp://camera"})
        scene = world.folder / "scene"
        scene.write_text(str(world.folder / "clip.avi"))
        with living(world, scene, broker, "life", IMPATIENT) as life:
            try:
                yield mount, life
            finally:
                mount.go_on()


def serves(watcher: Watcher) -> None:
    """Frames are answered, and telemetry says so, from now on."""
    watcher.all()
    for _ in range(6):
        assert watcher.expect(TOPICS.telemetry)["cameras"]["camera"]["fps"] > 0.0


@pytest.mark.parametrize("name", ["model.onnx", "password"])
def test_a_model_or_a_key_that_hangs_costs_itself(calibrated_world: World, any_broker: RealBroker, name: str) -> None:
    (calibrated_world.folder / "password").write_text("secret\n")
    options = {"username": "board", "password_file": str(calibrated_world.folder / "password")}
    with (
        Watcher(any_broker.endpoint) as watcher,
        on_a_mount(calibrated_world, any_broker, name, **options) as (mount, life),
    ):
        watcher.expect(TOPICS.telemetry)
        mount.hang()
        serves(watcher)
        assert life.status()["frames"] > 0
        life.process.terminate()
        assert life.process.wait(LIMIT_S) == 0, life.log.read_text()


def test_a_state_directory_that_hangs_stops_no_frame_and_no_signal(
    calibrated_world: World, any_broker: RealBroker
) -> None:
    """Decisions wait: what is decided has to be written down. The frame path has no file of it."""
    results = calibrated_world.folder / "results.jsonl"
    calibrated_world.change(results={"file": str(results)})
    with (
        Watcher(any_broker.endpoint) as watcher,
        on_a_mount(calibrated_world, any_broker, "state") as (mount, life),
    ):
        watcher.expect(TOPICS.telemetry)
        mount.hang()
        size = _grown(results, life, lambda: 0)
        life.wait(lambda: mount.waiting > 0)  # the supervisor, for the disk
        _grown(results, life, lambda: size)
        life.process.terminate()
        eventually(lambda: "Timeout (" in life.log.read_text(), LIMIT_S)
        mount.go_on()  # the kernel itself waits for pages of SQLite's that are mapped there, also after SIGKILL
        assert life.process.wait(LIMIT_S) == 1


def test_a_start_from_a_model_that_hangs_can_be_ended(calibrated_world: World, any_broker: RealBroker) -> None:
    with on_a_mount(calibrated_world, any_broker, "model.onnx") as (mount, life):
        mount.hang()
        life.wait(lambda: mount.waiting > 0)
        life.process.terminate()
        life.process.wait(LIMIT_S)


def _grown(results: Path, life: Life, size: Callable[[], int]) -> int:
    """The size of the file once more has come."""
    life.wait(lambda: results.exists() and results.stat().st_size > size())
    return results.stat().st_size
