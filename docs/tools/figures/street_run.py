"""A run of the bundled sample in a folder of its own: the daemon as `make run` starts it, at a broker of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from agent.config import Config, load_config
from agent.mqtt.endpoint import Endpoint
from benchmarks.loop_daemon import Daemon
from benchmarks.peers import ROOT
from benchmarks.recalibration import broker
from benchmarks.web_boards import pages
from engines.store.artefact import Artefact, read_artefact
from engines.store.signing import find_key
from examples.street.render import VIDEO_NAME, render_video, truth_path

SAMPLE = ROOT / "examples" / "street"
VIDEO = ROOT / "var" / "sample" / VIDEO_NAME
BOARD = "street-sample"
_SPEED = 1  # on a busy machine, too, its jobs have to end before the recording does
_DRAWN_PER_WEEK = 50_000.0  # frames for labels: a dozen in five minutes

Watch = Callable[[str, Daemon], None]


@dataclass(frozen=True)
class StreetRun:
    """What a run has left. summary: what `tared run --json` prints. folder: has config.yaml and state/."""

    folder: Path
    summary: dict[str, Any]

    @cached_property
    def config(self) -> Config:
        return load_config(self.folder / "config.yaml")

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @cached_property
    def engines(self) -> tuple[Artefact, Artefact]:
        """The engine of the night and the one that took its place in the morning."""
        night, morning = (self._artefact(swap["artefact"]) for swap in self.summary["swaps"])
        return night, morning

    def _artefact(self, identity: str) -> Artefact:
        return read_artefact(self.state_dir / "artefacts" / identity, find_key())


def require_video() -> Path:
    """Return the sample's recording, rendered where it is missing."""
    return VIDEO if VIDEO.exists() and truth_path(VIDEO).exists() else render_video(VIDEO)


def run_street(folder: Path, watch: Watch | None = None) -> StreetRun:
    """Run the sample; the folder is made anew.

    watch: is called with the address of the board's page while the daemon serves. Raises SystemExit for a run that has
    not changed its engine once, after one alarm.
    """
    require_video()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (
        broker(folder) as endpoint,
        pages(endpoint) if watch else nullcontext(("", 0)) as (url, _),
        Daemon(folder / "board", endpoint, _config(endpoint)) as daemon,
    ):
        if watch is not None:
            watch(f"{url}/boards/{BOARD}", daemon)
        daemon.wait()
    return kept_run(folder)


def kept_run(folder: Path) -> StreetRun:
    """Return the run that a folder holds. Raises SystemExit as `run_street`."""
    out = folder / "board" / "out"
    if not out.exists():
        raise SystemExit(f"error: no run in {folder}; make one: leave --kept away")
    summary = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    triggers = [swap["trigger"] for swap in summary["swaps"]]
    if triggers != ["first-start", "alarm"] or not summary["accuracy"]:
        jobs = [(job["trigger"], job["state"], job["reason"]) for job in summary["jobs"]]
        raise SystemExit(f"error: engines by {triggers}, jobs {jobs}; expected first-start, then alarm; run it again")
    return StreetRun(folder / "board", summary)


def _config(endpoint: Endpoint) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((SAMPLE / "config.yaml").read_text(encoding="utf-8"))
    del config["state_dir"]  # the daemon's folder has one
    camera = {**config["camera"], "source": str(VIDEO), "labels": str(truth_path(VIDEO)), "speed": _SPEED}
    return {
        **config,
        "backend": "auto",
        "model": str(SAMPLE / config["model"]),
        "camera": camera,
        "mqtt": {"host": endpoint.host, "port": endpoint.port, "device": BOARD, "telemetry_period_s": 1.0},
        "labelling": {"per_week": _DRAWN_PER_WEEK},
        "recalibration": {"nice": 0},
    }
