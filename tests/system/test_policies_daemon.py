"""A running daemon shows its answers by the owner's policy, over restarts; what measures it sees all of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher, eventually
from worlds import World

from agent.contract.commands import CommandResult
from agent.contract.topics import Topics
from engines.store.artefact import Store
from fleet.operator import new_command, send

TOPICS = Topics("default", "board")


def order(broker: RealBroker, op: str, **arguments: Any) -> CommandResult:
    return list(send(broker.endpoint, TOPICS, new_command(op, arguments, time.time()), silence_s=20.0))[-1]


def code(result: CommandResult) -> str:
    return result.error.code if result.error is not None else ""


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines so far."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.trial
@pytest.mark.broker
def test_a_policy_is_set_by_command_and_holds_over_restarts_and_fidelity_is_measured_all_the_same(
    calibrated_world: World, any_broker: RealBroker, tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    calibrated_world.change(mqtt={"host": any_broker.host, "port": any_broker.port}, results={"file": str(results)})
    current = Store(calibrated_world.state_dir).read("current")
    assert current is not None
    engine = current.id
    with Watcher(any_broker.endpoint) as watcher:
        with calibrated_world.running():
            eventually(lambda: results.exists() and bool(lines(results)), 60.0)
            assert code(order(any_broker, "policy", artefact="dusk", score_threshold="0.5")) == "command.policy"
            assert code(order(any_broker, "policy", artefact=engine, classes="owl")) == "command.policy"
            taken = order(any_broker, "policy", artefact=engine, score_threshold="1.0")
            assert taken.result == {"artefact": engine, "policy": {"score_threshold": 1.0}}
            assert watcher.expect(TOPICS.event, kind="policy")["artefact"] == engine
            with Watcher(any_broker.endpoint) as newcomer:  # to whom the retained birth is sent
                newcomer.expect(TOPICS.birth, policies={engine: {"score_threshold": 1.0}})
        before = lines(results)
        assert all(isinstance(line["class"], int) for line in before if "policy_left_out" not in line)
        with calibrated_world.running():
            eventually(lambda: len(lines(results)) >= len(before) + 200, 60.0)
            status = order(any_broker, "status").result
            assert status is not None
            assert (status["engine"], status["policy"]) == (engine, {"score_threshold": 1.0})
            eventually(lambda: ((order(any_broker, "status").result or {})["fidelity"]["n"]) >= 10, 60.0)
            assert (order(any_broker, "status").result or {})["fidelity"]["estimate"] > 0.5
            assert order(any_broker, "policy", artefact=engine, clear="true").result == {
                "artefact": engine, "policy": None,
            }  # fmt: skip
            eventually(lambda: "policy_left_out" not in lines(results)[-1], 60.0)
    after = lines(results)[len(before) :]
    held = [line for line in after if "policy_left_out" in line]
    assert len(held) >= 200
    assert {(line["class"], line["label"], line["policy_left_out"]) for line in held} == {(None, None, 1)}
    assert "policy_left_out" in after[0], "from the first frame after the restart on"
