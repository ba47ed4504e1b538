"""The table of commands: what it says of each op holds on boards, on simulated ones, and where people send it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from device import NOW, payload
from listening import Listening
from runtime_under_test import RUNTIME
from worlds import make_world

from agent.camera.config import CameraConfig
from agent.commands.dispatcher import CommandProgress, bind, parse_command
from agent.common.errors import CommandError
from agent.config import Config, load_config
from agent.contract.commands import OPS, Op, StatusArgs
from agent.contract.messages import Birth
from agent.daemon.handlers import BoardHandlers, EngineHandlers, HistogramUpload, StatusHandler
from agent.daemon.supervisor import Supervisor
from agent.models.model import open_model
from agent.state.store import StateStore
from agent.uplink.link import MqttLink
from agent.vision.spec import ModelSpec
from engines.registry import open_backend
from fleet.simulator.handlers import SimulatedHandlers, Unsimulated

BOARD = (EngineHandlers, BoardHandlers, HistogramUpload, StatusHandler)
CONFIG = Config(model=ModelSpec(path=Path("model.onnx"), task="raw"), camera=CameraConfig(source="v4l2:/dev/video0"))
OPEN = CONFIG.model_copy(update={"privacy": CONFIG.privacy.model_copy(update={"snapshot": True, "histograms": True})})


def refusal(make: Callable[[Config], Any], op: str, config: Config) -> str:
    """The code by which the handler of an op refuses it; empty if it does not."""
    try:
        make(config)[op](OPS[op].args.model_validate(OPS[op].example), CommandProgress("c1", lambda _: None))
    except CommandError as error:
        return error.code
    return ""


def on_a_board(config: Config) -> Any:
    """Handlers that only succeed."""
    return bind(lambda: config, SimpleNamespace(**dict.fromkeys(OPS, lambda _args, _progress: {})))


def on_a_simulated_board(config: Config) -> Any:
    return bind(lambda: config, SimulatedHandlers(cast(Any, None), cast(Any, None), lambda: None), Unsimulated())


@pytest.mark.parametrize("op", OPS)
def test_the_example_of_each_op_is_a_command(op: str) -> None:
    received = parse_command(payload(op=op, args=OPS[op].example), NOW)
    assert received.command.args.model_dump(exclude_unset=True) == OPS[op].example


@pytest.mark.parametrize("op", OPS)
def test_each_op_has_one_handler_on_a_board_that_takes_its_arguments(op: str) -> None:
    (handler,) = [getattr(part, op) for part in BOARD if hasattr(part, op)]
    simulated = getattr(SimulatedHandlers, op, handler)
    for each in (handler, simulated):
        assert [*inspect.signature(each).parameters.values()][1].annotation == OPS[op].args.__name__


@pytest.mark.parametrize("op", OPS)
def test_an_op_with_a_permission_is_refused_until_the_owner_gives_it(op: str) -> None:
    permission = OPS[op].permission
    assert refusal(on_a_board, op, OPEN) == ""
    assert refusal(on_a_board, op, CONFIG) == ("command.privacy" if permission else "")
    if permission:
        assert attrgetter(permission)(CONFIG) is False
        assert refusal(on_a_simulated_board, op, CONFIG) == "command.privacy"


@pytest.mark.parametrize("op", [op for op, each in OPS.items() if each.button is not None])
def test_a_button_asks_for_all_that_its_op_requires(op: str) -> None:
    fields, asked = OPS[op].args.model_fields, OPS[op].button or ()
    assert {name for name, field in fields.items() if field.is_required()} <= {*asked} <= fields.keys()


def test_an_op_without_handler_stops_the_start_and_is_refused_by_simulated_boards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(dict[str, Op], OPS), "dance", Op(StatusArgs, {}))
    world = make_world(tmp_path, lambda _: 0.5, 1.0)
    world.arguments()
    config, link = load_config(tmp_path / "config.yaml"), cast(MqttLink, Listening())
    with pytest.raises(ValueError, match="no handler for dance"):
        Supervisor(
            config, StateStore(None), open_model(config.model), open_backend(RUNTIME), link, Birth(agent_version="0")
        )
    assert refusal(on_a_simulated_board, "dance", CONFIG) == "command.unknown_op"
