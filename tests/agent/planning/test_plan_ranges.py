"""A plan is made on frames of one brightness: its ranges are those of the calibration, which has seen others too."""

from __future__ import annotations

import contextlib
import io
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from bench import ERROR, contents
from plan_world import RAW
from repair_flow import uneven_net
from worlds import FPS, write_clip

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.cli.offline_runs import open_engine, run_calibrate
from agent.models.model import open_model
from agent.vision.fidelity import fidelity
from agent.vision.spec import load_model_spec
from agent.vision.task import VisionTask
from calibrate.plan import PrecisionPlan
from engines.calibration import load_calibration, save_calibration
from engines.quantise.equalise import equalised_name
from engines.registry import open_backend
from fleet.cli.main import main

MAX_LOSS = 0.2
RUNTIME = ("--backend", "onnxruntime")
LAYER = "Conv_t3"  # of `uneven_net`: the one that only divided channels save


def calibrate(folder: Path, clip: str, output: str, plan: Path | None = None) -> Path:
    backend = open_backend("onnxruntime")
    with contextlib.redirect_stderr(io.StringIO()):
        run_calibrate(folder / "model.yaml", str(folder / clip), 40, "entropy", folder / output, backend, plan)
    return folder / output


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that needs divided inputs, clips in three lights, a calibration of all and a plan made in the dark."""
    folder = tmp_path_factory.mktemp("ranges") / "world"
    folder.mkdir()
    onnx.save(uneven_net("SiLU"), folder / "model.onnx")
    (folder / "model.yaml").write_text(yaml.safe_dump({**RAW, "min_sqnr_db": 20.0}))
    lights = {"dark": lambda _: 0.1, "bright": lambda _: 1.0, "all": lambda ts: 0.1 + 0.9 * (ts / 4.0)}
    for name, light in lights.items():
        write_clip(folder / f"{name}.avi", light, 4 * FPS if name != "dark" else 12 * FPS)
    calibrate(folder, "all.avi", "calibration.json")
    arguments = ["--calibration", folder / "calibration.json", "--frames", folder / "dark.avi", "--costs", "macs"]
    words = ["plan", folder / "model.yaml", *arguments, "--max-loss", MAX_LOSS, "-o", folder / "plan.json", *RUNTIME]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        assert main([str(word) for word in words]) == 0
    return folder


@pytest.fixture
def world(stock: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stock, tmp_path / "world"))


def build(folder: Path, calibration: Path) -> int:
    words = ["build", folder / "model.yaml", "--calibration", calibration, "--plan", folder / "plan.json"]
    return main([str(word) for word in (*words, "-o", folder / "artefact", *RUNTIME)])


def loss(folder: Path, clip: str) -> float:
    """Of the artefact, compared with float, on all frames of a clip."""
    runtime, model = open_backend("onnxruntime"), open_model(load_model_spec(folder / "model.yaml"))
    agreements = []
    with (
        open_engine(folder / "artefact", runtime) as (engine, spec),
        closing(runtime.load(model.master.SerializeToString())) as reference,
    ):
        task = VisionTask(spec, engine.inputs, engine.outputs)
        for _, image in read_images(parse_source(str(folder / clip))):
            tensor, _ = task.preprocess(image)
            served, expected = (task.decode(each.infer(tensor), tensor.shape) for each in (engine, reference))
            agreements.append(fidelity(served, expected).value)
    return 1.0 - float(np.mean(agreements))


def plan_of(folder: Path) -> PrecisionPlan:
    return PrecisionPlan.from_json((folder / "plan.json").read_text())


def test_a_plan_made_in_the_dark_keeps_the_loss_in_daylight(world: Path) -> None:
    plan = plan_of(world)
    assert LAYER in plan.repairs.divisors
    assert LAYER not in plan.floats
    assert build(world, world / "calibration.json") == 0
    assert loss(world, "dark.avi") <= MAX_LOSS
    assert loss(world, "bright.avi") <= MAX_LOSS


def test_a_calibration_under_the_plan_has_histograms_of_what_it_divides(world: Path) -> None:
    path = calibrate(world, "all.avi", "under.json", world / "plan.json")
    under, plain = load_calibration(path), load_calibration(world / "calibration.json")
    assert equalised_name(LAYER) in under.amax
    np.testing.assert_allclose(under.extremes[LAYER], plain.extremes[LAYER], rtol=1e-5, atol=1e-5)
    assert under.check["result"]["fidelity"] == 1.0
    assert build(world, path) == 0
    assert loss(world, "bright.avi") <= MAX_LOSS


def test_a_calibration_that_does_not_show_the_ranges_is_refused_by_name(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = merged(world / "calibration.json")
    before = contents(world)
    assert build(world, path) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert ERROR.fullmatch(error)
    assert error.startswith("error: calibration.ranges: ")
    assert LAYER in error
    assert "calibrate again (" in error
    assert contents(world) == before


def test_without_extremes_a_plan_divides_nothing_and_says_so(world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["--calibration", merged(world / "calibration.json"), "--frames", world / "dark.avi", "--costs", "macs"]
    words = ["plan", world / "model.yaml", *given, "--max-loss", MAX_LOSS, "-o", world / "plan.json", *RUNTIME]
    assert main([str(word) for word in words]) == 0
    assert "warning: the calibration has no extremes" in capfd.readouterr().err
    assert not plan_of(world).repairs.divisors


def merged(path: Path) -> Path:
    """A calibration as a fleet merges it."""
    save_calibration(replace(load_calibration(path), extremes={}), path)
    return path
