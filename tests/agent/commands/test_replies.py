"""Results on the topic that a sender names (MQTT 5), and on none that could do harm."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from brokers import RealBroker, eventually, on_the_air
from device import NOW, TOPICS, Device
from kept import kept_in

from agent.commands.dispatcher import CommandDispatcher
from agent.commands.log import CommandLog
from agent.contract.commands import CommandResult
from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.message import Message, Reply
from agent.uplink.link import CommandResults
from fleet.operator import new_command

ANSWERS = "operators/ann"


def answered(broker: RealBroker, reply_to: str, listens: str) -> list[tuple[str, bytes | None]]:
    """The statuses, with their correlation, that came on the topic `listens` until the end of a command."""
    command = new_command("status", {}, time.time())
    own = TOPICS.result(command.id)
    answers: list[tuple[str, bytes | None]] = []
    with (
        on_the_air(broker.endpoint, TOPICS, Birth(agent_version="0")) as link,
        MqttClient(broker.endpoint, "ann", SessionOptions(subscriptions=[listens.format(own=own), "end"])) as ann,
    ):
        desk = CommandDispatcher(Device().handlers(), link.send, reply=link.reply)
        assert ann.wait_connected(60.0)
        eventually(lambda: link.connected)
        question = Message(TOPICS.command, command.to_json(), reply_to=reply_to.format(own=own), correlation=b"\x007")
        ann.publish(question)
        message = link.inbox.get(timeout=60.0)
        assert message.reply_to is not None
        desk.receive(message.payload, time.time(), reply=Reply(message.reply_to, message.correlation))
        link.reply(Reply("end"), CommandResult(id=command.id, status="SUCCEEDED"))
        ann.inboxes["end"].get(timeout=60.0)
        inbox = ann.inboxes[listens.format(own=own)]
        while not inbox.empty():
            message = inbox.get()
            answers.append((CommandResult.from_json(message.payload).status, message.correlation))
    return answers


@pytest.mark.broker
def test_an_answer_goes_to_the_reply_topic_with_its_correlation(mosquitto: RealBroker) -> None:
    assert answered(mosquitto, ANSWERS, ANSWERS) == [("ACCEPTED", b"\x007"), ("SUCCEEDED", b"\x007")]


def test_a_command_that_a_kill_interrupted_is_answered_on_its_reply_topic(tmp_path: Path) -> None:
    """Of a command that was under way when the process was killed."""
    first, answers = desk_of(tmp_path)
    command = new_command("recalibrate", {}, NOW)
    first.receive(command.to_json(), NOW, reply=Reply(ANSWERS, b"7"))
    assert [result.status for _, result in answers] == ["ACCEPTED"]
    second, answers = desk_of(tmp_path)
    second.restore([], [])
    assert [(reply, result.status) for reply, result in answers] == [(Reply(ANSWERS, b"7"), "FAILED")]


def desk_of(folder: Path) -> tuple[CommandDispatcher, list[tuple[Reply, CommandResult]]]:
    """A desk of a process of its own, and what it answers where its senders want it."""
    answers: list[tuple[Reply, CommandResult]] = []
    log = CommandLog(kept_in(folder))
    desk = CommandDispatcher(
        Device().handlers(), lambda _: None, command_log=log, reply=lambda *answered: answers.append(answered)
    )
    return desk, answers


def test_no_reply_goes_to_the_topics_of_home_assistant() -> None:
    results = CommandResults(TOPICS, "smart/house")
    for topic in ("smart/house/device/x/config", "homeassistant/device/x/config", "smart/houses"):
        results.add_reply(Reply(topic), CommandResult(id="c1", status="SUCCEEDED"))
    message = results.pop()
    assert message is not None
    assert (message.topic, len(results)) == ("smart/houses", 0)


@pytest.mark.broker
@pytest.mark.parametrize("topic", [Topics("fleet", "other").command, TOPICS.ack, "homeassistant/device/x/config"])
def test_no_reply_goes_to_a_topic_with_a_meaning(mosquitto: RealBroker, topic: str) -> None:
    assert answered(mosquitto, topic, topic) == []
