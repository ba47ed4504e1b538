"""A running daemon shows its answers by the owner's policy, over restarts; what measures it sees all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher, eventually
from daemon_life import LIMIT_S, TOPICS, answer, code, order
from worlds import World

from engines.store.artefact import Store


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
            eventually(lambda: results.exists() and bool(lines(results)), LIMIT_S)
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
            eventually(lambda: len(lines(results)) >= len(before) + 200, LIMIT_S)
            status = answer(any_broker, "status")
            assert (status["engine"], status["policy"]) == (engine, {"score_threshold": 1.0})
            eventually(lambda: answer(any_broker, "status")["fidelity"]["n"] >= 10, LIMIT_S)
            assert answer(any_broker, "status")["fidelity"]["estimate"] > 0.5
            assert order(any_broker, "policy", artefact=engine, clear="true").result == {
                "artefact": engine, "policy": None,
            }  # fmt: skip
            eventually(lambda: "policy_left_out" not in lines(results)[-1], LIMIT_S)
    after = lines(results)[len(before) :]
    held = [line for line in after if "policy_left_out" in line]
    assert len(held) >= 200
    assert {(line["class"], line["label"], line["policy_left_out"]) for line in held} == {(None, None, 1)}
    assert "policy_left_out" in after[0], "from the first frame after the restart on"
