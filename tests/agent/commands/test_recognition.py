"""Commands of known senders have room of their own, for a bounded share of a core."""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager

import pytest
from authority_bench import Board, board
from brokers import RealBroker, eventually, on_the_air
from device import NOW, TOPICS
from turned_clock import TurnedClock

from agent.commands.recognition import CommandRecognition
from agent.common.timing import Backoff
from agent.contract.commands import CommandResult
from agent.contract.messages import Birth
from agent.mqtt.client import INBOX_SIZE, MqttClient
from agent.mqtt.message import Message
from agent.uplink.link import MqttLink

__all__ = ["board"]  # the fixture


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock(wall_s=NOW)


def test_only_commands_of_operators_are_recognised(board: Board, clock: TurnedClock) -> None:
    recognises = CommandRecognition(board.authority, clock)
    assert recognises(board.order())
    others = [board.order("eve"), board.order(to="fleet/other"), board.order(None)]
    for payload in [*others, board.order()[:-1], b'"signature"', bytes(1 << 20)]:
        assert not recognises(payload)


def test_a_board_without_keys_recognises_every_command(board: Board, clock: TurnedClock) -> None:
    recognises = CommandRecognition(None, clock)
    assert recognises(board.order())
    assert not recognises(b"no command")


def test_forged_signatures_take_no_more_than_their_share_of_a_core(
    board: Board, clock: TurnedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check takes 1/32 s of CPU time here: the burst lasts for four, and 0.2 s give the time for one more."""
    cpu_s = itertools.count(step=1 / 32)
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu_s))
    recognises, forged = CommandRecognition(board.authority, clock), board.order("eve")
    first, second, third = (board.order(id=f"c{number}") for number in range(3))
    assert not any(recognises(forged) for _ in range(4))
    assert not recognises(first)
    clock.turn(0.2)
    assert [recognises(second), recognises(third)] == [True, False]


def test_a_replayed_command_takes_one_place_in_any_spelling(board: Board, clock: TurnedClock) -> None:
    recognises, good = CommandRecognition(board.authority, clock), board.order()
    assert [recognises(good + b" " * spaces) for spaces in range(5)] == [True, *[False] * 4]
    assert recognises(board.order(id="c2")), "another command of the same sender"
    clock.turn(1.0)
    assert recognises(good), "its sender repeats it later"


@pytest.mark.broker
def test_a_flood_of_forged_commands_pushes_no_recognised_one_out(any_broker: RealBroker) -> None:
    with (
        on_the_air(any_broker.endpoint, TOPICS, Birth(agent_version="0"), recognise=lambda p: p[:4] == b"good") as link,
        MqttClient(any_broker.endpoint, "flood") as sender,
    ):
        eventually(lambda: link.connected)
        for number in range(INBOX_SIZE + 100):
            sender.publish(Message(TOPICS.command, b"forged %d" % number))
        for number in range(10):
            sender.publish(Message(TOPICS.command, b"good %d" % number))
        eventually(lambda: link.recognised.qsize() == 10)
        assert link.inbox.full()
        assert [link.recognised.get_nowait().payload for _ in range(10)] == [b"good %d" % n for n in range(10)]


def killed_later(broker: RealBroker) -> AbstractContextManager[MqttLink]:
    """A link whose session the next link takes over, as the next process does after a kill."""
    birth, stays_away = Birth(agent_version="0"), Backoff(60.0, 60.0)
    return on_the_air(broker.endpoint, TOPICS, birth, stays_away, recognise=lambda _: True)


@pytest.mark.broker
def test_a_command_comes_again_on_the_next_connection_until_it_is_confirmed(mosquitto: RealBroker) -> None:
    with MqttClient(mosquitto.endpoint, "once") as sender, killed_later(mosquitto) as killed:
        eventually(lambda: killed.connected)
        for number in range(3):
            sender.publish(Message(TOPICS.command, b"%d" % number))
        first, second, _ = (killed.recognised.get(timeout=60.0) for _ in range(3))
        second.confirm()  # out of order: its acknowledgement waits for the first one's
        with killed_later(mosquitto) as link:
            again = [link.recognised.get(timeout=60.0) for _ in range(3)]
            assert [held.payload for held in again] == [b"0", b"1", b"2"]
            first.confirm()  # of a connection that has ended
            for held in again[:2]:
                held.confirm()
            for number in (3, 4):
                sender.publish(Message(TOPICS.command, b"%d" % number))
                link.recognised.get(timeout=60.0)
            link.send(CommandResult(id="c1", status="SUCCEEDED"))  # goes out after the acknowledgements
            assert link.delivered_results.get(timeout=60.0) == "c1"
            with killed_later(mosquitto) as last:
                assert [last.recognised.get(timeout=60.0).payload for _ in range(3)] == [b"2", b"3", b"4"]
