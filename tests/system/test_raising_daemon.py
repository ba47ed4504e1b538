"""The daemon where INT8 itself costs fidelity: more layers become float, and stay so until the owner says otherwise."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from raising_world import COLLAPSES, PRECISION_COMMIT, raising_world
from runtime_under_test import RUNTIME, backend_class
from worlds import ALARM_COMMIT, FIRST_COMMIT, World

from agent.config import load_config
from agent.models.engine_service import EngineService
from agent.models.model import Model, open_model
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.registry import open_backend
from engines.store.artefact import Artefact, Store

pytestmark = [pytest.mark.slow, pytest.mark.trial]
ACCEPTED = 0.2  # as max_loss; the INT8 engine loses about half
RAISED = {COLLAPSES, "Gemm_t7"}  # the second has hardly any work, and is quieter so


@dataclass(frozen=True)
class Story:
    """The world after a run that raised the precision, and the store as it was before."""

    world: World
    said: str
    int8: Path
    raised: Path

    def copy(self, of: Path, to: Path, **world: object) -> World:
        """Another world that goes on from one of the two stores."""
        shutil.copytree(of, to / "state", symlinks=True)
        return raising_world(to, ACCEPTED, **world)  # type: ignore[arg-type]  # its keywords


@pytest.fixture(scope="module", name="story")
def story_fixture(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    raising_world(folder, 1.0).run(until=FIRST_COMMIT)
    shutil.copytree(folder / "state", folder / "int8", symlinks=True)
    world = raising_world(folder, ACCEPTED)
    summary, said = world.run(until=PRECISION_COMMIT)
    (swap,) = summary["swaps"]
    assert swap["fidelity_before"] < 1.0 - ACCEPTED <= swap["fidelity"]
    return Story(world, said, folder / "int8", world.state_dir)


def current(state: Path) -> Artefact:
    artefact = Store(state).read("current")
    assert artefact is not None
    return artefact


def plan_of(artefact: Artefact) -> PrecisionPlan:
    return PrecisionPlan.from_json(artefact.read_file("plan.json").decode())


def built(state: Path) -> Sequence[str]:
    return sorted(path.name for path in (state / "artefacts").iterdir())


def test_low_fidelity_is_reported_once_and_raises_precision(story: Story) -> None:
    told = [line for line in story.said.splitlines() if "event=fidelity" in line]
    assert len(told) == 1
    assert "state=low" in told[0]
    steps = re.findall(r"event=job trigger=precision step=(\w+)", story.said)
    assert list(dict.fromkeys(steps))[-6:] == [
        "CALIBRATING", "PLANNING", "BUILDING", "VALIDATING", "PROBATION", "COMMITTED",
    ]  # fmt: skip
    artefact = current(story.raised)
    floats = plan_of(artefact).floats
    reason = re.fullmatch(r"raised: made ([\d.]+) % of the noise while fidelity was 0\.\d\d", floats[COLLAPSES])
    assert reason is not None
    assert float(reason[1]) > 80.0  # of the frames that this run has seen
    assert set(artefact.manifest["inputs"]["plan"]["floats"]) == set(floats) == RAISED
    assert 0.0 < artefact.manifest["int8_macs_share"] < 1.0


def test_a_restart_serves_it_and_a_recalibration_goes_on_under_its_plan(story: Story, tmp_path: Path) -> None:
    world = story.copy(story.raised, tmp_path)
    before = built(world.state_dir)
    summary, said = world.run("--frames", "20")
    assert "BUILDING" not in said
    assert built(world.state_dir) == before
    assert Path(summary["artefact"]).name == current(story.raised).id

    world = raising_world(tmp_path, ACCEPTED, light=1.0)
    world.run(until=ALARM_COMMIT)
    was, now = current(story.raised), current(world.state_dir)
    assert was.id != now.id
    assert plan_of(now).floats == plan_of(was).floats
    assert plan_of(now).repairs.divisors == plan_of(was).repairs.divisors  # the ranges are of today's frames
    assert now.manifest["inputs"]["raised_from"] == was.manifest["inputs"]["raised_from"]


# ---- the store, without a daemon around it


def start(state: Path, model: Model) -> tuple[EngineService, Sequence[TaredError]]:
    errors: list[TaredError] = []
    service = EngineService(model, open_backend(RUNTIME), Store(state))
    service.start(errors.append).close()
    return service, errors


def model_under(story: Story, plan: PrecisionPlan, **rules: list[str]) -> Model:
    spec = load_config(story.world.folder / "config.yaml").model
    precision = spec.precision.model_copy(update={name: tuple(names) for name, names in rules.items()})
    return open_model(spec.model_copy(update={"precision": precision}), plan)


@pytest.fixture
def state(story: Story, tmp_path: Path) -> Path:
    shutil.copytree(story.raised, tmp_path / "state", symlinks=True)
    return tmp_path / "state"


def test_the_new_engine_has_a_plan_of_its_own_and_the_owners_is_kept(story: Story, state: Path) -> None:
    service, errors = start(state, model_under(story, PrecisionPlan()))
    assert not errors
    assert service.is_precision_raised
    assert set(service.serving_model.plan.floats) == set(service.plan.floats) == RAISED
    assert dict(service.model.plan.floats) == {}
    previous = service.store.read("previous")
    assert previous is not None
    loaded = service.load(previous)
    with closing(loaded.engine):
        assert dict(loaded.model.plan.floats) == {}
        service.commit(loaded)
    assert not service.is_precision_raised
    assert service.plan.essence == loaded.model.plan.essence


def test_another_runtime_gets_it_under_the_raised_plan(
    story: Story, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = backend_class().describe
    monkeypatch.setattr(backend_class(), "describe", lambda backend: {**describe(backend), "runtime": "another"})
    service, errors = start(state, model_under(story, PrecisionPlan()))
    assert [error.code for error in errors] == ["artefact.runtime"]
    assert service.serving.manifest["inputs"]["backend"]["runtime"] == "another"
    assert service.is_precision_raised
    assert set(service.plan.floats) == RAISED
    assert plan_of(service.serving) == plan_of(current(story.raised))


@pytest.mark.parametrize(
    ("plan", "rules"),
    [(PrecisionPlan({"Gemm_t7": "the owner's"}), {}), (PrecisionPlan(), {"force_int8": [COLLAPSES]})],
    ids=["plan", "rules"],
)
def test_another_word_of_the_owner_replaces_it(
    story: Story, state: Path, plan: PrecisionPlan, rules: dict[str, list[str]]
) -> None:
    service, _ = start(state, model_under(story, plan, **rules))
    assert not service.is_precision_raised
    assert service.plan.essence == service.serving.manifest["inputs"]["plan"]
    assert dict(service.plan.floats) == dict(plan.floats)
    assert service.plan.repairs == plan_of(current(story.raised)).repairs
    again, _ = start(state, model_under(story, PrecisionPlan()))
    assert not again.is_precision_raised  # it is no more than the owner's word again
