"""A configured plan that cannot be used: under which one the board goes on, and what is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from candidate_bench import backend as backend
from candidate_bench import frames, observed
from candidate_bench import model as model
from unexpected import unexpected

from agent.common.schema import validate
from agent.config import Config
from agent.daemon.run import _open_model
from agent.models.build import build_artefact
from agent.models.engine_service import EngineService
from agent.models.model import Model, calibrate
from calibrate.plan import PrecisionPlan
from engines.interface import Backend, silent
from engines.store.artefact import Store

SERVES = PrecisionPlan({"Conv_t2": "by hand"})


@pytest.fixture
def config(model: Model, tmp_path: Path) -> Config:
    content = {
        "model": model.spec.model_dump(mode="json"),
        "camera": {"source": "rtsp://camera"},
        "plan": tmp_path / "plan.json",
        "state_dir": tmp_path / "state",
    }
    return validate(Config, content, "test")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "plan.format: plan: PATH is not used: PATH: "),
        ("", "plan.format: plan: PATH is not used: text that is not JSON"),
        ('{"schema": 9, "floats": {}}', "plan.schema: plan: PATH is not used: a plan of schema 9; expected schema 3"),
        ('{"schema": 3, "floats": {"Conv_t77": ""}}', "plan.node: plan: PATH is not used: node 'Conv_t77' in the plan"),
    ],
)
def test_the_engine_in_service_keeps_its_plan(
    config: Config, model: Model, backend: Backend, text: str | None, error: str
) -> None:
    assert config.plan is not None
    if text is not None:
        config.plan.write_text(text)
    _, opened, unused = _open_model(config)
    assert str(unused).startswith(error.replace("PATH", str(config.plan)))
    assert str(unused).endswith("; the board goes on without it")
    assert opened.plan == PrecisionPlan(), "on a blank board"
    store = Store(config.state_dir)
    calibration = calibrate(model, observed(model, backend, frames(4)), "max", 4, "test")
    served = build_artefact(model.with_plan(SERVES), backend, store.place, silent, calibration=calibration)
    store.promote(served)
    _, opened, unused = _open_model(config)
    assert unused is not None
    service = EngineService(opened, backend, store)
    service.start(unexpected).close()
    assert service.serving.id == served.id


def test_a_plan_of_an_older_tared_is_used(config: Config) -> None:
    assert config.plan is not None
    config.plan.write_text('{"schema": 3, "floats": {"Conv_t2": "by hand"}}')
    _, opened, unused = _open_model(config)
    assert (opened.plan, unused) == (SERVES, None)
