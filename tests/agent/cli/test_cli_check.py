"""`tared calibrate` and `tared build` end with a check, which changes nothing else of what they do."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest
from bench import Bench, build, calibrate
from plan_bench import Place
from plan_world import LOUD
from runtime_under_test import RUNTIME
from wrong_engines import WrongBackend

from agent.cli import offline_runs
from agent.cli.offline_runs import run_build
from calibrate.plan import PrecisionPlan
from engines.calibration import load_calibration, save_calibration
from engines.errors import EngineError
from engines.registry import choose_backend, open_backend
from fleet.cli.main import main


def test_calibrate_ends_with_a_check_that_build_makes_of_its_engine(bench: Bench) -> None:
    printed, check = bench.json_and_check(*calibrate(bench))
    assert re.match(r"check: on the calibration's own frames: fidelity to float \d\.\d+, 12 frames, simulated;", check)
    assert printed["check"].keys() == {
        *("frames", "informative", "fidelity", "worst_tensor", "worst_layer", "worst_db"),
    }  # fmt: skip
    kept = json.loads((bench / "calibration.json").read_text())["check"]
    assert (kept["result"], kept["frames"]) == (printed["check"], "clip.avi")
    assert len(json.dumps(kept)) < 500  # figures, and no picture
    built, own = bench.json_and_check(*build(bench))
    assert built["check"].pop("simulated") == printed["check"].pop("fidelity")
    assert built["check"].pop("fidelity") > 0.9
    assert built["check"] == printed["check"]
    assert re.search(r"own frames: fidelity to float [\d.]+, 12 frames, the engine's own \(simulated: [\d.]+\);", own)


def test_build_repeats_the_check_of_a_calibration_whose_frames_are_gone(bench: Bench) -> None:
    printed, check = bench.json_and_check(*calibrate(bench))
    (bench / "clip.avi").unlink()
    built, again = bench.json_and_check(*build(bench))
    assert (built["check"], again) == (printed["check"], check)


@pytest.mark.parametrize(
    ("fault", "found"),
    [("scales_times_ten", "diverges from float by "), ("nan_weights", "diverges from float by 1.000 on 12 frames"),
     ("fail", "fails on a frame, engine.run: a kernel that fails")],
)  # fmt: skip
def test_an_engine_that_is_not_what_was_simulated_is_refused(bench: Bench, fault: str, found: str) -> None:
    wrong, place = WrongBackend(open_backend(RUNTIME), fault), bench / "new"
    with pytest.raises(EngineError, match=re.escape(found)) as refused:
        run_build(bench / "model.yaml", bench / "calibration.json", place, wrong, frames=str(bench / "clip.avi"))
    assert refused.value.code == "engine.differs"
    assert not place.exists()


def low_remedy(said: str) -> str:
    """The command that a check advises; empty where fidelity is not low."""
    (line,) = (line for line in said.splitlines() if line.startswith("check: "))
    advised = re.search(r"; low: '(.+)' finds a plan that loses less", line)
    return advised[1] if advised else ""


def test_a_low_fidelity_names_the_command_that_helps(plan_bench: Place) -> None:
    model, calibration, clip = (plan_bench / name for name in ("model.yaml", "calibration.json", "clip.avi"))
    plan = ["tared", "plan", str(model), "--calibration", str(calibration)]
    output = ["-o", str(plan_bench / "plan.json"), "--backend", choose_backend("auto").backend.name]
    _, said = plan_bench.says("calibrate", model, "--frames", clip, "-o", calibration)
    assert shlex.split(low_remedy(said)) == [*plan, "--frames", str(clip), *output]
    built = ["build", model, "--calibration", calibration, "-o", plan_bench / "kept"]
    _, said = plan_bench.says(*built)
    assert shlex.split(low_remedy(said)) == [*plan, "--frames", str(clip), *output]
    away = clip.rename(plan_bench / "away.avi")
    _, said = plan_bench.says(*built)
    assert shlex.split(low_remedy(said)) == [*plan, "--frames", "SRC", *output]
    away.rename(clip)
    measured = ["build", model, "--calibration", calibration, "--frames", clip]
    _, said = plan_bench.says(*measured, "-o", plan_bench / "seen")
    assert f"check: on {clip}: fidelity to float 0.000, 12 frames" in said
    advised = shlex.split(low_remedy(said))
    assert advised == [*plan, "--frames", str(clip), *output]
    plan_bench.says(*advised[1:], "--costs", "macs", "--max-loss", 0.2)
    _, said = plan_bench.says(*measured, "--plan", plan_bench / "plan.json", "-o", plan_bench / "planned")
    assert f"check: on {clip}: fidelity to float 1.000, 12 frames" in said
    assert low_remedy(said) == ""


@pytest.mark.parametrize("what", ["plan", "spec", "none"])
def test_build_repeats_no_check_of_something_else(what: str, plan_bench: Place) -> None:
    calibration, plan = plan_bench / "calibration.json", plan_bench / "plan.json"
    (plan_bench / "clip.avi").unlink()
    command = ["build", plan_bench / "model.yaml", "--calibration", calibration, "-o", plan_bench / "new"]
    if what == "plan":
        plan.write_text(PrecisionPlan({LOUD: "by hand"}).to_json())
        command += ["--plan", plan]
    elif what == "spec":
        plan_bench.change_spec(min_sqnr_db=20.0)
    else:  # as older ones are
        save_calibration(replace(load_calibration(calibration), check={}), calibration)
    _, said = plan_bench.says(*command)
    found = "a calibration without a check" if what == "none" else "a check of another plan or model spec"
    assert f"check: not made: check.other: {found};" in said
    assert said.splitlines()[-1].endswith("add --frames SRC")


def test_a_check_that_fails_fails_nothing_else(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(offline_runs, "quick_check", broken)
    printed, check = bench.json_and_check(*calibrate(bench))
    assert check == "check: not made: RuntimeError: planted"
    assert "check" not in printed
    assert load_calibration(bench / "calibration.json").check == {}
    printed, check = bench.json_and_check(*build(bench, "model.yaml", "--frames", bench / "clip.avi"))
    assert ("check" in printed, check) == (False, "check: not made: RuntimeError: planted")
    (bench / "cut.avi").write_bytes((bench / "clip.avi").read_bytes()[:200])
    printed, check = bench.json_and_check(*build(bench, "model.yaml", "--frames", bench / "cut.avi"))
    assert check.startswith("check: not made: camera.")


def test_frames_for_an_engine_without_int8_are_refused(bench: Bench) -> None:
    said = bench.refuses(*build(bench, "model.yaml", "--frames", bench / "clip.avi", "--precision", "fp32"))
    assert said.startswith("cli.arguments: --frames with precision fp32; expected")
    assert main([str(word) for word in build(bench, "model.yaml", "--precision", "fp32")]) == 0
    assert "check" not in bench.captured()[1]
