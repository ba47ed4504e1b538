"""`tared run` as a process on a recording, as the parts of benchmarks/daemon_engines.py run and follow it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from agent.vision.spec import ModelSpec
from benchmarks.models import DATA, MODELS
from benchmarks.peers import ROOT

FRAMES = 96  # that calibrate; beside them 32 are held out, as by default
COCO = "img_coco_train2017_first128_labelled.zip"
CIFAR_TRAIN, CIFAR_TEST = "img_cifar10_train_calib_500.zip", "img_cifar10_test_A_3000.zip"
FIRST_SCENES = {
    "resnet20": CIFAR_TRAIN,
    "fastestdet": "vid_one_by_one_person_768x432.mp4",
    "ultraface": "vid_face_asl_walk_640x480.mkv",
    "yolox_nano": "vid_vehicle_surveillance_640x352.mp4",
}
JOB_LIMIT_S = 900.0
JOB_ENDED = r"event=(?:job|error) .*step=(?:COMMITTED|ROLLED_BACK|FAILED|CANCELLED)"

_CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_STEP = re.compile(r"event=(?:job|error) .*step=(\w+)")
_ERROR = re.compile(r'event=error code=([\w.]+) message="(.*?)(?<!\\)"')
_END_S = 60.0


def model_spec(name: str) -> ModelSpec:
    """Return the spec of MODELS[name]."""
    keys, _ = MODELS[name]
    labels = {"labels": _CIFAR_CLASSES} if name == "resnet20" else {}
    return ModelSpec.model_validate({**keys, **labels, "path": DATA / str(keys["path"])})


def model_config(name: str, camera: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration with the defaults but for fewer frames, and a short probation."""
    spec = model_spec(name)
    return {
        "model": {**spec.model_dump(mode="json"), "path": str(spec.path)},
        "camera": dict(camera),
        "calibration": {"frames": FRAMES, "within_s": 10.0},
        "probation": {"frames": 30, "seconds": 1.0},
        "mqtt": {"host": None},
        "state_dir": str(folder / "state"),
        "backend": "onnxruntime",
    }


@dataclass(frozen=True)
class Line:
    """A line of a daemon's log: its number, the wall clock in ns when it came, and the text."""

    number: int
    at_ns: int
    text: str


class FollowedDaemon:
    """A context manager: a daemon whose log is read as it comes. It is ended with SIGTERM.

    Attributes:
        process: The daemon.
        summary: Known after the end: what `tared run --json` prints; empty where it printed nothing.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, program: Sequence[str] = ("fleet.cli",)) -> None:
        """Write config.yaml and the log to `folder`. program: the module to run, and what stands before `run`."""
        self.summary: dict[str, Any] = {}
        self._folder = folder
        self._lines: list[Line] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)))
        self._command = [sys.executable, "-m", *program, "run", "-c", str(folder / "config.yaml"), "--json"]

    def __enter__(self) -> FollowedDaemon:
        with (self._folder / "out").open("wb") as out:
            self.process = subprocess.Popen(self._command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reader.join()
        printed = (self._folder / "out").read_text().strip().splitlines()
        self.summary = json.loads(printed[-1]) if printed else {}

    def wait(self, pattern: str, limit_s: float, after: int = -1) -> Line | None:
        """Return the first line with a match behind line `after`; None if none comes in time, or ever.

        Raises SystemExit for a daemon that has failed.
        """
        deadline_s = time.monotonic() + limit_s
        with self._changed:
            while True:
                found = next((line for line in self._lines[after + 1 :] if re.search(pattern, line.text)), None)
                left_s = deadline_s - time.monotonic()
                if found is not None or left_s <= 0.0:
                    return found
                if not self._reader.is_alive():
                    if self.process.wait() == 0:
                        return None
                    raise SystemExit("error: a daemon that failed: " + "".join(line.text for line in self._lines[-20:]))
                self._changed.wait(min(left_s, 1.0))

    def steps(self, after: int = -1) -> dict[str, int]:
        """Return when the job behind line `after` entered each of its states, in ns of the wall clock."""
        with self._changed:
            entered = [(step[1], line.at_ns) for line in self._lines[after + 1 :] if (step := _STEP.search(line.text))]
        return dict(reversed(entered))

    def error(self) -> str:
        """Return the latest error that was reported."""
        with self._changed:
            found = [match for line in self._lines if (match := _ERROR.search(line.text))]
        return f"{found[-1][1]}: {found[-1][2]}" if found else "no end in time"

    def _read(self) -> None:
        assert self.process.stderr is not None
        with (self._folder / "log").open("w") as log, self.process.stderr as said:
            for number, text in enumerate(said):
                log.write(text)
                with self._changed:
                    self._lines.append(Line(number, time.time_ns(), text))
                    self._changed.notify_all()
