"""Copies of a world to plan in: one under the command line, one under a search in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench import ERROR, contents
from plan_world import MACS, RAW, journal, plan_world, planner

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.planning.search import PlanOptions
from agent.reports.plan import Evidence
from calibrate.plan import PrecisionPlan
from fleet.cli.main import main


class Place:
    """A world, and the command line in this process."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capfd = capfd

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def arguments(self, *more: object, output: str = "plan.json") -> list[str]:
        frames = [] if "--frames" in more else ["--frames", self / "clip.avi"]
        given = ["--calibration", self / "calibration.json", *frames]
        limits = ["--max-loss", 0.2, "--costs", "macs"]
        return [str(each) for each in ("plan", self / "model.yaml", *given, *limits, "-o", self / output, *more)]

    def plan(self, *more: object, output: str = "plan.json") -> dict[str, Any]:
        """Return the printed object of --json."""
        assert main([*self.arguments(*more, output=output), "--json"]) == 0
        printed: dict[str, Any] = json.loads(self._capfd.readouterr().out)
        return printed

    def says(self, *arguments: object) -> tuple[str, str]:
        """Return stdout and stderr of a command."""
        assert main([str(argument) for argument in arguments]) == 0
        printed = self._capfd.readouterr()
        return printed.out, printed.err

    def refuses(self, *arguments: object) -> str:
        """The error; every file is as it was, and none is new."""
        before = contents(self.folder)
        assert main([str(argument) for argument in arguments]) == 2
        printed = self._capfd.readouterr()
        assert (printed.out, contents(self.folder)) == ("", before)
        error = printed.err.splitlines()[-1]
        assert ERROR.fullmatch(error), printed.err
        return error.removeprefix("error: ")

    def evidence(self, name: str = "plan.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self / name).read_text())["evidence"]
        return found

    def change_spec(self, **changes: Any) -> None:
        (self / "model.yaml").write_text(yaml.safe_dump({**RAW, **changes}))


def search_in(world: Path, options: PlanOptions = MACS, clock: Clock = SYSTEM_CLOCK) -> tuple[PrecisionPlan, Evidence]:
    found = planner(world, options, clock=clock)
    found.run(journal(world))
    plan = found.plan()
    return plan, plan.evidence


@pytest.fixture(scope="session")
def plan_stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world that every other is a copy of."""
    return plan_world(tmp_path_factory.mktemp("plans") / "world")


@pytest.fixture
def plan_bench(plan_stock: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Place:
    return Place(Path(shutil.copytree(plan_stock, tmp_path / "world")), capfd)


@pytest.fixture
def search_world(plan_stock: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plan_stock, tmp_path / "world"))
