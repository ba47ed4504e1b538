"""`tared plan` that is stopped goes on where it was, unless something else is asked; without time it plans float."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from plan_bench import Place
from plan_world import plan_world

from agent.planning.search import PlanSearch
from fleet.cli.main import main


def test_a_budget_of_nothing_gives_a_plan_without_int8(plan_bench: Place) -> None:
    printed = plan_bench.plan("--budget-s", 0)
    assert (printed["certified"], printed["int8_macs_share"], printed["builds"]) == (False, 0.0, 0)
    assert "the time was up" in plan_bench.evidence()["verdict"]
    assert not (plan_bench / "plan.json.journal").exists()  # nothing is in it
    shown, _ = plan_bench.says("plan", plan_bench / "plan.json", "--show")
    assert "stopped early" in shown


# `tared` to which a signal is sent: so many calls of functions after its search has remembered so many measurements.
STOPPED = """
import os, sys
from fleet.cli.main import main
from agent.common.state_files import Journal
number, left, calls = map(int, sys.argv[1:4])
put = Journal.put
def counted(*arguments):
    global left
    put(*arguments)
    left -= 1
    if left == 0:
        sys.setprofile(count)
def count(*_):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), number)
Journal.put = counted
raise SystemExit(main(sys.argv[4:]))
"""


@pytest.mark.trial
def test_a_search_that_is_stopped_goes_on_where_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Interrupted first, and then killed."""
    bench = Place(plan_world(tmp_path / "world", frames=260), capfd)
    limits = ["--max-loss", 0.03, "--backend", "onnxruntime"]  # its plan has repairs
    bench.plan(*limits, output="whole.json")
    rng = random.Random(0)
    known = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        moment = [str(int(number)), str(rng.randint(1, 25)), str(rng.randint(1, 2000))]
        command = [sys.executable, "-c", STOPPED, *moment, *bench.arguments(*limits)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (code, "")
        assert ("the same command continues from there" in done.stderr) == (number == signal.SIGINT)
        assert not (bench / "plan.json").exists()
        lines = (bench / "plan.json.journal").read_bytes().splitlines()[1:]
        measured = sum(not line.startswith(b'["spent"') for line in lines)
        assert measured > known
        known = measured
    _, said = bench.says(*bench.arguments(*limits))
    assert f"continuing the interrupted search: {known} measurements are known" in said
    whole, again = (json.loads((bench / name).read_text()) for name in ("whole.json", "plan.json"))
    assert (again["floats"], again["repairs"]) == (whole["floats"], whole["repairs"])
    assert not (bench / "plan.json.journal").exists()


def interrupted(bench: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the journal of a search that was almost done."""
    with monkeypatch.context() as patch:
        patch.setattr(PlanSearch, "plan", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
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
def test_another_request_starts_anew(
    plan_bench: Place, change: Callable[[Place], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(plan_bench, monkeypatch)
    kept = (plan_bench / "plan.json.journal").read_bytes()
    assert kept.count(b"\n") > 20
    _, said = plan_bench.says(*plan_bench.arguments(*change(plan_bench)))
    assert "continuing the interrupted search" not in said


def test_a_larger_budget_goes_on(plan_bench: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(plan_bench, monkeypatch)
    _, said = plan_bench.says(*plan_bench.arguments("--budget-s", 500))
    assert "continuing the interrupted search" in said
