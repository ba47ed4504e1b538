"""The daemon as a process on a blank state directory, with what its owner has made offline."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from runtime_under_test import RUNTIME
from worlds import FIRST_COMMIT, OUTLASTS_S, World, make_world

from agent.cli.offline_runs import run_build, run_calibrate
from calibrate.plan import PrecisionPlan, Repairs
from engines.calibration import load_calibration
from engines.quantise.equalise import equalised_name
from engines.registry import open_backend
from engines.store.artefact import Artefact, Store, read_artefact

DIVIDED = Repairs(divisors={"Conv_t4": (1.0, 2.0, 1.0, 1.0)}, ranges={equalised_name("Conv_t4"): 1.0})
PLAN = PrecisionPlan({"Conv_t2": "by hand"}, DIVIDED)
WATCHED = r"INT8 \w+ +drift calm"
NEVER = 100_000  # frames of the board's own calibration


@pytest.fixture
def world(tmp_path: Path) -> World:
    """With calibration.json, and engine/ that was built under plan.json."""
    world = make_world(tmp_path / "world", lambda _: 0.5, OUTLASTS_S)
    spec, backend = world.folder / "model.yaml", open_backend(RUNTIME)
    (world.folder / "plan.json").write_text(PLAN.to_json())
    with contextlib.redirect_stderr(io.StringIO()):
        file = world.folder / "calibration.json"
        run_calibrate(spec, str(world.folder / "clip.avi"), 64, "max", file, backend)
        run_build(spec, file, world.folder / "engine", backend, plan_path=world.folder / "plan.json")
    return world


def current(world: World) -> Artefact:
    artefact = Store(world.state_dir).read("current")
    assert artefact is not None
    return artefact


def test_start_lets_the_first_job_judge_an_artefact_that_serves_on_after_a_restart(world: World) -> None:
    world.config["start"] = "engine"
    world.change(calibration={"frames": NEVER})
    summary, said = world.run(until=FIRST_COMMIT)
    assert [job["state"] for job in summary["jobs"]] == ["COMMITTED"]
    assert f'message="the first calibration begins with start: {world.folder / "engine"}"' in said
    served = current(world)
    assert served.manifest["files"] == read_artefact(world.folder / "engine").manifest["files"]
    again, _ = world.run("--frames", "20")
    assert (again["artefact"], again["swaps"]) == (str(served.path), [])


@pytest.mark.trial
def test_calibration_file_takes_the_place_of_frames_under_a_configured_plan(world: World) -> None:
    world.config["plan"] = "plan.json"
    world.change(calibration={"frames": NEVER, "file": "calibration.json"})
    summary, _ = world.run(until=WATCHED)
    assert [job["state"] for job in summary["jobs"]] == ["COMMITTED"]
    served = current(world)
    assert (
        load_calibration(served.path / "calibration.json").id == load_calibration(world.folder / "calibration.json").id
    )
    assert set(served.manifest["inputs"]["plan"]["floats"]) == set(PLAN.floats)


@pytest.mark.trial
def test_files_that_cannot_be_used_are_reported_once_each_and_the_board_calibrates_by_itself(world: World) -> None:
    (world.folder / "engine" / "engine.onnx").write_bytes(b"")
    document = json.loads((world.folder / "calibration.json").read_text())
    (world.folder / "calibration.json").write_text(json.dumps({**document, "schema": 0}))
    (world.folder / "plan.json").write_text(PrecisionPlan({"Conv_t77": ""}).to_json())
    world.config.update(plan="plan.json", start="engine")
    world.change(calibration={"file": "calibration.json"})
    summary, said = world.run(until=FIRST_COMMIT)
    assert [job["state"] for job in summary["jobs"]] == ["COMMITTED"]
    assert load_calibration(current(world).path / "calibration.json").source == "camera"
    for code, setting in (
        ("artefact.damaged", "start"),
        ("calibration.unreadable", "calibration.file"),
        ("plan.node", "plan"),
    ):
        assert said.count(f'code={code} message="{code}: {setting}: ') == 1, said


@pytest.mark.trial
def test_an_engine_serves_on_under_its_plan_whatever_becomes_of_the_file(world: World) -> None:
    world.config.update(plan="plan.json", start="engine")
    world.run(until=FIRST_COMMIT)
    served = current(world)
    for text in ("", "[]", PrecisionPlan({"Conv_t77": ""}).to_json()):
        (world.folder / "plan.json").write_text(text)
        summary, said = world.run("--frames", "20")
        assert (summary["artefact"], summary["swaps"]) == (str(served.path), [])
        assert "plan: " in said
        assert "is not used: " in said
