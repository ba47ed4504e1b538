"""Commands over the wire: from the operator's keyboard to the device and back."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from brokers import RealBroker, Watcher, eventually, free_port, on_the_air
from device import NOW, TOPICS, Device, payload

from agent.commands import CommandDesk, Report
from agent.errors import AgentError, CommandError
from agent.link import MqttLink
from agent.messages import Birth
from agent.mqtt import Endpoint, MqttClient
from agent.publishing import Message
from agent.requests import Command, CommandResult, Failure, RecalibrateArgs
from agent.signing import Signer, new_key
from agent.wire import MAX_PAYLOAD_BYTES
from fleet import operator


def test_what_is_typed_becomes_a_typed_command() -> None:
    command = operator.new_command("recalibrate", {"frames": "512", "method": "mse"}, NOW, valid_s=30.0)
    assert command.args == RecalibrateArgs(frames=512, method="mse")
    assert (command.issued, command.expires, command.version) == (NOW, NOW + 30.0, 1)
    assert command.id != operator.new_command("status", {}, NOW).id


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("dance", {}, "expected one of status, recalibrate, rollback"),
        ("recalibrate", {"frames": "many"}, "frames='many'"),
        ("recalibrate", {"frames": "0"}, "frames='0'"),
        ("recalibrate", {"frames": "10001"}, "frames='10001'"),
        ("recalibrate", {"speed": "1"}, r"expected frames=\.\.\., method=\.\.\."),
        ("status", {"x": "1"}, "expected no arguments"),
    ],
)
def test_what_no_device_would_accept_is_not_sent(op: str, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        operator.new_command(op, arguments, NOW)


class Supervisor:
    """The device's main loop, in a thread: drains the inbox and advances one job per turn."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.device = Device()
        self._endpoint = endpoint
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with on_the_air(self._endpoint, TOPICS, Birth(agent_version="0")) as link:
            desk = CommandDesk(self.device.handlers(), link.send)
            while not self._stopping.is_set():
                self._turn(link, desk)

    def _turn(self, link: MqttLink, desk: CommandDesk) -> None:
        try:
            message = link.inbox.get(timeout=0.05)
        except queue.Empty:
            for _args, report in self.device.jobs:
                self._advance(report)
        else:
            desk.receive(message.payload, time.time(), message.retain)

    @staticmethod
    def _advance(report: Report) -> None:
        percent = report.latest.percent or 0.0
        if percent < 100.0:
            report.progress("observing", percent + 50.0)
        else:
            report.succeed({"artefact": "abc"})


@pytest.fixture
def quick_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "REPEAT_S", 0.1)


def send(endpoint: Endpoint, command: Command, silence_s: float = 10.0) -> Iterator[CommandResult]:
    return operator.send(endpoint, TOPICS, command, silence_s)


@pytest.mark.broker
def test_a_command_makes_the_round_trip(broker: RealBroker) -> None:
    with Supervisor(broker.endpoint) as supervisor:
        command = operator.new_command("recalibrate", {"frames": "64"}, time.time())
        results = list(send(broker.endpoint, command))
    assert [(result.status, result.percent) for result in results] == [
        ("ACCEPTED", None),
        ("IN_PROGRESS", 50.0),
        ("IN_PROGRESS", 100.0),
        ("SUCCEEDED", None),
    ]
    assert supervisor.device.jobs[0][0] == RecalibrateArgs(frames=64)


@pytest.mark.broker
def test_a_command_sent_again_and_again_is_carried_out_once(broker: RealBroker) -> None:
    command = operator.new_command("status", {}, time.time())
    with Supervisor(broker.endpoint) as supervisor:
        assert [result.status for result in send(broker.endpoint, command)] == ["ACCEPTED", "SUCCEEDED"]
        for _ in range(3):
            assert [result.status for result in send(broker.endpoint, command)] == ["SUCCEEDED"]
        assert supervisor.device.status_calls == 1


@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
def test_a_device_that_was_away_gets_the_repeated_command(broker: RealBroker) -> None:
    command = operator.new_command("status", {}, time.time())
    results: list[CommandResult] = []
    sender = threading.Thread(target=lambda: results.extend(send(broker.endpoint, command)))
    with Watcher(broker.endpoint) as watcher:
        sender.start()
        watcher.expect(TOPICS.command, id=command.id)
        watcher.expect(TOPICS.command, id=command.id)  # nobody heard the first
        with Supervisor(broker.endpoint):
            sender.join()
    assert [result.status for result in results] == ["ACCEPTED", "SUCCEEDED"]


@pytest.mark.broker
def test_bad_commands_are_answered_over_the_wire(broker: RealBroker) -> None:
    expired = operator.new_command("status", {}, time.time() - 3600)
    bad = {
        "c1": b'{"id": "c1", "op": "status", ',
        "c2": payload(id="c2", op="dance"),
        "c3": b'{"id": "c3", "args": ' + b"[" * 60_000,
        "c4": b'{"id": "c4", "pad": "' + b"x" * MAX_PAYLOAD_BYTES + b'"}',
    }
    with (
        Supervisor(broker.endpoint) as supervisor,
        Watcher(broker.endpoint) as watcher,
        MqttClient(broker.endpoint, "sender") as sender,
    ):
        watcher.retained(TOPICS.status)
        for command_id, command in bad.items():
            sender.publish(Message(TOPICS.command, command))
            watcher.expect(TOPICS.result(command_id), status="REJECTED")
        (result,) = send(broker.endpoint, expired)
        assert result.status == "EXPIRED"
        (result,) = send(broker.endpoint, operator.new_command("status", {}, time.time(), valid_s=0.0))
        assert result.status == "EXPIRED"
    assert supervisor.device.status_calls == 0


@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
def test_a_silent_device_is_named(any_broker: RealBroker) -> None:
    command = operator.new_command("status", {}, time.time())
    with pytest.raises(CommandError, match=r"command\.no_answer: no answer from fleet/board") as caught:
        list(send(any_broker.endpoint, command, silence_s=0.3))
    assert "tared watch board" in caught.value.remedy


def test_an_operator_without_a_broker_is_told_why() -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    command = operator.new_command("status", {}, time.time())
    with pytest.raises(AgentError, match=r"broker\.unreachable: .*refused"):
        list(send(endpoint, command, silence_s=0.3))


@pytest.mark.broker
def test_a_retained_command_is_rejected_as_stale(any_broker: RealBroker) -> None:
    command = operator.new_command("status", {}, time.time())
    with (
        Watcher(any_broker.endpoint) as watcher,
        MqttClient(any_broker.endpoint, "sender") as sender,
    ):
        sender.publish(Message(TOPICS.command, command.to_json(), retain=True))
        watcher.expect(TOPICS.command, id=command.id)
        with Supervisor(any_broker.endpoint) as supervisor:
            result = watcher.expect(TOPICS.result(command.id), status="REJECTED")
            assert result["error"]["code"] == "command.retained"
    assert supervisor.device.status_calls == 0


class Stranger:
    """Whoever may publish on the topics of results, in the device's place."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = MqttClient(endpoint, "stranger", subscriptions=[TOPICS.command, TOPICS.model_chunks])

    def __enter__(self) -> Stranger:
        self._client.__enter__()
        assert self._client.wait_connected(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def heard(self, within_s: float = 10.0) -> Message:
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
        first, again = stranger.heard(), stranger.heard()
        stranger.say(command, CommandResult(id=command.id, status="SUCCEEDED").to_json())
        sender.join()
    for message in (first, again):
        assert message.expires_s is not None
        assert 20 <= message.expires_s <= 30
        assert message.reply_to is None


@pytest.mark.broker
def test_what_a_stranger_says_ends_no_command(mosquitto: RealBroker, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"x" * 100)
    command = operator.new_command("model", operator.model_arguments(file), time.time())
    results: list[CommandResult] = []
    sending = operator.send(mosquitto.endpoint, TOPICS, command, 10.0, model=file)
    sender = threading.Thread(target=lambda: results.extend(sending))
    with Stranger(mosquitto.endpoint) as stranger:
        sender.start()
        stranger.heard()
        stranger.say(command, b"no document")
        for first in (2**63, 10**30, -1, True, 0):
            receiving = {"id": command.id, "status": "IN_PROGRESS", "step": "RECEIVING", "result": {"next": first}}
            stranger.say(command, json.dumps(receiving).encode())
        stranger.say(command, CommandResult(id=command.id, status="SUCCEEDED").to_json())
        sender.join()
        eventually(lambda: stranger.chunks() == 1)
    assert results[-1].status == "SUCCEEDED"


def refused(command: Command, code: str) -> bytes:
    error = Failure(code=code, message="refused")
    return CommandResult(id=command.id, status="REJECTED", error=error).to_json()


@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
@pytest.mark.parametrize("code", ["command.unsigned", "command.signature", "message.malformed"])
def test_a_refusal_that_anybody_can_provoke_ends_no_signed_command(
    mosquitto: RealBroker, tmp_path: Path, code: str
) -> None:
    """Who publishes its id with other words has it refused, whether the device has seen the true one yet or not."""
    signer = Signer(new_key(tmp_path / "ann")[0])
    command = operator.new_command("status", {}, time.time(), to=TOPICS)
    results: list[CommandResult] = []
    sending = operator.send(mosquitto.endpoint, TOPICS, command, 10.0, signer)
    sender = threading.Thread(target=lambda: results.extend(sending))
    with Stranger(mosquitto.endpoint) as stranger:
        sender.start()
        stranger.heard()
        for _ in range(3):
            stranger.say(command, refused(command, code))
        stranger.heard()
        stranger.say(command, CommandResult(id=command.id, status="SUCCEEDED").to_json())
        sender.join()
    assert [result.status for result in results] == ["SUCCEEDED"]


@pytest.mark.broker
@pytest.mark.usefixtures("quick_repeats")
def test_a_device_that_knows_another_key_is_believed_in_the_end(mosquitto: RealBroker, tmp_path: Path) -> None:
    signer = Signer(new_key(tmp_path / "ann")[0])
    command = operator.new_command("status", {}, time.time(), to=TOPICS)
    results: list[CommandResult] = []
    sending = operator.send(mosquitto.endpoint, TOPICS, command, 10.0, signer)
    sender = threading.Thread(target=lambda: results.extend(sending))
    with Stranger(mosquitto.endpoint) as stranger:
        sender.start()
        while sender.is_alive():
            with suppress(queue.Empty):
                stranger.heard(0.1)
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
