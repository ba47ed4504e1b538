"""A small world for whole-daemon tests: a tiny classifier, a video whose light changes, and a config of its own."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
import yaml
from brokers import eventually
from kept import records_in
from numpy.typing import NDArray
from places import ROOT
from runtime_under_test import RUNTIME
from warm_start import TalkingProcess
from zoo import residual_net

from agent.camera.source import is_live
from agent.core.state import JobState

SPEC: dict[str, Any] = {
    "path": "model.onnx",
    "task": "classify",
    "labels": ["a", "b", "c", "d", "e"],
    "input": {"color": "bgr", "resize": "stretch", "scale": 1 / 255},
}
FPS = 10
SPEED = 10  # of the clip, times real time; faster: frames that no test waits for take the processor's time
OUTLASTS_S = 1200.0  # of a clip that no test is to see the end of: two minutes at SPEED
_LIMIT_S = 240.0  # time limit of a run, whose jobs take seconds

# An engine is the store's from its commit on: what ends between swap and commit takes the candidate back.
FIRST_COMMIT = "event=commit .*trigger=first-start"
ALARM_COMMIT = "event=commit .*trigger=alarm"


@dataclass
class World:
    """A folder with model.onnx, model.yaml, clip.avi and config.yaml."""

    folder: Path
    config: dict[str, Any]

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    def change(self, **sections: Mapping[str, Any]) -> None:
        """Sections of config.yaml to update. A camera in the clip's place has no speed."""
        for section, values in sections.items():
            self.config[section] = {**self.config.get(section, {}), **values}
        if is_live(self.config["camera"]["source"]):
            self.config["camera"].pop("speed", None)

    def copy(self, folder: Path, **changes: Mapping[str, Any]) -> World:
        """This world in a folder of its own, with all that daemons have left in it. changes: as `change`."""
        shutil.copytree(self.folder, folder, symlinks=True)
        twin = World(folder, copy.deepcopy(self.config))
        twin.change(**changes)
        return twin

    def arguments(self, *more: str) -> list[str]:
        """Those of `tared run` in this world."""
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        return ["run", "-c", str(self.folder / "config.yaml"), "--json", *more]

    def command(self, *more: str) -> list[str]:
        """`tared run` in this world, as users start it."""
        return [sys.executable, "-m", "fleet.cli", *self.arguments(*more)]

    def run(self, *more: str, until: str = "", file_bytes: int | None = None) -> tuple[dict[str, Any], str]:
        """Run to the end, or until a line matches; the summary, and what was said on stderr.

        To wait for an event, as a swap, give `until` and frames in plenty: the machine decides how many pass meanwhile.
        Fails unless the exit code is 0.
        """
        return run_until(TalkingProcess(self.arguments(*more), file_bytes=file_bytes), until)

    def wait_for_first_commit(self) -> str:
        """Wait until the first job is COMMITTED and its journal closed; the engine's id.

        The engine serves, and is the store's, somewhat earlier: a disk that fails in between costs the job.
        """
        eventually(self._committed, 120.0)
        return self._committed()[0]

    def _committed(self) -> list[str]:
        records = records_in(self.state_dir)
        return [record.artefact or "" for record in records if record.state is JobState.COMMITTED]

    @contextlib.contextmanager
    def running(self) -> Iterator[TalkingProcess]:
        """The daemon as a process; killed at the end if it still runs."""
        with TalkingProcess(self.arguments()) as process:
            try:
                yield process
            finally:
                process.kill()


def run_until(
    tared: TalkingProcess, until: str = "", limit_s: float = _LIMIT_S, follow: Callable[[str], object] = len
) -> tuple[dict[str, Any], str]:
    """As World.run, for another `tared run`.

    until: A regular expression; SIGTERM follows its first match. follow: Called with each line on stderr.
    """
    said: list[str] = []
    with tared as process:
        limit = threading.Timer(limit_s, process.kill)
        limit.start()
        waiting = bool(until)
        for line in process.stderr:
            said.append(line)
            follow(line)
            if waiting and re.search(until, line):
                waiting = False
                process.terminate()
        summary = process.stdout.read()
        process.wait()
        limit.cancel()
    errors = "".join(said)
    assert process.returncode == 0, errors
    assert not waiting, f"nothing said '{until}':\n{errors}"
    return json.loads(summary), errors


def make_world(folder: Path, light: Callable[[float], float], seconds: float, **changes: Any) -> World:
    """light: from media time in s to brightness in [0, 1]. changes: as World's."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(residual_net((1, 3, 8, 8)), folder / "model.onnx")
    (folder / "model.yaml").write_text(yaml.safe_dump(SPEC))
    write_clip(folder / "clip.avi", light, round(seconds * FPS))
    config: dict[str, Any] = {
        "model": "model.yaml",
        "state_dir": "state",
        "backend": RUNTIME,
        "camera": {"source": "clip.avi", "speed": SPEED},
        "observe": {"held_out": 16, "budget": None},
        "calibration": {"frames": 32, "within_s": 2.0},
        "drift": {"block_s": 1.0, "min_gain": 0.0},  # that so small a model loses answers, too, is a matter of luck
        "recalibration": {"max_loss": 0.5, "nice": 0},  # other tests' processes want the CPU as well
        "probation": {"frames": 1, "seconds": 0.0},
        "store": {"reserve_bytes": 0},
        "mqtt": {"device": "board", "telemetry_period_s": 0.5},
    }
    world = World(folder, config)
    world.change(**changes)
    return world


@pytest.fixture(scope="session")
def calibrated_once(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A steady light, to which a daemon has calibrated its engine; not to be changed."""
    world = make_world(tmp_path_factory.mktemp("calibrated") / "world", lambda _: 0.5, 400.0)  # copied often
    world.run(until=FIRST_COMMIT)
    return world


@pytest.fixture
def calibrated_world(calibrated_once: World, tmp_path: Path) -> World:
    return calibrated_once.copy(tmp_path / "calibrated")


def write_clip(path: Path, light: Callable[[float], float], frames: int) -> None:
    """Write the picture of a camera under this light, as for `make_world`. Clips are kept for all workers."""
    lights = np.array([light(number / FPS) for number in range(frames)])
    name = hashlib.sha256(inspect.getsource(_encode).encode() + lights.tobytes()).hexdigest()
    kept = ROOT / "var" / "clips" / f"{name}.avi"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            _encode(Path(folder) / "clip.avi", lights)
            os.replace(Path(folder) / "clip.avi", kept)
    shutil.copyfile(kept, path)


def _encode(path: Path, lights: NDArray[np.float64]) -> None:
    """Write a frame under each light."""
    rng = np.random.default_rng(0)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), FPS, (32, 32))
    for light in lights:
        writer.write((rng.uniform(0.0, 255.0, (32, 32, 3)) * light).astype(np.uint8))
    writer.release()
