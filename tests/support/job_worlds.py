"""Small worlds on a live camera that daemons have lived in, for tests that interrupt a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import RealBroker, free_port
from job_kills import FIRST_COMMIT, Case, copied, in_world, live_world, make_decided
from raising_world import raising_world
from worlds import World, make_world

from fleet import operator


@pytest.fixture
def quick_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "REPEAT_S", 0.3)


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world without a state directory."""
    world = live_world(make_world(tmp_path_factory.mktemp("world"), lambda _: 1.0, 20.0), free_port())
    make_decided(world)
    return world


@pytest.fixture(scope="module")
def calibrated(blank: World, tmp_path_factory: pytest.TempPathFactory, module_broker: RealBroker) -> World:
    """A world with two committed jobs, so that there is a previous engine, too."""
    world = copied(blank, tmp_path_factory.mktemp("calibrated") / "world", module_broker)
    with in_world(world, module_broker) as case, case.living("life") as life:
        life.wait(lambda: life.said(FIRST_COMMIT))  # before that a command would find a job on probation
        command = case.send("recalibrate", frames="8", method="max")
        assert case.outcome(command).status == "SUCCEEDED"
    return world


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory, module_broker: RealBroker) -> World:
    """A world whose engine loses half, which its owner does not accept from now on."""
    bare = live_world(raising_world(tmp_path_factory.mktemp("bare"), 1.0), free_port())
    world = copied(bare, tmp_path_factory.mktemp("low") / "world", module_broker)
    with in_world(world, module_broker) as case, case.living("life") as life:
        life.wait(lambda: life.said(FIRST_COMMIT))
    world.config["recalibration"].update(automatic=True, max_loss=0.2)
    return world


@pytest.fixture
def case(any_broker: RealBroker, calibrated: World, tmp_path: Path) -> Iterator[Case]:
    world = copied(calibrated, tmp_path / "world", any_broker)
    with in_world(world, any_broker) as case:
        yield case
