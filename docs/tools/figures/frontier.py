"""Draw a frontier: what plans of the sample's detector lose against what they take, by `tared plan --chart`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import ROOT
from docs.tools.figures.picture import save_small
from docs.tools.figures.street_run import SAMPLE, require_video

_FOLDER = ROOT / "var" / "figures" / "plan"
_MAX_LOSS = "0.03"


def draw_frontier(path: Path) -> None:
    """Write the picture: of the plan that keeps the loss over the whole recording, night and morning."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    calibration, plan, chart = (str(_FOLDER / name) for name in ("calibration.json", "plan.json", "plan.png"))
    spec, video = str(SAMPLE / "model.yaml"), str(require_video())
    _run("calibrate", spec, "--frames", video, "-o", calibration)
    bound = ("--max-loss", _MAX_LOSS, "-o", plan, "--chart", chart)
    _run("plan", spec, "--calibration", calibration, "--frames", video, *bound)
    save_small(Path(chart).read_bytes(), path)


def _run(*command: str) -> None:
    """Run a command of tared. Raises SystemExit with its own error."""
    done = subprocess.run([sys.executable, "-m", "fleet.cli", *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
