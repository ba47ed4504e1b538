"""Commands of known senders have room of their own, for a bounded share of a core."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager

import pytest
from authority_bench import Board, board
from brokers import RealBroker, eventually, on_the_air
from device import TOPICS

from agent.commands import recognition
from agent.commands.recognition import CommandRecognition
from agent.common.timing import Backoff
from agent.contract.messages import Birth
from agent.mqtt.client import INBOX_SIZE, MqttClient
from agent.mqtt.message import Message
from agent.uplink.link import MqttLink

__all__ = ["board"]  # the fixture


def signed_today(board: Board, key: str = "ann", **fields: object) -> bytes:
    now = time.time()
    return board.order(key, **{"issued": now, "expires": now + 60.0, **fields})


def test_an_operators_command_is_recognised_and_nobody_elses(board: Board) -> None:
    recognises = CommandRecognition(board.authority)
    assert recognises(signed_today(board))
    unsigned = {key: value for key, value in json.loads(signed_today(board)).items() if key != "signature"}
    others = [signed_today(board, "eve"), signed_today(board, to="fleet/other"), json.dumps(unsigned).encode()]
    for payload in [*others, signed_today(board)[:-1], b'"signature"', bytes(1 << 20)]:
        assert not recognises(payload)


def test_a_board_that_admits_everybody_recognises_what_is_a_command(board: Board) -> None:
    recognises = CommandRecognition(None)
    assert recognises(signed_today(board))
    assert not recognises(b"no command")


def test_forged_signatures_take_no_more_than_their_share_of_the_time(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recognition, "_BURST_S", 0.02)
    recognises = CommandRecognition(board.authority)
    *many, good = (signed_today(board) for _ in range(21))
    forged = signed_today(board, "eve")
    begun_s, spent_s = time.monotonic(), time.thread_time()
    while time.monotonic() < begun_s + 1.0:
        recognises(forged)
        time.sleep(0.0)
    passed = sum(recognises(forged) for _ in range(1000))
    assert passed == 0
    assert not all(recognises(each) for each in many), "its share is used up; on a busy machine it is back at once"
    assert time.thread_time() - spent_s < 0.8, "most calls cost next to nothing"
    time.sleep(0.2)
    assert recognises(good), "the share of a quiet moment"


def test_a_command_that_is_replayed_takes_one_place_however_it_is_spelt(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    recognises, good = CommandRecognition(board.authority), signed_today(board)
    assert [recognises(good + b" " * spaces) for spaces in range(5)] == [True, *[False] * 4]
    assert recognises(signed_today(board)), "another command of the same sender"
    monkeypatch.setattr(recognition, "_AGAIN_S", 0.0)
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
    """The next one takes its session over, as the next process after a kill does."""
    birth, stays_away = Birth(agent_version="0"), Backoff(60.0, 60.0)
    return on_the_air(broker.endpoint, TOPICS, birth, stays_away, recognise=lambda _: True)


@pytest.mark.broker
def test_a_command_comes_again_on_the_next_connection_until_it_is_confirmed(mosquitto: RealBroker) -> None:
    with MqttClient(mosquitto.endpoint, "once") as sender, killed_later(mosquitto) as killed:
        eventually(lambda: killed.connected)
        for number in range(3):
            sender.publish(Message(TOPICS.command, b"%d" % number))
        first, second, _ = (killed.recognised.get(timeout=10.0) for _ in range(3))
        second.confirm()  # out of order: its acknowledgement waits for the first one's
        with killed_later(mosquitto) as link:
            again = [link.recognised.get(timeout=10.0) for _ in range(3)]
            assert [held.payload for held in again] == [b"0", b"1", b"2"]
            first.confirm()  # of a connection that has ended
            for held in again[:2]:
                held.confirm()
            for number in (3, 4):  # the acknowledgements are sent in the turn that reads the first one, or before
                sender.publish(Message(TOPICS.command, b"%d" % number))
                link.recognised.get(timeout=10.0)
            with killed_later(mosquitto) as last:
                assert [last.recognised.get(timeout=10.0).payload for _ in range(3)] == [b"2", b"3", b"4"]
