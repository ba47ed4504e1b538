"""The search for a plan in this process: what it finds, in which models, and that it keeps the owner's rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plan_bench import search_in
from plan_world import LOUD, MACS, QUIET, journal, plan_world, planner, two_branches
from raising_world import count_macs
from worlds import SPEC
from zoo import Net, residual_net

import agent.planning.certificate as certificate
import agent.planning.group_noise as group_noise
from agent.common.clock import Clock
from agent.planning.costs import PlanBuilder
from agent.planning.ladder import Ladder, LadderOptions
from agent.reports.plan import Evidence
from engines.interface import silent


def by_name(evidence: Evidence) -> dict[str, Any]:
    return {group["name"]: group for group in evidence["groups"]}


def test_the_branch_that_bears_no_int8_stays_float(search_world: Path) -> None:
    plan, evidence = search_in(search_world)
    groups = by_name(evidence)
    assert set(plan.floats) == {LOUD}
    assert {name: group["precision"] for name, group in groups.items()} == {LOUD: "float", QUIET: "int8"}
    assert groups[LOUD]["sensitivity"] > 100.0 * groups[QUIET]["sensitivity"] > 0.0
    assert all(group["measured"] for group in groups.values())
    assert plan.floats[LOUD] == groups[LOUD]["why"]
    assert "makes 99.9 % of the noise" in groups[LOUD]["why"]
    accepted = evidence["candidates"][evidence["chosen"]]
    assert accepted["trial"]["accepted"]
    assert accepted["trial"]["upper"] <= MACS.max_loss
    bound = accepted["trial"]["upper"]
    assert evidence["verdict"].startswith(f"Certified: a loss of at most {bound:.3g}, where 0.2 is accepted.")


@pytest.mark.parametrize("kind", ["the first plan loses too much", "the first plan will do"])
def test_a_job_comes_to_the_same_plan_on_the_same_frames(search_world: Path, tmp_path: Path, kind: str) -> None:
    world = search_world if "too much" in kind else plan_world(tmp_path / "residual", residual_net(), **SPEC)
    found = planner(world)
    found.run(journal(world))
    job = Ladder(
        found.model, found.model.plan, found.ladder.scene, {}, found.embedded, LadderOptions(MACS.max_loss, 60.0),
        silent, count_macs,
    )  # fmt: skip
    first, plan = next(job.plans()), found.plan()
    assert plan.evidence["chosen"] is not None
    assert (first.floats.keys(), first.effective) == (plan.floats.keys(), plan.repairs)
    assert len(job.findings.tried) == (2 if "too much" in kind else 1)  # a job measures no more than it needs


def test_training_would_have_to_win_what_the_faster_plan_loses(search_world: Path) -> None:
    _, evidence = search_in(search_world)
    chosen, found = evidence["candidates"][evidence["chosen"]], evidence["retraining"]
    fastest = min(evidence["candidates"], key=lambda plan: plan["time"])
    assert fastest["int8_macs_share"] == 1.0
    target = found["target"]
    assert (target["names"], target["layers"], target["macs_share"]) == ([LOUD], [LOUD], 0.5)
    assert target["time_ratio"] == pytest.approx(fastest["time"] / chosen["time"])
    assert (target["time_ms"], target["plan_time_ms"]) == (None, None)  # no time was measured
    assert [target["loss"], target["plan_loss"]] == pytest.approx([fastest["predicted_loss"], chosen["predicted_loss"]])
    assert target["to_win"] == target["loss"] - target["plan_loss"] > MACS.max_loss
    assert found["noisiest"] == [{"name": QUIET, "noise_share": 1.0}]


def test_repairs_are_kept_where_they_measure_better_and_only_for_int8(search_world: Path) -> None:
    plan, evidence = search_in(search_world)
    assert evidence["repairs_tried"]
    for tried in evidence["repairs_tried"].values():
        assert tried["kept"] == (tried["divergence"] < tried["divergence_without"])
    assert any(tried["kept"] for tried in evidence["repairs_tried"].values())
    assert set(plan.repairs.divisors) | set(plan.repairs.shifts) == {QUIET}


def chain(layers: int) -> Net:
    net = Net()
    x = "image"
    for number in range(layers):
        kernel = net.rng.normal(0.0, 0.25, (4, 3 if number == 0 else 4, 3, 3)).astype(np.float32)
        x = net.node("Relu", net.node("Conv", x, net.constant(kernel), net.weight(4), pads=[1, 1, 1, 1]))
    net.nodes[-1].output[0] = "out"
    return net


def test_most_groups_of_a_long_net_need_no_run_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_noise, "_RUNS", 12)
    world = plan_world(tmp_path / "world", chain(14).model("out"), frames=60, min_sqnr_db=1.0)
    _, evidence = search_in(world, replace(MACS, max_loss=0.5))
    groups = evidence["groups"]
    measured = [group for group in groups if group["measured"]]
    assert len(groups) == 14
    assert 0 < len(measured) < 11
    assert all(group["sensitivity"] > 0.0 for group in groups)


def test_forced_int8_is_in_every_plan_and_reported_if_it_cannot_be_certified(search_world: Path) -> None:
    text = (search_world / "model.yaml").read_text()
    (search_world / "model.yaml").write_text(text + f"precision: {{force_int8: [{LOUD}]}}\n")
    plan, evidence = search_in(search_world)
    assert set(plan.floats) == {QUIET}
    assert by_name(evidence)[LOUD]["precision"] == "int8"
    assert min(plan["int8_macs_share"] for plan in evidence["candidates"]) >= 0.5
    assert evidence["chosen"] is None
    assert evidence["verdict"].startswith("All float, and what precision.force_int8 names, whose loss is not known: ")


def test_frames_on_which_nothing_is_found_certify_nothing(tmp_path: Path) -> None:
    """A detector whose scores are far below its threshold, whatever it is shown."""
    net = Net((1, 3, 8, 8))
    net.conv("image", 3, 6)
    boxes = net.node("Reshape", "t0", net.constant(np.array([1, 6, 64], np.int64)))
    scaled = net.node("Mul", boxes, net.constant(np.array(1e-4, np.float32)))
    world = plan_world(
        tmp_path / "world", net.model(scaled), task="detect", decoder="yolov8", labels=["a", "b"], score_threshold=0.5
    )
    plan, evidence = search_in(world)
    assert plan.floats
    assert evidence["chosen"] is None
    trials = [candidate["trial"] for candidate in evidence["candidates"] if candidate["trial"]]
    assert {trial["frames"] for trial in trials} == {0}
    assert "nothing found on any of" in evidence["verdict"]


def test_an_image_size_that_is_left_open(tmp_path: Path) -> None:
    open_shape = two_branches((1, 3, "height", "width"))
    profile = {name: [1, 3, size, size] for name, size in (("min", 8), ("opt", 12), ("max", 16))}
    world = plan_world(tmp_path / "world", open_shape, profiles=[{"image": profile}])
    plan, evidence = search_in(world)
    assert LOUD in plan.floats  # and the other branch, where a processor takes weights of seven bits
    assert evidence["groups"][0]["macs_share"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.5, "5 ms against 10 ms in float."),
        (0.99, "INT8 is not faster on this machine, 9.9 ms against 10 ms in float: serve float here."),
    ],
)
def test_fast_enough_is_more_than_chance(
    search_world: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, words: str
) -> None:
    infer, load_float, floats = certificate._infer_timed, PlanBuilder.load_float, list[Any]()

    def loaded(*given: Any) -> Any:
        floats.append(load_float(*given))
        return floats[-1]

    def timed(engine: Any, tensor: NDArray[np.float32], clock: Clock) -> Any:
        return infer(engine, tensor, clock)[0], 10.0 if engine is floats[-1] else 10.0 * ratio

    monkeypatch.setattr(PlanBuilder, "load_float", loaded)
    monkeypatch.setattr(certificate, "_infer_timed", timed)
    _, evidence = search_in(search_world)
    assert (evidence["faster"], evidence["latency_ms"], evidence["latency_float_ms"]) == (
        ratio < 0.9,
        10.0 * ratio,
        10.0,
    )
    assert evidence["verdict"].endswith(words)
