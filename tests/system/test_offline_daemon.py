"""The daemon as a process on a blank state directory, with an engine that its owner has built offline."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from runtime_under_test import RUNTIME
from worlds import FIRST_COMMIT, OUTLASTS_S, make_world

from agent.cli.offline_runs import run_build, run_calibrate
from engines.registry import open_backend
from engines.store.artefact import Store, read_artefact

NEVER = 100_000  # frames of the board's own calibration


def test_start_lets_the_first_job_judge_an_artefact_that_serves_on_after_a_restart(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", lambda _: 0.5, OUTLASTS_S, calibration={"frames": NEVER})
    spec, file, engine = (world.folder / name for name in ("model.yaml", "calibration.json", "engine"))
    with contextlib.redirect_stderr(io.StringIO()):
        run_calibrate(spec, str(world.folder / "clip.avi"), 64, "max", file, open_backend(RUNTIME))
        run_build(spec, file, engine, open_backend(RUNTIME))
    world.config["start"] = "engine"
    summary, said = world.run(until=FIRST_COMMIT)
    assert [job["state"] for job in summary["jobs"]] == ["COMMITTED"]
    assert f'message="the first calibration begins with start: {engine}"' in said
    served = Store(world.state_dir).read("current")
    assert served is not None
    assert served.manifest["files"] == read_artefact(engine).manifest["files"]
    again, _ = world.run("--frames", "20")
    assert (again["artefact"], again["swaps"]) == (str(served.path), [])
