"""Commands over the wire where others may publish, too: what a stranger says ends none of an operator's."""

from __future__ import annotations

import json
import queue
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from brokers import RealBroker, eventually
from device import TOPICS
from operator_bench import quick_repeats, send

from agent.common.errors import CommandError
from agent.contract.commands import Command, CommandResult, Failure
from agent.contract.signing import Signer, new_key
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.message import Message
from fleet import operator

__all__ = ["quick_repeats"]  # the fixture


class Stranger:
    """A client that publishes on the topics of results, in the device's place."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = MqttClient(
            endpoint, "stranger", SessionOptions(subscriptions=[TOPICS.command, TOPICS.model_chunks])
        )

    def __enter__(self) -> Stranger:
        self._client.__enter__()
        assert self._client.wait_connected(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def received(self, within_s: float = 10.0) -> Message:
        return self._client.inboxes[TOPICS.command].get(timeout=within_s)

    def chunks(self) -> int:
        return self._client.inboxes[TOPICS.model_chunks].qsize()

    def say(self, command: Command, payload: bytes) -> None:
        self._client.publish(Message(TOPICS.result(command.id), payload))


@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
def test_a_command_expires_at_the_broker_too_and_is_answered_on_its_own_topic(mosquitto: RealBroker) -> None:
    command = operator.new_command("status", {}, time.time(), valid_s=30.0)
    sender = threading.Thread(target=lambda: list(send(mosquitto.endpoint, command)))
    with Stranger(mosquitto.endpoint) as stranger:
        sender.start()
        first, again = stranger.received(), stranger.received()
        stranger.say(command, CommandResult(id=command.id, status="SUCCEEDED").to_json())
        sender.join()
    for message in (first, again):
        assert message.expires_s is not None
        assert 20 <= message.expires_s <= 30
        assert message.reply_to is None


@pytest.mark.broker
def test_a_strangers_message_ends_no_command(mosquitto: RealBroker, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"x" * 100)
    command = operator.new_command("model", operator.file_arguments(file), time.time())
    results: list[CommandResult] = []
    sending = operator.send(mosquitto.endpoint, TOPICS, command, 10.0, file=file)
    sender = threading.Thread(target=lambda: results.extend(sending))
    with Stranger(mosquitto.endpoint) as stranger:
        sender.start()
        stranger.received()
        stranger.say(command, b"no document")
        for first in (2**63, 10**30, -1, True, 0):
            receiving = {"id": command.id, "status": "IN_PROGRESS", "step": "RECEIVING", "result": {"next": first}}
            stranger.say(command, json.dumps(receiving).encode())
        stranger.say(command, CommandResult(id=command.id, status="SUCCEEDED").to_json())
        sender.join()
        eventually(lambda: stranger.chunks() == 1)
    assert results[-1].status == "SUCCEEDED"


def signed(endpoint: Endpoint, folder: Path, results: list[CommandResult]) -> tuple[Command, threading.Thread]:
    """A command that Ann has signed, and the thread that sends it and fills `results`, to be started."""
    signer = Signer(new_key(folder / "ann")[0])
    command = operator.new_command("status", {}, time.time(), to=TOPICS)
    sending = operator.send(endpoint, TOPICS, command, 10.0, signer)
    return command, threading.Thread(target=lambda: results.extend(sending))


def refused(command: Command, code: str) -> bytes:
    error = Failure(code=code, message="refused")
    return CommandResult(id=command.id, status="REJECTED", error=error).to_json()


@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
@pytest.mark.parametrize("code", ["command.unsigned", "command.signature", "message.malformed"])
def test_a_refusal_that_anybody_can_provoke_ends_no_signed_command(
    mosquitto: RealBroker, tmp_path: Path, code: str
) -> None:
    """A forged command under its id is refused, before and after the device has seen the true one."""
    results: list[CommandResult] = []
    command, sender = signed(mosquitto.endpoint, tmp_path, results)
    with Stranger(mosquitto.endpoint) as stranger:
        sender.start()
        stranger.received()
        for _ in range(3):
            stranger.say(command, refused(command, code))
        stranger.received()
        stranger.say(command, CommandResult(id=command.id, status="SUCCEEDED").to_json())
        sender.join()
    assert [result.status for result in results] == ["SUCCEEDED"]


@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
def test_a_device_that_knows_another_key_is_believed_in_the_end(mosquitto: RealBroker, tmp_path: Path) -> None:
    results: list[CommandResult] = []
    command, sender = signed(mosquitto.endpoint, tmp_path, results)
    with Stranger(mosquitto.endpoint) as stranger:
        sender.start()
        while sender.is_alive():
            with suppress(queue.Empty):
                stranger.received(0.1)
                stranger.say(command, refused(command, "command.signature"))
        sender.join()
    (result,) = results
    assert result.error is not None
    assert result.error.code == "command.signature"


@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
def test_noise_does_not_pass_for_a_device_that_works(mosquitto: RealBroker) -> None:
    command = operator.new_command("status", {}, time.time())
    noisy = threading.Event()
    with Stranger(mosquitto.endpoint) as stranger:

        def noise() -> None:
            while not noisy.wait(0.02):
                stranger.say(command, b"no document")

        thread = threading.Thread(target=noise)
        thread.start()
        try:
            with pytest.raises(CommandError, match=r"command\.no_answer"):
                list(send(mosquitto.endpoint, command, silence_s=0.5))
        finally:
            noisy.set()
            thread.join()
