"""Commands over the wire: from the operator's keyboard to the device and back."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
from brokers import RealBroker, Watcher, free_port, on_the_air
from device import NOW, TOPICS, Device
from operator_bench import send

from agent.commands.dispatcher import CommandDispatcher, CommandProgress
from agent.common.errors import AgentError, CommandError
from agent.contract.commands import CommandResult, RecalibrateArgs
from agent.contract.messages import Birth
from agent.mqtt.client import Endpoint, MqttClient
from agent.mqtt.message import Message
from agent.uplink.link import MqttLink
from fleet import operator


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
def test_an_unacceptable_command_is_not_sent(op: str, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        operator.new_command(op, arguments, NOW)


@pytest.mark.parametrize(
    ("op", "typed", "sent"),
    [
        ("recalibrate", {"frames": "64", "max_loss": "0.1"}, {"frames": 64, "max_loss": 0.1}),
        ("policy", {"artefact": "a", "classes": "car, bus"}, {"artefact": "a", "classes": ["car", "bus"]}),
        (
            "policy",
            {"artefact": "a", "masks": "[[[0,0],[1,0],[1,1]]]"},
            {"artefact": "a", "masks": [[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]]},
        ),
        ("set", {"log_level": "info", "threads": "2"}, {"values": {"log_level": "info", "threads": 2}}),
        ("snapshot", {"annotated": "true"}, {"annotated": True}),
        ("model", {"sha256": "ab" * 32, "size": 5, "accept": "true"}, {"sha256": "ab" * 32, "size": 5, "accept": True}),
        ("histograms", {"upload": "ab" * 32, "missing": [0]}, {"upload": "ab" * 32, "missing": [0]}),
    ],
)
def test_typed_arguments_are_read_by_the_ops_own_types(op: str, typed: dict[str, Any], sent: dict[str, Any]) -> None:
    assert operator.new_command(op, typed, NOW).args.model_dump(exclude_unset=True) == sent


@pytest.mark.broker
def test_a_snapshot_is_the_picture_of_its_own_result(any_broker: RealBroker) -> None:
    """Another operator's picture, and what is none, are passed over; one that does not come is an error."""
    mine = CommandResult(id="c1", status="SUCCEEDED", result={"bytes": 7, "width": 1, "height": 1})
    with (
        operator.receive_snapshots(any_broker.endpoint, TOPICS, 1.0) as receive,
        MqttClient(any_broker.endpoint, "board") as board,
    ):
        assert board.wait_connected(10.0)
        for picture in (b"\xff\xd8\xff of another", b"no JPEG", b"\xff\xd8\xffmine"):
            board.publish(Message(TOPICS.snapshot, picture))
        assert receive(mine) == b"\xff\xd8\xffmine"
        with pytest.raises(CommandError, match=r"command\.no_picture: no picture on .+ expected a JPEG of 7 bytes"):
            receive(mine)


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
            desk = CommandDispatcher(self.device.handlers(), link.send)
            while not self._stopping.is_set():
                self._turn(link, desk)

    def _turn(self, link: MqttLink, desk: CommandDispatcher) -> None:
        try:
            message = link.inbox.get(timeout=0.05)
        except queue.Empty:
            for _args, report in self.device.jobs:
                self._advance(report)
        else:
            desk.receive(message.payload, time.time(), message.retain)

    @staticmethod
    def _advance(report: CommandProgress) -> None:
        percent = report.latest.percent or 0.0
        if percent < 100.0:
            report.update("observing", percent + 50.0)
        else:
            report.succeed({"artefact": "abc"})


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
        watcher.expect(TOPICS.command, id=command.id)  # the first went to no subscriber
        with Supervisor(broker.endpoint):
            sender.join()
    assert [result.status for result in results] == ["ACCEPTED", "SUCCEEDED"]


def test_a_command_without_a_broker_fails_with_the_reason() -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    command = operator.new_command("status", {}, time.time())
    with pytest.raises(AgentError, match=r"broker\.unreachable: .*refused"):
        list(send(endpoint, command, silence_s=0.3))
