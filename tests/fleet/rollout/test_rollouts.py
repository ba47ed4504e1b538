"""Rollouts at a simulated fleet with a real broker: good ones, bad ones, and boards that are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, Watcher, eventually
from databases import where as where
from rollout_bench import PATIENCE_S, Commands, a_fleet, begin, boards, controlling, ended, overview, swaps
from rollout_bench import names_of as names
from rollout_room import PERIOD
from simulator_bench import FLEET, topics

from agent.contract.signing import Keyring, Signer, new_key
from fleet.devices.devices import Devices
from fleet.rollout.register import RolloutRegister
from fleet.rollout.rows import BoardStage, RolloutState
from fleet.rollout.spec import RolloutSpec
from fleet.simulator.options import BadEngines
from fleet.store.opening import open_store

pytestmark = [pytest.mark.broker, pytest.mark.slow]

# A bad engine takes 1.4 times as long, give or take 2 %; its fidelity, after so short a while, could be chance.
GATES = "fidelity>=0.2,latency_p99<=1.25x,failures<=5%"


def quick(op: str = "recalibrate", **overrides: Any) -> RolloutSpec:
    return RolloutSpec(**{"op": op, "gates": GATES, "soak_s": 1.0, "waves": "1,4,100%", "order": "name", **overrides})


IN_EACH = pytest.mark.parametrize("where", ["sqlite", pytest.param("postgres", marks=pytest.mark.trial)], indirect=True)


@IN_EACH
def test_a_bad_wave_goes_back_and_no_board_beyond_it_gets_a_command(mosquitto: RealBroker, where: str) -> None:
    bad = BadEngines(first=1, last=3)
    with a_fleet(mosquitto, where, 10, bad=bad), Commands(mosquitto) as commands, controlling(mosquitto, where):
        identity = begin(where, quick())
        seen = ended(where, identity)
        sent, back = commands.sent_ids("recalibrate"), commands.sent_ids("rollback")
    assert seen.rollout.state is RolloutState.ROLLED_BACK
    assert boards(where, identity, BoardStage.DONE) == names(0)
    assert boards(where, identity, BoardStage.UNDONE) == back.keys() == names(1, 2, 3)
    assert boards(where, identity, BoardStage.WAITING) == names(*range(4, 10))
    assert sent.keys() == names(0, 1, 2, 3)
    failed = next(each for each in seen.records if each.what == "gate failed")
    assert "latency_p99<=1.25x: holds on 0 of 3 boards" in failed.why
    for number in range(1, 4):
        new, former = swaps(where, number)
        assert former.startswith("rollback:")
        assert former != f"rollback:{new}"


def test_a_policy_waits_for_a_board_that_is_away_and_goes_back_to_what_each_had(
    mosquitto: RealBroker, tmp_path: Path
) -> None:
    where = str(tmp_path / "db")
    with a_fleet(mosquitto, where, 2, period_s=0.5) as simulation, open_store(where) as store:
        away = simulation._boards[0]
        away.stop()
        eventually(lambda: next(iter(Devices(store).all(FLEET))).state == "offline")
        with controlling(mosquitto, where):
            identity = begin(where, quick("policy", arguments={PERIOD: 0.6}, waves="100%", at_once=1, soak_s=600.0))
            eventually(lambda: boards(where, identity, BoardStage.DONE) == names(1), PATIENCE_S)
            away.start()
            eventually(lambda: boards(where, identity, BoardStage.DONE) == names(0, 1), PATIENCE_S)
            RolloutRegister(store, "operator").abort(identity, "all", "")
            assert ended(where, identity).rollout.state is RolloutState.ABORTED
        assert boards(where, identity, BoardStage.UNDONE) == names(0, 1)
        with Watcher(mosquitto.endpoint) as watcher:
            held = [watcher.retained(topics(number).reported)["values"][PERIOD] for number in (0, 1)]
    assert held == [0.5, 0.5], "as the boards were simulated"


@pytest.mark.trial
def test_each_command_is_signed_for_its_board_and_kept_as_it_was_sent(mosquitto: RealBroker, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    private, public, _ = new_key(tmp_path / "operator")
    with a_fleet(mosquitto, where, 3, operator_keys=(public,)):
        identity = begin(where, quick(waves="1,100%"))
        with controlling(mosquitto, where):  # without the key
            eventually(lambda: overview(where, identity).rollout.state is RolloutState.PAUSED)
            assert boards(where, identity, BoardStage.WAITING) == names(0, 1, 2)
        (halted,) = [each for each in overview(where, identity).records if each.what == "halted"]
        assert "command.unsigned" in halted.why
        assert "run --sign KEY" in halted.why
        with controlling(mosquitto, where, Signer(private)), open_store(where) as store:
            RolloutRegister(store, "operator").resume(identity, "with the key")
            assert ended(where, identity).rollout.state is RolloutState.COMPLETED
    with open_store(where) as store:
        _, _, (refused, *commands) = RolloutRegister(store, "").show(identity)
    assert (refused[4], "signature" in json.loads(refused[5])) == ("REJECTED", False)
    assert len(commands) == 3
    ring = Keyring([public])
    for device, role, _, _, status, sent, result in commands:
        document = json.loads(sent)
        assert (role, status, document["to"]) == ("do", "SUCCEEDED", f"simulated/{device}")
        assert ring.signer_id(document) is not None
        assert json.loads(result)["id"] == document["id"]
