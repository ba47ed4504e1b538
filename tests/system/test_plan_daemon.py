"""A plan given to the daemon: every engine that it ever builds is built under it, in whatever process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_world import MACS, journal, plan_world, planner
from worlds import ALARM_COMMIT, FIRST_COMMIT, OUTLASTS_S, SPEC, World, make_world
from zoo import residual_net

from calibrate.plan import PrecisionPlan
from engines.store.artefact import Artefact, Store

KEPT = "Conv_t2"


@pytest.fixture(scope="module", name="plan")
def plan_fixture(tmp_path_factory: pytest.TempPathFactory) -> PrecisionPlan:
    """Found by a search in which the owner keeps a layer float."""
    world = plan_world(
        tmp_path_factory.mktemp("plan") / "world", residual_net(), **SPEC, precision={"keep_float": [KEPT]}
    )
    search = planner(world, MACS)
    search.run(journal(world))
    plan = search.plan()
    assert KEPT in plan.floats
    assert plan.repairs
    return plan


def world_under(folder: Path, plan: PrecisionPlan, light: float = 0.06) -> World:
    world = make_world(folder, lambda _: light, OUTLASTS_S)
    (folder / "plan.json").write_text(plan.to_json())
    world.config["plan"] = "plan.json"
    return world


def check_under(artefact: Artefact | None, plan: PrecisionPlan) -> None:
    assert artefact is not None
    written = PrecisionPlan.from_json((artefact.path / "plan.json").read_text())
    assert written == plan
    assert artefact.manifest["inputs"]["plan"] == json.loads(json.dumps(plan.essence))
    planning = artefact.manifest["planning"]
    assert planning["groups"] == plan.evidence["groups"]
    assert planning["verdict"] == "Not certified: the certificate of its plan is of another calibration."
    assert planning["chosen"] is None
    assert 0.0 < artefact.manifest["int8_macs_share"] < 1.0


@pytest.mark.trial
def test_a_plan_survives_recalibration_and_rollback(tmp_path: Path, plan: PrecisionPlan) -> None:
    world_under(tmp_path / "world", plan).run(until=FIRST_COMMIT)
    world = world_under(tmp_path / "world", plan, light=1.0)
    world.run(until=ALARM_COMMIT)
    store = Store(world.state_dir)
    current, previous = store.read("current"), store.read("previous")
    assert current is not None
    assert previous is not None
    assert current.id != previous.id
    for artefact in (current, previous):  # a rollback serves the second one
        check_under(artefact, plan)
