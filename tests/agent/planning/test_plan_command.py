"""`tared plan` as users run it: what it writes, says, shows and explains, and that the plan is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import imagesize
import numpy as np
import pytest
from onnx import ModelProto
from plan_bench import Place
from plan_world import LOUD, plan_world
from zoo import Net, residual_net

from agent.planning.costs import PlanBuilder
from engines.interface import Array, Engine, TensorSpec

pytestmark = pytest.mark.slow

KEYS = {
    *("int8_macs_share", "predicted_loss", "measured_loss", "measured_loss_upper", "certified", "latency_ms"),
    *("latency_float_ms", "faster", "builds", "costs", "retraining", "seconds", "output"),
}


def test_a_plan_is_written_shown_explained_and_built(plan_bench: Place) -> None:
    printed = plan_bench.plan(output="new/folder/plan.json")
    assert set(printed) == KEYS
    assert printed["certified"]
    assert printed["measured_loss_upper"] <= 0.2
    assert printed["int8_macs_share"] == 0.5
    assert printed["builds"] <= 6
    written = plan_bench / "new/folder/plan.json"
    assert printed["output"] == str(written)
    assert sorted(path.name for path in written.parent.iterdir()) == ["plan.json"]  # no journal
    shown, _ = plan_bench.says("plan", written, "--show")
    assert "Certified: a loss of at most" in shown
    assert LOUD in shown
    explained, _ = plan_bench.says("plan", written, "--explain", "Conv_t0")
    assert f"{LOUD} stays float: INT8 saves" in explained
    explained, _ = plan_bench.says("plan", written, "--explain", "Conv_t0", "--json")
    assert [group["name"] for group in json.loads(explained)["groups"]] == [LOUD]
    plan_bench.says("plan", written, "--show", "--chart", plan_bench / "chart.png")
    assert imagesize.get(plan_bench / "chart.png") == (1280, 800)
    build = ["build", plan_bench / "model.yaml", "--calibration", plan_bench / "calibration.json", "--plan", written]
    _, said = plan_bench.says(*build, "-o", plan_bench / "artefact")
    warning = "warning: INT8 under this plan was measured on this runtime, and is not faster than float"
    assert (warning in said) != json.loads(written.read_text())["evidence"]["faster"]
    manifest = json.loads((plan_bench / "artefact/manifest.json").read_text())
    assert manifest["int8_macs_share"] == 0.5
    planning = manifest["planning"]
    assert planning == json.loads(written.read_text())["evidence"]
    assert {"costs", "groups", "candidates", "certificate", "verdict"} <= set(planning)
    assert all(np.isfinite(group["sensitivity"]) for group in planning["groups"])


def planning(plan_bench: Place, name: str) -> Any:
    """Return the part of a manifest about the plan, of a build under plan.json."""
    build = ["build", plan_bench / "model.yaml", "--calibration", plan_bench / "calibration.json"]
    plan_bench.says(*build, "--plan", plan_bench / "plan.json", "-o", plan_bench / name)
    return json.loads((plan_bench / name / "manifest.json").read_text())["planning"]


def test_a_certificate_is_of_what_was_certified_and_of_nothing_else(plan_bench: Place) -> None:
    plan_bench.plan()
    assert planning(plan_bench, "as-planned")["verdict"].startswith("Certified: ")
    plan_bench.change_spec(min_sqnr_db=120.0)
    of_spec = planning(plan_bench, "other-spec")
    assert of_spec["verdict"] == "Not certified: the certificate of its plan is of another model spec."
    assert (of_spec["chosen"], of_spec["candidates"]) == (None, [])
    plan_bench.change_spec()
    plan = json.loads((plan_bench / "plan.json").read_text())
    (plan_bench / "plan.json").write_text(json.dumps({**plan, "floats": {}}))
    assert "is of another plan: this plan was changed since." in planning(plan_bench, "all-int8")["verdict"]


def test_costs_are_measured_by_default(plan_bench: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.quantise.costs._MOST_PASSES", 1)
    printed = plan_bench.plan("--costs", "measured")
    costs = plan_bench.evidence()["costs"]
    assert (costs["passes"], 3 <= costs["builds"] <= 8) == (1, True)
    assert 3 <= printed["builds"] <= costs["builds"] + 5
    assert (costs["source"] == "measured") == (costs["why"] == "")
    assert printed["costs"] == costs


def test_the_frames_that_a_certificate_needs_are_printed_before_the_work(plan_bench: Place) -> None:
    _, said = plan_bench.says(*plan_bench.arguments("--budget-s", 0))
    assert said.startswith(
        f"30 frames to search with, 90 others to certify on in {plan_bench / 'clip.avi'}: a plan that"
    )


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
    assert evidence["chosen"] is not None
    bench.change_spec(task="classify", precision={"keep_float": ["Conv", "Gemm"]})
    bench.plan("--dataset", labels)
    assert bench.evidence()["labels"]["plan"] == evidence["labels"]["float"]


def test_a_plan_in_which_nothing_was_to_decide_is_shown_all_the_same(plan_bench: Place) -> None:
    plan_bench.change_spec(precision={"keep_float": ["Conv"]})
    shown, said = plan_bench.says(*plan_bench.arguments("--chart", plan_bench / "chart.png"))
    assert "All float: no layer may be INT8 (precision.keep_float)." in shown
    assert said == ""  # no frame is needed
    assert imagesize.get(plan_bench / "chart.png") == (1280, 800)
    explained, _ = plan_bench.says("plan", plan_bench / "plan.json", "--explain", LOUD)
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
    colours: dict[str, Any] = {
        "task": "classify",
        "labels": labels,
        "input": {"color": "rgb", "resize": "stretch", "scale": 1 / 255},
    }
    bench = Place(plan_world(tmp_path / "world", colour_classifier(), **colours), capfd)
    (bench / "images").mkdir()
    for number in range(160):
        bgr = (20, 200, 30) if number % 8 == 0 else (20, 30, 200)
        cv2.imwrite(str(bench / f"images/{number}.png"), np.full((8, 8, 3), bgr, np.uint8))
    load = PlanBuilder.load
    monkeypatch.setattr(PlanBuilder, "load", lambda *arguments: Misreading(load(*arguments)))
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
