"""Draw a frontier: what plans of the sample's detector lose against what they take, by `tared plan --chart`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.peers import ROOT
from docs.tools.figures.picture import save_small
from docs.tools.figures.street_run import SAMPLE, VIDEO, StreetRun

_MAX_LOSS = 0.01
_MOST_S = 540.0


def draw_frontier(run: StreetRun, path: Path) -> None:
    """Write the picture: of a plan with the calibration of the night, on frames of the whole recording."""
    folder = run.folder.parent / "plan"
    folder.mkdir(exist_ok=True)
    calibration, plan, chart = run.engines[0].path / "calibration.json", folder / "plan.json", folder / "plan.png"
    command = ["plan", str(SAMPLE / "model.yaml"), "--calibration", str(calibration), "--frames", str(VIDEO)]
    command += ["--max-loss", str(_MAX_LOSS), "-o", str(plan), "--chart", str(chart)]
    done = subprocess.run([sys.executable, "-m", "fleet.cli", *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    save_small(chart.read_bytes(), path)
