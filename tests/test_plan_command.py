"""`tared plan` as users run it: what it writes and says, what it refuses, and what an interruption leaves."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
import yaml
from bench import ERROR, contents, tared
from fake_tensorrt import FakeTensorRt
from onnx import ModelProto
from plan_world import LOUD, RAW, plan_world, two_branches
from zoo import Net, by_name, residual_net

from agent.cli import main
from agent.planning.costs import Builder
from calibrate.plan import PrecisionPlan
from engines.backend import Array, Engine, TensorSpec
from engines.placement import place
from engines.qdq import insert_qdq

KEYS = {
    *("int8_macs_share", "predicted_loss", "measured_loss", "measured_loss_upper", "certified", "latency_ms"),
    *("latency_float_ms", "faster", "builds", "seconds", "output"),
}


class Place:
    """A world, and the command line in this process."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capfd = capfd

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def arguments(self, *more: object, output: str = "plan.json") -> list[str]:
        given = ["--calibration", self / "calibration.json", "--frames", self / "clip.avi"]
        limits = ["--max-loss", 0.2, "--costs", "macs"]
        return [str(each) for each in ("plan", self / "model.yaml", *given, *limits, "-o", self / output, *more)]

    def plan(self, *more: object, output: str = "plan.json") -> dict[str, Any]:
        """What it prints with --json."""
        assert main([*self.arguments(*more, output=output), "--json"]) == 0
        told: dict[str, Any] = json.loads(self._capfd.readouterr().out)
        return told

    def says(self, *arguments: object) -> tuple[str, str]:
        """What a command says on stdout and stderr."""
        assert main([str(argument) for argument in arguments]) == 0
        heard = self._capfd.readouterr()
        return heard.out, heard.err

    def refuses(self, *arguments: object) -> str:
        """The error; every file is as it was, and none is new."""
        before = contents(self.folder)
        assert main([str(argument) for argument in arguments]) == 2
        heard = self._capfd.readouterr()
        assert (heard.out, contents(self.folder)) == ("", before)
        error = heard.err.splitlines()[-1]
        assert ERROR.fullmatch(error), heard.err
        return error.removeprefix("error: ")

    def evidence(self, name: str = "plan.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self / name).read_text())["evidence"]
        return found

    def change_spec(self, **changes: Any) -> None:
        (self / "model.yaml").write_text(yaml.safe_dump({**RAW, **changes}))


@pytest.fixture(scope="module", name="stock")
def stock_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_world(tmp_path_factory.mktemp("stock") / "world")


@pytest.fixture
def bench(stock: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Place:
    return Place(Path(shutil.copytree(stock, tmp_path / "world")), capfd)


def test_a_plan_is_written_shown_explained_and_built(bench: Place) -> None:
    told = bench.plan(output="new/folder/plan.json")
    assert set(told) == KEYS
    assert told["certified"]
    assert told["measured_loss_upper"] <= 0.2
    assert told["int8_macs_share"] == 0.5
    assert told["builds"] <= 6
    written = bench / "new/folder/plan.json"
    assert told["output"] == str(written)
    assert sorted(path.name for path in written.parent.iterdir()) == ["plan.json"]  # no journal
    shown, _ = bench.says("plan", written, "--show")
    assert "Certified: a loss of at most" in shown
    assert LOUD in shown
    explained, _ = bench.says("plan", written, "--explain", "Conv_t0")
    assert f"{LOUD} stays float: INT8 saves" in explained
    bench.says("plan", written, "--show", "--chart", bench / "chart.png")
    assert cv2.imread(str(bench / "chart.png")).shape == (800, 1280, 3)
    build = ["build", bench / "model.yaml", "--calibration", bench / "calibration.json", "--plan", written]
    bench.says(*build, "-o", bench / "artefact")
    manifest = json.loads((bench / "artefact/manifest.json").read_text())
    assert manifest["int8_macs_share"] == 0.5
    planning = manifest["planning"]
    assert planning == json.loads(written.read_text())["evidence"]
    assert {"costs", "groups", "candidates", "certificate", "verdict"} <= set(planning)
    assert all(np.isfinite(group["sensitivity"]) for group in planning["groups"])


def test_costs_are_measured_unless_told_otherwise(bench: Place) -> None:
    told = bench.plan("--costs", "measured")
    assert 3 <= told["builds"] <= 13
    costs = bench.evidence()["costs"]
    assert 3 <= costs["builds"] <= 8
    assert (costs["source"] == "measured") == (costs["why"] == "")


def test_how_many_frames_it_takes_is_said_before_the_work(bench: Place) -> None:
    _, said = bench.says(*bench.arguments())
    assert said.startswith("24 frames to search with, 96 others to certify on: a plan that loses nothing is certified")


def scaled(model: ModelProto) -> ModelProto:
    """The same graph with other weights."""
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values * np.float32(0.5), tensor.name))
    return model


def test_what_cannot_work_is_refused_before_the_search(bench: Place) -> None:
    def refused(*changes: object) -> str:
        return bench.refuses(*bench.arguments(*changes))

    assert refused("--frames", bench / "none.avi").startswith("camera.")
    few = refused("--max-loss", 0.001)
    assert few.startswith("plan.frames: 96 frames to measure on in ")
    assert "at least 3" in few
    assert "or accept --max-loss 0.036" in few
    assert refused("--calibration", bench / "none.json").startswith("calibration.unreadable: ")
    assert refused("-o", bench.folder).startswith("plan.write: ")
    assert refused("-o", bench / "clip.avi/plan.json").startswith("plan.write: ")
    assert refused("--dataset", bench / "none.zip").startswith("dataset.")
    (bench / "empty").mkdir()
    assert refused("--frames", bench / "empty").startswith("images.none: ")
    bench.change_spec(precision={"keep_float": ["Cnov"]})
    assert "keep_float: Cnov, which matches no node" in refused()


def test_a_calibration_of_another_model_is_refused(bench: Place) -> None:
    onnx.save(scaled(two_branches()), bench / "model.onnx")
    assert bench.refuses(*bench.arguments()).startswith("calibration.model: ")


def test_a_plan_of_another_model_is_refused(bench: Place) -> None:
    bench.plan()
    build = ["build", bench / "model.yaml", "--calibration", bench / "calibration.json", "--plan", bench / "plan.json"]
    plan = json.loads((bench / "plan.json").read_text())
    plan["floats"]["Conv_t77"] = "by hand"
    (bench / "plan.json").write_text(json.dumps(plan))
    assert bench.refuses(*build, "-o", bench / "artefact").startswith("plan.node: node 'Conv_t77' in the plan")
    onnx.save(scaled(two_branches()), bench / "model.onnx")  # the same nodes, other weights
    assert bench.refuses(*build, "-o", bench / "artefact").startswith("plan.model: a plan of model ")


def test_a_budget_of_nothing_gives_a_plan_without_int8(bench: Place) -> None:
    told = bench.plan("--budget-s", 0)
    assert (told["certified"], told["int8_macs_share"], told["builds"]) == (False, 0.0, 0)
    assert "the time was up" in bench.evidence()["verdict"]
    assert not (bench / "plan.json.journal").exists()  # nothing is in it
    shown, _ = bench.says("plan", bench / "plan.json", "--show")
    assert "stopped early" in shown


def quantised(plan: PrecisionPlan) -> ModelProto:
    master = residual_net()
    placement = place(master, plan)
    return insert_qdq(master, placement, dict.fromkeys(placement.taps, 4.0))


def test_a_model_that_is_int8_already_leaves_nothing_to_plan(bench: Place) -> None:
    onnx.save(quantised(PrecisionPlan()), bench / "model.onnx")
    bench.change_spec(task="classify")
    told = bench.refuses(*bench.arguments())
    assert told.startswith("plan.nothing: model.onnx, which brings its own INT8, and no other layer that may be;")


def test_of_a_model_that_is_partly_int8_the_rest_is_planned(bench: Place) -> None:
    onnx.save(quantised(PrecisionPlan({"Conv_t4": ""})), bench / "model.onnx")
    bench.change_spec(task="classify")
    calibration = ["--frames", bench / "clip.avi", "-o", bench / "calibration.json"]
    bench.says("calibrate", bench / "model.yaml", *calibration)
    bench.plan()
    evidence = bench.evidence()
    assert [group["name"] for group in evidence["groups"]] == ["Conv_t4"]
    assert evidence["accepted"] is not None


def test_what_reads_dequantised_values_is_planned_without_a_calibration(bench: Place) -> None:
    """None can be made: there is no tensor to observe."""
    model, whole = quantised(PrecisionPlan()), residual_net()
    last, original = by_name(model)["Conv_t4"], by_name(whole)["Conv_t4"]
    last.input[1] = original.input[1]
    model.graph.initializer.extend(each for each in whole.graph.initializer if each.name == original.input[1])
    onnx.save(model, bench / "model.onnx")
    bench.change_spec(task="classify")
    bench.plan()
    evidence = bench.evidence()
    assert [group["name"] for group in evidence["groups"]] == ["Conv_t4"]
    assert evidence["accepted"] is not None


def test_a_plan_for_tensorrt_is_measured_there(
    bench: Place, fake: FakeTensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the fake, to which INT8 is no faster, and which has no kernel for the loud branch in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(bench / "cache"))
    fake.without_int8 = {LOUD}
    told = bench.plan("--backend", "tensorrt", "--costs", "measured")
    assert told["certified"]
    assert told["builds"] <= 14  # one to learn of the kernel
    evidence = bench.evidence()
    assert evidence["backend"]["runtime"] == "tensorrt"
    assert "INT8 is not faster on this machine: " in evidence["costs"]["why"]
    plan = PrecisionPlan.from_json((bench / "plan.json").read_text())
    assert set(plan.floats) == {LOUD}
    assert "INT8" in plan.floats[LOUD]
    build = ["build", bench / "model.yaml", "--calibration", bench / "calibration.json", "--backend", "tensorrt"]
    bench.says(*build, "--plan", bench / "plan.json", "-o", bench / "artefact")
    assert json.loads((bench / "artefact/manifest.json").read_text())["without_int8"] == {}  # the plan knows of it


def images_of(bench: Place, labels: list[str]) -> Path:
    rng = np.random.default_rng(1)
    for number in range(8):
        folder = bench / "labelled" / labels[number % len(labels)]
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{number}.png"), rng.integers(0, 255, (8, 8, 3), np.uint8))
    return bench / "labelled"


def test_labels_are_scored_beside_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bench = Place(plan_world(tmp_path / "world", residual_net(), task="classify"), capfd)
    labels = images_of(bench, list("ab"))
    bench.plan("--dataset", labels)
    evidence = bench.evidence()
    assert evidence["labels"]["dataset"] == "labelled"
    for scores in (evidence["labels"]["float"], evidence["labels"]["plan"]):
        assert set(scores) == {"top1"}
        assert 0.0 <= scores["top1"] <= 1.0
    assert evidence["accepted"] is not None
    bench.change_spec(task="classify", precision={"keep_float": ["Conv", "Gemm"]})
    bench.plan("--dataset", labels)
    assert bench.evidence()["labels"]["plan"] == evidence["labels"]["float"]


def test_a_plan_in_which_nothing_was_to_decide_is_shown_all_the_same(bench: Place) -> None:
    bench.change_spec(precision={"keep_float": ["Conv"]})
    shown, said = bench.says(*bench.arguments("--chart", bench / "chart.png"))
    assert "All float: no layer may be INT8 (precision.keep_float)." in shown
    assert said == ""  # no frame is needed
    assert cv2.imread(str(bench / "chart.png")).shape == (800, 1280, 3)
    explained, _ = bench.says("plan", bench / "plan.json", "--explain", LOUD)
    assert f"{LOUD} stays float: keep_float: Conv." in explained


def colour_classifier() -> ModelProto:
    """The scores of red, green and blue are their means."""
    net = Net((1, 3, 8, 8))
    kernel = np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)
    pooled = net.node("GlobalAveragePool", net.node("Conv", "image", net.constant(kernel)))
    return net.model(net.node("Flatten", pooled))


class Misreading:
    """An engine to which green is blue."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.inputs: list[TensorSpec] = list(engine.inputs)
        self.outputs: list[TensorSpec] = list(engine.outputs)

    def infer(self, batch: Array) -> dict[str, Array]:
        return {name: output[:, [0, 2, 1]] for name, output in self._engine.infer(batch).items()}

    def close(self) -> None:
        self._engine.close()


def test_a_plan_that_misreads_a_rare_class_is_refused_whatever_its_mean(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = ["red", "green", "blue"]
    colours = {"task": "classify", "labels": labels, "input": {"color": "rgb", "resize": "stretch", "scale": 1 / 255}}
    bench = Place(plan_world(tmp_path / "world", colour_classifier(), **colours), capfd)
    (bench / "images").mkdir()
    for number in range(160):
        bgr = (20, 200, 30) if number % 8 == 0 else (20, 30, 200)
        cv2.imwrite(str(bench / f"images/{number}.png"), np.full((8, 8, 3), bgr, np.uint8))
    load = Builder.load
    monkeypatch.setattr(Builder, "load", lambda *arguments: Misreading(load(*arguments)))
    arguments = ["--frames", bench / "images", "--max-loss", 0.3]
    assert not bench.plan(*arguments)["certified"]
    trial = bench.evidence()["candidates"][0]["trial"]
    assert trial["upper"] <= 0.3
    assert not trial["accepted"]
    assert [(pair["reference"], pair["candidate"]) for pair in trial["confused"]] == [("green", "blue")]
    assert bench.evidence()["verdict"].startswith(
        "All float: none of 1 plans was certified. The last: 'green' served as"
    )
    shown, _ = bench.says("plan", bench / "plan.json", "--show")
    assert "it takes 'green' for 'blue'" in shown
    assert bench.plan(*arguments, "--max-confusion", 0.999)["certified"]


# `tared` to which a signal is sent: some CPU time after its search has remembered so many measurements.
STOPPED = """
import os, signal, sys
from agent.cli import main
from agent.planning.journal import Journal
number, left, cpu_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
put = Journal.put
def counted(*arguments):
    global left
    put(*arguments)
    left -= 1
    if left == 0:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
Journal.put = counted
signal.signal(signal.SIGPROF, lambda *_: os.kill(os.getpid(), number))
raise SystemExit(main(sys.argv[4:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_search_that_is_stopped_goes_on_where_it_was(
    number: int, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bench = Place(plan_world(tmp_path / "world", frames=260), capfd)
    limits = ["--max-loss", 0.03]
    bench.plan(*limits, output="whole.json")
    rng = random.Random(number)
    known = 0
    for _ in range(2):
        moment = [str(number), str(rng.randint(1, 25)), str(rng.uniform(1e-4, 5e-3))]
        command = [sys.executable, "-c", STOPPED, *moment, *bench.arguments(*limits)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (code, "")
        assert ("the same command goes on from there" in done.stderr) == (number == signal.SIGINT)
        assert not (bench / "plan.json").exists()
        measured = (bench / "plan.json.journal").read_bytes().count(b"\n") - 1
        assert measured > known
        known = measured
    _, said = bench.says(*bench.arguments(*limits))
    assert f"going on with the search that was interrupted: {known} measurements are known" in said
    whole, again = (json.loads((bench / name).read_text()) for name in ("whole.json", "plan.json"))
    assert (again["floats"], again["repairs"]) == (whole["floats"], whole["repairs"])
    assert not (bench / "plan.json.journal").exists()


def interrupted(bench: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the journal of a search that was almost done."""
    from agent.planning import command

    with monkeypatch.context() as patch:
        patch.setattr(command, "planned", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(bench.arguments()) == 130


@pytest.mark.parametrize(
    "change",
    [
        lambda _: ["--max-loss", "0.3"],
        lambda _: ["--seed", "1"],
        lambda bench: bench.change_spec(min_sqnr_db=64.0) or [],
        lambda bench: shutil.copy(bench / "clip.avi", bench / "same.avi") and ["--frames", str(bench / "same.avi")],
    ],
    ids=["max-loss", "seed", "spec", "frames"],
)
def test_what_was_asked_otherwise_starts_anew(
    bench: Place, change: Callable[[Place], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(bench, monkeypatch)
    kept = (bench / "plan.json.journal").read_bytes()
    assert kept.count(b"\n") > 20
    _, said = bench.says(*bench.arguments(*change(bench)))
    assert "going on" not in said.partition("24 frames")[2]


def test_a_larger_budget_goes_on(bench: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(bench, monkeypatch)
    _, said = bench.says(*bench.arguments("--budget-s", 500))
    assert "going on with the search" in said


def test_a_disk_that_is_full_is_told(bench: Place) -> None:
    done = tared(*bench.arguments(), file_bytes=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: plan.journal: ")
