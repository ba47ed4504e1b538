"""Rollouts at a simulated fleet with a real broker: good ones, bad ones, and boards that are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, eventually
from databases import where as where
from rollout_bench import Commands, a_fleet, begin, boards, controlling, ended, overview, swaps
from rollout_bench import names_of as names
from simulator_bench import topics

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


@pytest.mark.trial
def test_each_wave_is_commanded_judged_and_followed_by_the_next(mosquitto: RealBroker, where: str) -> None:
    with a_fleet(mosquitto, where, 10), Commands(mosquitto) as commands, controlling(mosquitto, where):
        identity = begin(where, quick(), "a new season")
        seen = ended(where, identity)
        sent = commands.sent_ids("recalibrate")
    assert seen.rollout.state is RolloutState.COMPLETED
    assert [dict(seen.counts[wave]) for wave in range(3)] == [{BoardStage.DONE: count} for count in (1, 3, 6)]
    assert {device: len(ids) for device, ids in sent.items()} == dict.fromkeys(names(*range(10)), 1)
    assert [len(swaps(where, number)) for number in range(10)] == [1] * 10
    steps = [each.what for each in seen.records]
    assert steps == ["created", *["soaking", "gate passed"] * 3, "COMPLETED"]
    assert (seen.records[0].who, seen.records[0].why, seen.records[1].who) == ("operator", "a new season", "controller")
    judged = [json.loads(each.document) for each in seen.records if each.what == "gate passed"]
    assert [(each["wave"], len(each["gates"])) for each in judged] == [(1, 3), (2, 3), (3, 3)]


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


@pytest.mark.trial
def test_after_a_bad_wave_went_back_an_abort_takes_the_good_one_back_too(mosquitto: RealBroker, where: str) -> None:
    bad = BadEngines(first=1, last=3)
    with a_fleet(mosquitto, where, 10, bad=bad), Commands(mosquitto) as commands, controlling(mosquitto, where):
        identity = begin(where, quick())
        assert ended(where, identity).rollout.state is RolloutState.ROLLED_BACK
        assert commands.sent_ids("rollback").keys() == names(1, 2, 3)
        with open_store(where) as store:
            assert RolloutRegister(store, "operator").abort(identity, "all", "none of it").state is RolloutState.UNDOING
        assert ended(where, identity).rollout.state is RolloutState.ABORTED
        assert commands.sent_ids("rollback").keys() == names(0, 1, 2, 3)
    assert boards(where, identity, BoardStage.UNDONE) == names(0, 1, 2, 3)


@pytest.mark.trial
def test_too_many_failures_stop_a_wave_before_it_is_through(mosquitto: RealBroker, where: str) -> None:
    with a_fleet(mosquitto, where, 20, failures=1.0), Commands(mosquitto) as commands, controlling(mosquitto, where):
        identity = begin(where, quick(waves="100%", at_once=3, gates="failures<=10%"))
        seen = ended(where, identity)
        sent = commands.sent_ids("recalibrate")
    assert seen.rollout.state is RolloutState.ROLLED_BACK
    assert 3 <= len(sent) <= 6  # three have failed, and no more got a command than were under way by then
    assert boards(where, identity, BoardStage.WAITING) == names(*range(20)) - sent.keys()
    failed = next(each for each in seen.records if each.what == "gate failed")
    assert "failures<=10%" in failed.why


@pytest.mark.trial
@pytest.mark.parametrize(
    ("undo", "undone", "done"), [(None, set(), {0, 1, 2}), ("wave", {1, 2}, {0}), ("all", {0, 1, 2}, set())]
)
def test_an_abort_cancels_running_jobs_and_undoes_the_named_waves(
    mosquitto: RealBroker, tmp_path: Path, undo: str | None, undone: set[int], done: set[int]
) -> None:
    where = str(tmp_path / "db")
    with a_fleet(mosquitto, where, 8, job_s=2.0), controlling(mosquitto, where), Commands(mosquitto) as commands:
        at_it = names(3)
        identity = begin(where, quick(waves="1,5,100%", at_once=1, soak_s=0.5))
        # The second wave's first two are done, its third is at it, and its others have no command.
        eventually(lambda: commands.sent_ids("recalibrate").keys() == names(*range(4)), 30.0)
        with open_store(where) as store:
            RolloutRegister(store, "operator").abort(identity, undo, "enough")
        seen = ended(where, identity)
        assert not names(4, 5, 6, 7) & commands.sent_ids("recalibrate").keys()
        eventually(lambda: commands.sent_ids("cancel").keys() == at_it, 10.0)
    assert seen.rollout.state is RolloutState.ABORTED
    assert boards(where, identity, BoardStage.UNDONE) == names(*undone)
    assert boards(where, identity, BoardStage.DONE) == names(*done)
    assert boards(where, identity, BoardStage.FAILED) == at_it


@pytest.mark.trial
def test_a_board_that_is_away_gets_its_command_when_it_comes_back(mosquitto: RealBroker, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    with a_fleet(mosquitto, where, 3) as simulation, Commands(mosquitto) as commands, controlling(mosquitto, where):
        away = simulation._boards[1]
        away.stop()
        with open_store(where) as store:
            eventually(lambda: list(Devices(store).all("simulated"))[1].state == "offline", 20.0)
        identity = begin(where, quick(waves="100%"))
        eventually(lambda: boards(where, identity, BoardStage.DONE) == names(0, 2), 20.0)
        assert commands.sent_ids("recalibrate").keys() == names(0, 2)
        away.start()
        seen = ended(where, identity)
        assert commands.sent_ids("recalibrate").keys() == names(0, 1, 2)
    assert seen.rollout.state is RolloutState.COMPLETED


@pytest.mark.trial
def test_a_board_that_stays_away_is_unreached_and_no_failure(mosquitto: RealBroker, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    with a_fleet(mosquitto, where, 4) as simulation, controlling(mosquitto, where):
        simulation._boards[3].stop()
        with open_store(where) as store:
            eventually(lambda: list(Devices(store).all("simulated"))[3].state == "offline", 20.0)
        identity = begin(where, quick(waves="100%", valid_s=3.0, gates="failures<=0%,unreached<=25%"))
        seen = ended(where, identity)
        assert seen.rollout.state is RolloutState.COMPLETED
        assert boards(where, identity, BoardStage.UNREACHED) == names(3)
        strict = begin(where, quick(waves="100%", valid_s=3.0, gates="failures<=0%,unreached<=20%"))
        assert ended(where, strict).rollout.state is RolloutState.ROLLED_BACK


@pytest.mark.trial
def test_a_board_that_is_lost_after_its_success_is_a_failure(mosquitto: RealBroker, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    with a_fleet(mosquitto, where, 3) as simulation, controlling(mosquitto, where):
        identity = begin(where, quick(waves="100%", soak_s=4.0, gates="failures<=10%", valid_s=5.0))
        eventually(lambda: boards(where, identity, BoardStage.DONE) == names(0, 1, 2), 20.0)
        simulation._boards[2].stop()
        seen = ended(where, identity)
    failed = next(each for each in seen.records if each.what == "gate failed")
    assert f"{topics(2).device}: offline since" in failed.why
    assert boards(where, identity, BoardStage.UNDONE) == names(0, 1)
    assert boards(where, identity, BoardStage.KEPT) == names(2)  # no command could reach it


@pytest.mark.trial
def test_a_busy_board_is_asked_again(mosquitto: RealBroker, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    with a_fleet(mosquitto, where, 2, job_s=2.0) as simulation:
        simulation._boards[1].context.engines.start_job("alarm", bad=False)
        with Commands(mosquitto) as commands, controlling(mosquitto, where):
            identity = begin(where, quick(waves="100%"))
            seen = ended(where, identity)
            sent = commands.sent_ids("recalibrate")
    assert seen.rollout.state is RolloutState.COMPLETED
    assert len(sent[topics(0).device]) == 1
    assert len(sent[topics(1).device]) == 2  # the refused one has another id


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


@pytest.mark.trial
def test_a_policy_goes_back_to_what_each_board_had(mosquitto: RealBroker, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    key = "mqtt.telemetry_period_s"
    with a_fleet(mosquitto, where, 4) as simulation, controlling(mosquitto, where):

        def periods() -> list[object]:
            return [board._daemon._settings.reported().values[key] for board in simulation._boards]  # type: ignore[union-attr]  # they have started

        good = begin(where, quick("policy", arguments={key: 0.6}, waves="100%", gates="failures<=0%"))
        assert ended(where, good).rollout.state is RolloutState.COMPLETED
        assert periods() == [0.6] * 4
        bad = begin(where, quick("policy", arguments={key: 0.9}, waves="2,100%", gates="fps>=1000"))
        assert ended(where, bad).rollout.state is RolloutState.ROLLED_BACK
        assert periods() == [0.6] * 4
        refused = begin(where, quick("policy", arguments={key: 0.01}, waves="1,100%"))
        assert ended(where, refused).rollout.state is RolloutState.ROLLED_BACK
        assert boards(where, refused, BoardStage.FAILED) == names(0)


@pytest.mark.trial
def test_a_regime_is_switched_to_and_back(mosquitto: RealBroker, tmp_path: Path) -> None:
    """Simulated boards have regimes under ids of their own, so the rollout is for one board."""
    where = str(tmp_path / "db")
    with a_fleet(mosquitto, where, 3, automatic=False) as simulation, controlling(mosquitto, where):
        engines = simulation._boards[0].context.engines
        before, other = engines.serving.id, next(iter(engines.other_lights.values())).id
        spec = quick("regime", arguments={"regime": other}, select="name=sim-000000", gates="fps>=1000")
        assert ended(where, begin(where, spec)).rollout.state is RolloutState.ROLLED_BACK
        assert engines.serving.id == before
        there = begin(where, quick("regime", arguments={"regime": before}, select="name=sim-000000", gates=""))
        assert ended(where, there).rollout.state is RolloutState.COMPLETED  # it serves it already
