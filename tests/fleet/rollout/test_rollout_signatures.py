"""Rollouts at boards that obey signed commands alone: who carries them out, and what a refusal says of whom."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
from databases import store as store
from databases import where as where
from rollout_room import Room, accepted, done, spec

from agent.contract.commands import CommandResult
from agent.contract.messages import Birth
from agent.contract.signing import Signer, new_key
from fleet.cli.main import main
from fleet.devices.devices import Devices
from fleet.rollout import rows
from fleet.rollout.register import RolloutRegister
from fleet.rollout.rows import BoardStage, CommandRole, CommandRow, RolloutState
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore

_CODES = ("command.unsigned", "command.signature")


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(new_key(tmp_path / "operator")[0])


def refused(order: CommandRow, code: str) -> CommandResult:
    error = {"code": code, "message": "found this; expected that; do so"}
    return CommandResult.model_validate({"id": order.id, "status": "REJECTED", "error": error})


def halts(room: Room) -> list[str]:
    return [each.why for each in RolloutRegister(room.store, "").show(room.id)[0].records if each.what == "halted"]


@pytest.mark.parametrize("code", _CODES)
@pytest.mark.parametrize("signs", [False, True])
def test_a_key_that_no_board_has_obeyed_halts_the_rollout_and_no_engine_has_failed(
    store: FleetStore, signer: Signer, code: str, signs: bool
) -> None:
    room = Room(store, spec(gates="failures<=0%,unreached<=0%"))
    room.take_over(signer if signs else None)
    room.step()
    assert room.step(refused(room.open()["b0"], code)) is RolloutState.PAUSED
    assert room.states() == [BoardStage.WAITING, BoardStage.SENT]
    (why,) = halts(room)
    assert why.startswith(f"b0: {code}: found this")
    assert "'run --sign KEY'), then 'tared fleet rollout resume'" in why


def test_a_controller_with_the_key_resumes_a_halted_rollout(store: FleetStore, signer: Signer) -> None:
    room = Room(store, spec(), boards=2)
    room.step()
    unsigned = room.open()
    room.step(refused(unsigned["b0"], "command.unsigned"))
    room.take_over(signer)
    RolloutRegister(store, "operator").resume(room.id, "")
    room.step()
    assert "signature" in json.loads(room.open()["b0"].payload)
    assert room.step(refused(unsigned["b1"], "command.unsigned")) is RolloutState.RUNNING  # it was away until now
    room.step()
    signed = room.open()
    assert all("signature" in json.loads(each.payload) for each in signed.values())
    room.step(*(done(each, artefact="e1") for each in signed.values()))
    assert room.states() == [BoardStage.DONE] * 2
    assert len(halts(room)) == 1


def test_a_board_with_another_key_is_unreached_and_holds_up_no_other(store: FleetStore, signer: Signer) -> None:
    room = Room(store, spec())
    room.take_over(signer)
    room.step()
    orders = room.open()
    room.step(accepted(orders["b0"]))
    assert room.step(refused(orders["b1"], "command.signature")) is RolloutState.RUNNING
    assert room.states() == [BoardStage.SENT, BoardStage.UNREACHED]
    assert "command.signature" in room.rows()[1].reason
    assert halts(room) == []


def test_without_a_key_even_one_board_that_demands_it_halts_the_rollout(store: FleetStore) -> None:
    room = Room(store, spec())
    room.step()
    orders = room.open()
    room.step(accepted(orders["b0"]))
    assert room.step(refused(orders["b1"], "command.unsigned")) is RolloutState.PAUSED
    assert room.states() == [BoardStage.SENT, BoardStage.WAITING]


def test_a_refusal_while_all_is_undone_halts_nothing(store: FleetStore) -> None:
    room = Room(store, spec())
    room.step()
    orders = room.open()
    room.step(done(orders["b0"], artefact="e1"))
    room.serves({0: "e1"})
    room.turn()
    room.step()
    assert room.step(refused(orders["b1"], "command.unsigned")) is RolloutState.UNDOING
    assert room.states()[1] is BoardStage.UNREACHED
    room.step(refused(room.open(CommandRole.UNDO)["b0"], "command.unsigned"))
    assert room.states()[0] is BoardStage.DONE  # asked again, in case the next controller has the key
    room.clock.turn(10.0)
    room.step()
    room.step(done(room.open(CommandRole.UNDO)["b0"], artefact="e0"))
    room.until(RolloutState.ABORTED)
    assert room.states() == [BoardStage.UNDONE, BoardStage.UNREACHED]


def test_a_controller_without_a_key_never_claims_a_rollout_that_demands_one(
    store: FleetStore, where: str, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(store, spec(signed=True))
    other = RolloutRegister(store, "operator", room.clock)
    plain = other.create("f", spec(), other.plan("f", spec()), "")
    with room.controllers(where, None, signer) as (without, having), caplog.at_level(logging.ERROR):
        for _ in range(3):
            without._claim()
        assert without.rollouts.keys() == {plain}
        with store.transaction("read") as transaction:
            assert rows.get_rollout(transaction, room.id).lease_owner is None
        assert caplog.text.count("rollout.unsigned") == 1
        assert "run a controller with --sign KEY" in caplog.text
        having._claim()
        assert having.rollouts.keys() == {room.id}
        having._step()
        having._step()
        assert all("signature" in json.loads(each.payload) for each in having._stepper._open[room.id].values())
    records = RolloutRegister(store, "").show(room.id)[0].records
    assert [each.what for each in records][:2] == ["created", "left to another controller"]
    assert json.loads(records[0].document)["spec"]["signed"] is True


def test_the_command_demands_it_and_says_where_it_should_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tmp_path / "fleet.sqlite")
    birth = Birth(agent_version="1", commands={"operator_keys": ["abc"], "release_keys": [], "unsigned": False})
    with open_store(where) as store, store.transaction() as transaction:
        sent = {("default", "b0"): (birth, birth.to_json().decode())}
        Devices(store).apply_births(transaction, sent, time.time())
    create = ["fleet", "rollout", "create", "--op", "recalibrate", "--db", where]
    assert main([*create, "--dry-run"]) == 0
    assert "1 of them have operators' keys: with --signed, only a controller with a key" in capsys.readouterr().out
    assert main([*create, "--signed"]) == 0
    assert "operators' keys" not in capsys.readouterr().out
    with open_store(where) as store:
        (identity,) = [each.rollout.id for each in RolloutRegister(store, "").all("default")]
    assert main(["fleet", "rollout", "show", identity, "--db", where]) == 0
    assert "RUNNING, signed commands alone" in capsys.readouterr().out
    assert main(["fleet", "rollout", "show", identity, "--db", where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["signed"] is True
