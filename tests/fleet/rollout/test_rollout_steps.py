"""A rollout step by step, without a broker: what boards answer is made up here, the worst they could say too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from databases import store as store
from databases import where as where
from rollout_room import PERIOD, Room, accepted, done, failed, policy, reported, spec
from stored import store_results
from turned_clock import TurnedClock

from agent.common.errors import AgentError, CommandError
from agent.contract.commands import CommandResult
from agent.mqtt.endpoint import Endpoint
from fleet.cli.main import main
from fleet.devices.devices import Device, Devices
from fleet.operator import file_arguments_from
from fleet.rollout.board_steps import MOST_ATTEMPTS, overdue_result
from fleet.rollout.controller import LEASE_S, Controller
from fleet.rollout.register import RolloutRegister
from fleet.rollout.rows import BoardRow, BoardStage, CommandRole, CommandRow, RolloutState
from fleet.rollout.stepper import judge_wave
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore, Transaction


@pytest.mark.parametrize("text", ["\0", "x" * 10_000, "\x1b[2J", "ünï \U0001f600"])
def test_no_text_of_a_board_holds_anything_up(store: FleetStore, text: str) -> None:
    room = Room(store, spec())
    room.step()
    orders = room.open()
    room.step(failed(orders["b0"], text[:50], text), done(orders["b1"], artefact=text))
    assert room.states() == [BoardStage.FAILED, BoardStage.DONE]
    assert all(each.reason.isprintable() and len(each.reason) <= 300 for each in room.rows())


@pytest.mark.parametrize("value", ["[" * 100_000, 2**60, -(2**80), [1], {"a": {}}, "\0"])
def test_no_setting_of_a_board_holds_up_the_others(store: FleetStore, value: Any) -> None:
    room = Room(store, policy())
    room.held.update({("f", "b0"): reported(value), ("f", "b1"): reported(5.0)})
    room.step()
    assert room.states()[1] is BoardStage.SENT
    room.step(*(done(each) for each in room.open().values()))
    room.held.update({("f", name): reported(2.0, 2) for name in ("b0", "b1")})
    room.turn()
    room.step()
    assert room.open(CommandRole.UNDO).keys() >= {"b1"}
    room.step(*(done(each) for each in room.open(CommandRole.UNDO).values()))
    room.until(RolloutState.ABORTED)


def test_the_baseline_is_from_before_the_first_attempt(store: FleetStore) -> None:
    room = Room(store, policy(), boards=1)
    room.held["f", "b0"] = reported(5.0)
    room.step()
    room.step(failed(room.open()["b0"], "command.interrupted"))
    room.held["f", "b0"] = reported(2.0, 2)  # it had been carried out
    room.clock.turn(20.0)  # the pause before the second attempt
    room.step()
    room.step(done(room.open()["b0"]))
    room.turn()
    room.step()
    assert f'"{PERIOD}":5.0' in room.open(CommandRole.UNDO)["b0"].payload


def test_a_policy_that_somebody_has_changed_since_is_left_alone(store: FleetStore) -> None:
    room = Room(store, policy(), boards=1)
    room.held["f", "b0"] = reported(5.0)
    room.step()
    room.step(done(room.open()["b0"]))
    room.held["f", "b0"] = reported(30.0, 3)
    room.turn()
    room.until(RolloutState.ABORTED)
    assert room.states() == [BoardStage.KEPT]


def test_the_version_of_a_policy_rises_whatever_the_clock_says(store: FleetStore) -> None:
    room = Room(store, policy(), boards=1)
    room.held["f", "b0"] = reported(5.0, version=2**52)
    room.step()
    assert f'"version":{2**52 + 1}' in room.open()["b0"].payload


def test_a_board_without_reported_settings_is_waited_for_and_then_given_up(store: FleetStore) -> None:
    room = Room(store, policy(), boards=1)
    for _ in range(MOST_ATTEMPTS):
        room.step()
        assert room.states() == [BoardStage.WAITING]
        room.clock.turn(5.0)
    room.step()
    assert room.states() == [BoardStage.FAILED]
    assert "has not reported its settings" in room.rows()[0].reason


def test_a_board_that_was_away_at_the_abort_gets_no_command(store: FleetStore) -> None:
    room = Room(store, spec())
    room.sender.report_presence("f", "b0", is_there=False)
    room.step()
    assert len(room.sent()) == 1  # to b1
    orders = room.open()
    room.step(accepted(orders["b1"]))
    room.turn(undo=None)
    room.step()
    assert room.open(CommandRole.CANCEL).keys() == {"b1"}
    room.sent()
    room.sender.report_presence("f", "b0", is_there=True)
    assert room.sent() == []
    room.step(accepted(orders["b0"]))  # a broker had kept it for the board
    assert room.open(CommandRole.CANCEL).keys() == {"b0", "b1"}


def test_a_board_that_is_away_holds_up_no_other(store: FleetStore) -> None:
    room = Room(store, spec(at_once=1), boards=3)
    for name in ("b0", "b1"):
        room.sender.report_presence("f", name, is_there=False)
    for _ in range(4):
        room.step()
    assert room.states() == [BoardStage.SENT] * 3


def test_at_once_bounds_the_boards_at_work_and_those_that_go_back(store: FleetStore) -> None:
    room = Room(store, spec(at_once=2, soak_s=0.0), boards=3)
    for _ in range(3):
        room.step()
    assert room.states() == [BoardStage.SENT, BoardStage.SENT, BoardStage.WAITING]
    room.carry_out()
    room.carry_out()
    room.until(RolloutState.COMPLETED)
    room.turn()
    for _ in range(3):
        room.step()
    assert room.states() == [BoardStage.UNDOING, BoardStage.UNDOING, BoardStage.DONE]


def test_a_board_that_was_away_for_a_whole_window_waits_for_the_next(store: FleetStore) -> None:
    room = Room(store, spec(windows=("00:00-24:00",), valid_s=20.0), boards=1)
    room.step()
    room.clock.turn(26.0)
    room.step()
    assert room.states() == [BoardStage.WAITING]
    assert room.rows()[0].attempts == 1


def test_a_window_counts_by_the_boards_time_zone_and_its_commands_end_with_it(store: FleetStore) -> None:
    clock = TurnedClock(wall_s=datetime(2026, 11, 22, 2, tzinfo=timezone.utc).timestamp())
    Room(store, spec(), clock=clock)  # the store knows the boards from now on
    devices = Devices(store)
    devices.tag(list(devices.all("f"))[1:], {"tz": "Asia/Tokyo"}, [], "operator")
    room = Room(store, spec(windows=("20:00-22:00",), timezone="America/New_York", valid_s=7200.0), clock=clock)
    room.step()
    assert room.states() == [BoardStage.SENT, BoardStage.WAITING]
    assert room.open()["b0"].expires == clock.wall_s() + 3600.0, "it is nine in the evening in New York"
    clock.turn(10 * 3600.0)
    room.step()
    assert room.states()[1] is BoardStage.SENT
    devices.tag(list(devices.all("f"))[1:], {"tz": "Mars"}, [], "operator")
    with pytest.raises(CommandError, match=r"rollout\.zone"):
        RolloutRegister(store, "operator").plan("f", spec())


def test_a_board_that_comes_back_gets_its_command(store: FleetStore) -> None:
    room = Room(store, spec(), boards=1)
    room.sender.report_presence("f", "b0", is_there=False)
    room.step()
    assert room.sent() == []
    room.sender.report_presence("f", "b0", is_there=True)
    assert room.sent() == [room.open()["b0"].payload.encode()]


def test_a_busy_board_gets_another_command_after_a_pause(store: FleetStore) -> None:
    room = Room(store, spec(), boards=1)
    room.step()
    first = room.open()["b0"]
    room.step(failed(first, "command.busy"))
    assert room.open() == {}
    room.clock.turn(10.0)
    room.step()
    assert room.open()["b0"].id != first.id


def test_a_result_that_only_a_collector_received_is_found(store: FleetStore) -> None:
    room = Room(store, spec(), boards=1)
    room.step()
    with store.transaction() as transaction:
        store_results(store, transaction, ("f", "b0"), done(room.open()["b0"]))
    room.clock.turn(10.0)
    room.step()
    assert room.states() == [BoardStage.DONE]


def test_a_board_may_take_so_long_from_when_it_has_begun() -> None:
    order = CommandRow("c", 1, "b", CommandRole.DO, "{}", sent=0.0, expires=86_400.0, accepted=86_000.0)
    assert overdue_result(order, 86_000.0 + 7_000.0, 7_200.0) is None
    late = overdue_result(order, 86_000.0 + 7_300.0, 7_200.0)
    assert late is not None
    assert late.status == "FAILED"


def test_an_expiry_after_it_had_begun_is_a_failure(store: FleetStore) -> None:
    """As of a board that was restored from a backup in between, and knows nothing of the command."""
    room = Room(store, spec(), boards=2)
    room.step()
    orders = room.open()
    room.step(accepted(orders["b0"]))
    room.step(*(CommandResult(id=each.id, status="EXPIRED") for each in orders.values()))
    assert room.states() == [BoardStage.FAILED, BoardStage.UNREACHED]


def test_a_commit_whose_answer_was_lost_is_looked_up(store: FleetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(store, spec(), boards=1)
    transaction = store.transaction

    @contextmanager
    def lossy(what: Any = "write") -> Iterator[Transaction]:
        with transaction(what) as opened:
            yield opened
        if what == "write" and room.states() == [BoardStage.SENT]:
            raise AgentError("fleet.unreachable", "no answer", "one", "wait")

    monkeypatch.setattr(store, "transaction", lossy)
    with pytest.raises(AgentError):
        room.step()
    assert room.sent() == []
    monkeypatch.setattr(store, "transaction", transaction)
    room.step()
    assert len(room.sent()) == 1


def test_a_store_that_is_away_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    where = str(tmp_path / "db")
    with open_store(where) as store:
        identity = Room(store, spec()).id
    store = open_store(where)
    transaction = store.transaction

    def away(what: Any = "write") -> Any:
        if "rollouts=waiting" not in caplog.text:
            raise AgentError("fleet.unreachable", "no answer", "one", "wait")
        return transaction(what)

    monkeypatch.setattr(store, "transaction", away)
    monkeypatch.setattr("fleet.rollout.controller._RETRY_S", 0.0)
    controller = Controller(Endpoint("127.0.0.1", 1), store, "who")
    controller.run(lambda: bool(controller.rollouts))
    assert controller.rollouts.keys() == {identity}
    assert "fleet.unreachable: no answer" in caplog.text


def test_a_controller_reads_anew_the_steps_of_another(store: FleetStore, where: str) -> None:
    """The first stands still while the second goes on; then it takes the rollout up where the second has left it."""
    room = Room(store, spec(), boards=1)
    with room.controllers(where, None, None) as (first, second):
        first._claim()
        first._step()
        first._step()
        (order,) = first._stepper._open[room.id].values()
        room.clock.turn(LEASE_S + 1.0)
        second._claim()
        second._results[order.id] = done(order, artefact="e1")
        second._step()
        first._step()
        assert first.rollouts == {}, "its lease is over"
        room.clock.turn(LEASE_S + 1.0)
        first._claim()
        first._step()
        assert first._stepper._open[room.id] == {}
    assert room.states() == [BoardStage.DONE]


@pytest.mark.parametrize(
    ("reported", "before", "words"),
    [
        ({"state": "degraded"}, {}, "degraded since"),
        ({"state": "degraded"}, {"state": "degraded"}, ""),
        ({"state": "offline"}, {}, "offline since"),
        ({"state": "online", "last_seen": 0.0}, {}, "silent since"),
        ({"state": "online", "engine": "e0"}, {"engine": "e0"}, "back at e0, which it had before"),
        ({"state": "online", "engine": "e2"}, {"engine": "e0"}, ""),
    ],
)
def test_a_relapse_after_success_counts_as_a_failure(
    reported: dict[str, Any], before: dict[str, Any], words: str
) -> None:
    values: dict[str, Any] = dict.fromkeys(("state", "agent_version", "model", "engine", "calibration"))
    values |= {"id": 1, "fleet": "f", "name": "b", "last_seen": 1e6, "engine": "e1", **reported}
    board = BoardRow(1, "b", 0, "UTC", BoardStage.DONE, 1, before, "e1", "", 1e6 - 100.0)
    findings = judge_wave(spec(gates="failures<=0%"), [board], {1: Device(**values)}, 1e6)
    assert findings is not None
    assert findings[0].found == (f"1 of 1, 100.0%; b: {words}" if words else "0 of 1, 0.0%")


def test_a_rollout_of_a_newer_tared_is_left_alone(store: FleetStore, where: str, tmp_path: Path) -> None:
    strange = Room(store, spec()).id
    room = Room(store, spec())
    with store.transaction() as transaction:
        newer = json.dumps({**json.loads(spec().to_json()), "blue_green": True})
        transaction.execute("UPDATE rollouts SET spec = ? WHERE id = ?", (newer, strange))
    with room.controllers(where, None) as (controller,):
        controller._claim()
        assert controller.rollouts.keys() == {room.id}
    seen = RolloutRegister(store, "").show(strange)[0]
    assert seen.rollout.lease_until == 0.0, "it is released"
    assert [record.what for record in seen.records] == ["created", "left to another controller"]
    at = ["--db", where]
    for words in (["list", "--fleet", "f"], ["show", strange], ["abort", strange]):
        assert main(["fleet", "rollout", *words, *at]) == 0
    assert main(["fleet", "report", "--fleet", "f", "-o", str(tmp_path / "report.html"), *at]) == 0


@pytest.mark.parametrize("content", [b"another model", None])
def test_a_rollout_without_its_file_waits_for_another_controller(
    store: FleetStore, where: str, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"a model")
    arguments, path = file_arguments_from({"file": str(file)})
    room = Room(store, spec("model", arguments=arguments, file=str(path)), boards=1)
    file.unlink() if content is None else file.write_bytes(content)
    with room.controllers(where, None) as (controller,):
        controller._claim()
        assert controller.rollouts == {}
        file.write_bytes(b"a model")
        room.clock.turn(61.0)
        controller._claim()
        assert controller.rollouts.keys() == {room.id}
