"""Rollouts that go back, step by step: boards that are sent back, and boards that are left alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from databases import store as store
from databases import where as where
from rollout_room import Room, accepted, done, failed, spec
from stored import store_results

from agent.common.errors import CommandError
from fleet.operator import file_arguments_from
from fleet.rollout.register import RolloutRegister
from fleet.rollout.rows import BoardStage, CommandRole, RolloutState
from fleet.store.transaction import FleetStore


@pytest.mark.parametrize(
    ("back_at", "state"), [("e0", BoardStage.UNDONE), ("e7", BoardStage.KEPT), (None, BoardStage.UNDONE)]
)
def test_a_board_has_gone_back_where_it_serves_what_it_had(
    store: FleetStore, back_at: str | None, state: BoardStage
) -> None:
    room = Room(store, spec(), boards=1)
    room.carry_out()
    room.turn()
    room.step()
    room.step(done(room.open(CommandRole.UNDO)["b0"], artefact=back_at))
    assert room.states() == [state]


@pytest.mark.parametrize(("serves", "state"), [("e2", BoardStage.KEPT), ("e0", BoardStage.UNDONE)])
def test_a_board_that_has_gone_on_since_is_left_alone(store: FleetStore, serves: str, state: BoardStage) -> None:
    room = Room(store, spec(), boards=1)
    room.step()
    room.step(done(room.open()["b0"], artefact="e1"))
    room.serves({0: serves})
    room.clock.turn(100.0)
    room.turn()
    room.until(RolloutState.ABORTED)
    assert room.states() == [state]
    assert room.open(CommandRole.UNDO) == {}


def test_a_board_that_was_done_too_late_goes_back_too(store: FleetStore) -> None:
    room = Room(store, spec(deadline_s=60.0, valid_s=20.0), boards=1)
    room.step()
    order = room.open()["b0"]
    room.step(accepted(order))
    room.clock.turn(61.0)
    room.step()
    assert room.states() == [BoardStage.FAILED]
    assert room.open(CommandRole.CANCEL).keys() == {"b0"}  # it is wanted no more
    late = done(order, artefact="e1")
    with store.transaction() as transaction:
        store_results(store, transaction, ("f", "b0"), late)
    room.serves({0: "e1"})
    room.turn()
    room.step()
    room.step()
    room.step(done(room.open(CommandRole.UNDO)["b0"], artefact="e0"))
    assert room.states() == [BoardStage.UNDONE]
    room.until(RolloutState.ABORTED)


def two_waves(store: FleetStore, is_failed: bool = True) -> Room:
    """Return a room whose b0 serves e1, and in whose second wave b1 does and b2 has failed, or is at work."""
    room = Room(store, spec(waves="1,100%", gates="failures<=0%", soak_s=0.0), boards=3)
    for names in (("b0",), ("b1",)):
        while not room.open():
            room.step()
        orders = room.open()
        room.step(*(done(orders[name], artefact="e1") for name in names))
        room.serves(dict.fromkeys((int(name[1]) for name in names), "e1"))
    if is_failed:
        room.step(failed(room.open()["b2"], "engine.build"))
    return room


def undo_all_that_is_asked(room: Room) -> None:
    room.step(*(done(each, artefact="e0") for each in room.open(CommandRole.UNDO).values()))
    room.serves(dict.fromkeys(range(room.boards), "e0"))


def test_after_a_wave_went_back_the_earlier_ones_can_be_taken_back_too(store: FleetStore) -> None:
    room = two_waves(store)
    room.step()
    assert room.open(CommandRole.UNDO).keys() == {"b1"}
    undo_all_that_is_asked(room)
    room.serves({0: "e1"})
    room.until(RolloutState.ROLLED_BACK)
    assert room.states() == [BoardStage.DONE, BoardStage.UNDONE, BoardStage.FAILED]
    room.turn("all")
    room.step()
    assert room.open(CommandRole.UNDO).keys() == {"b0"}
    undo_all_that_is_asked(room)
    room.until(RolloutState.ABORTED)
    assert room.states() == [BoardStage.UNDONE, BoardStage.UNDONE, BoardStage.FAILED]
    assert [each.what for each in RolloutRegister(store, "").show(room.id)[0].records][-2:] == [
        "aborted, to undo all",
        "ABORTED",
    ]


def test_while_a_wave_goes_back_the_earlier_ones_can_join_it(store: FleetStore) -> None:
    room = two_waves(store)
    room.step()
    (former,) = room.open(CommandRole.UNDO).values()
    room.turn("all")
    room.step()
    assert room.open(CommandRole.UNDO).keys() == {"b0", "b1"}
    assert room.open(CommandRole.UNDO)["b1"] == former  # a board with a command gets no other
    undo_all_that_is_asked(room)
    room.until(RolloutState.ABORTED)
    assert room.states() == [BoardStage.UNDONE, BoardStage.UNDONE, BoardStage.FAILED]


def test_a_board_without_its_command_does_not_hold_up_the_undoing_of_a_wave(store: FleetStore) -> None:
    """A board that was sent its command is waited for; one whose command is only on record is not."""
    room = Room(store, spec(gates="failures<=10%"), boards=3)
    room.step()
    out = [message.payload.decode() for _ in range(2) if (message := room.sender.pop()) is not None]
    sent = [each for each in room.open().values() if each.payload in out]
    assert room.step(failed(sent[0], "engine.broken")) is RolloutState.UNDOING
    room.step()
    assert Counter(room.states()) == {BoardStage.FAILED: 1, BoardStage.SENT: 1, BoardStage.WAITING: 1}
    assert room.open().keys() == {sent[1].name}
    assert room.sent() == []
    room.step(failed(sent[1], "engine.broken"))
    room.until(RolloutState.ROLLED_BACK)


def test_a_completed_rollout_is_undone_except_on_boards_that_changed_since(store: FleetStore) -> None:
    room = Room(store, spec(soak_s=0.0), boards=3)
    room.carry_out()
    room.until(RolloutState.COMPLETED)
    room.clock.turn(61.0)  # the boards have had the time to report their engines
    room.serves({1: "e2"})
    room.turn("all")
    room.step()
    assert room.open(CommandRole.UNDO).keys() == {"b0", "b2"}
    undo_all_that_is_asked(room)
    room.until(RolloutState.ABORTED)
    assert room.states() == [BoardStage.UNDONE, BoardStage.KEPT, BoardStage.UNDONE]
    room.turn("all")  # once more: there is nothing left
    room.until(RolloutState.ABORTED)
    assert room.states() == [BoardStage.UNDONE, BoardStage.KEPT, BoardStage.UNDONE]


@pytest.mark.parametrize(("undo", "undone"), [(None, set[str]()), ("wave", {"b1"}), ("all", {"b0", "b1"})])
def test_an_abort_cancels_running_jobs_and_undoes_the_named_waves(
    store: FleetStore, undo: str | None, undone: set[str]
) -> None:
    room = two_waves(store, is_failed=False)
    order = room.open()["b2"]
    room.step(accepted(order))
    room.turn(undo)
    room.step()
    assert room.open(CommandRole.CANCEL).keys() == {"b2"}
    room.step(failed(order, "recalibration.cancelled"))
    assert room.open(CommandRole.UNDO).keys() == undone
    undo_all_that_is_asked(room)
    room.until(RolloutState.ABORTED)
    went_back = {each.name for each in room.rows() if each.state is BoardStage.UNDONE}
    assert went_back == undone


def test_a_regime_is_switched_to_and_back(store: FleetStore) -> None:
    room = Room(store, spec("regime", arguments={"regime": "e1"}), boards=2)
    room.serves({1: "e1"})
    room.step()
    assert [each.reason for each in room.rows()] == ["", "served it already"]
    room.carry_out()
    room.turn()
    room.step()
    back = room.open(CommandRole.UNDO)
    assert back.keys() == {"b0"}
    assert '"op":"switch"' in back["b0"].payload
    assert '"regime":"e0"' in back["b0"].payload
    room.step(done(back["b0"], artefact="e0"))
    room.until(RolloutState.ABORTED)
    assert room.states() == [BoardStage.UNDONE, BoardStage.KEPT]


@pytest.mark.parametrize("undo", [None, "wave"])
def test_nothing_else_can_be_done_to_what_is_over_and_that_is_said(store: FleetStore, undo: str | None) -> None:
    room = Room(store, spec(soak_s=0.0), boards=1)
    room.carry_out()
    room.until(RolloutState.COMPLETED)
    with pytest.raises(CommandError, match=r"is COMPLETED; expected RUNNING or PAUSED; .*'abort --undo all' undoes"):
        room.turn(undo)


def test_a_model_is_taken_back_without_its_file(store: FleetStore, where: str, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"a model")
    arguments, path = file_arguments_from({"file": str(file)})
    room = Room(store, spec("model", arguments=arguments, file=str(path)), boards=1)
    room.carry_out()
    file.unlink()
    with room.controllers(where, None) as (controller,):
        controller._claim()
        assert controller.rollouts == {}
        room.turn("all")
        controller._claim()
        assert controller.rollouts == {}, "it is left to others for a minute"
        room.clock.turn(61.0)
        controller._claim()
        assert controller.rollouts.keys() == {room.id}


def test_a_dry_run_shows_the_boards_that_the_next_rollout_takes(store: FleetStore) -> None:
    Room(store, spec(), boards=40)
    register, waves = RolloutRegister(store, "me"), "5,100%"
    shown = register.plan("f", spec(waves=waves, order="random"))
    again = register.plan("f", spec(waves=waves, order="random", soak_s=5.0))
    assert [each.name for each in shown[0]] == [each.name for each in again[0]]
    register.create("f", spec(), again, "")
    later = register.plan("f", spec(waves=waves, order="random"))
    assert [each.name for each in shown[0]] != [each.name for each in later[0]], "always the same boards go first"
