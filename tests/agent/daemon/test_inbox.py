"""Messages to a board on its own topics, and its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, on_the_air
from device import TOPICS, Device
from kept import kept_in
from turned_clock import TurnedClock
from unexpected import unexpected

from agent.camera.config import CameraConfig
from agent.commands.authority import Authority, Releases
from agent.commands.deliveries import FileReceiver, ModelAdmission
from agent.commands.labels import LabelsInbox
from agent.commands.log import CommandLog
from agent.commands.settings import Settings
from agent.config import CommandsConfig, Config
from agent.contract.commands import Reported
from agent.contract.messages import Birth
from agent.contract.signing import Signer, new_key
from agent.daemon.inbox import CommandInbox
from agent.monitoring.accuracy import LiveAccuracy
from agent.mqtt.message import Message
from agent.uplink.link import MqttLink
from agent.uplink.reporter import Reporter
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task


class Board:
    """The board's end of the link, as the supervisor has it. keys: whether it has an operator's key."""

    def __init__(self, folder: Path, link: MqttLink, keys: bool) -> None:
        self.synchronised, self.clock = True, TurnedClock()
        private, public, _ = new_key(folder / "ann")
        self.signer = Signer(private)
        commands = CommandsConfig(operator_keys=(public,) if keys else ())
        authority = Authority(commands, TOPICS, not keys, lambda: self.synchronised)
        model = ModelSpec(path=folder / "model.onnx", task="raw")
        config = Config(model=model, camera=CameraConfig(source="v4l2:/dev/video0"), state_dir=folder)
        reporter = Reporter(link, Birth(agent_version="0"))
        state = kept_in(folder, reporter.error)
        self.settings = Settings(config, state, authority.trusts, lambda _: self.inbox.report())
        releases = Releases(authority, state)
        admit = ModelAdmission(model.path, False, 0, releases)
        delivery = FileReceiver(folder / "incoming", 0, lambda _: None, admit, unexpected)
        labels = LabelsInbox(
            {"front": LiveAccuracy(open_task(model).labels)}, model, lambda error, _: unexpected(error)
        )
        handlers = Device().handlers()
        self.inbox = CommandInbox(link, handlers, self.settings, (delivery,), labels, authority, reporter, self.clock)

    def document(self, version: int, **values: Any) -> dict[str, Any]:
        """Return a document `desired` that expires in a minute."""
        return {"version": version, "values": values, "to": "fleet/board", "expires": self.clock.wall_s() + 60.0}


@pytest.fixture
def link(mosquitto: RealBroker) -> Iterator[MqttLink]:
    with on_the_air(mosquitto.endpoint, TOPICS, Birth(agent_version="0")) as link:
        yield link


@pytest.mark.broker
def test_a_document_that_is_not_admitted_leaves_the_retained_report_alone(
    tmp_path: Path, link: MqttLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board, sent = Board(tmp_path, link, keys=True), list[Reported]()
    monkeypatch.setattr(link, "send", sent.append)  # the broker keeps only the newest of retained messages

    def desired(version: int, signed: bool, **values: Any) -> Message:
        document = board.document(version, **values)
        return Message(TOPICS.desired, json.dumps(board.signer.sign(document) if signed else document).encode())

    for message in (
        desired(3, False, log_level="debug"),
        Message(TOPICS.desired, b"no document"),
        desired(1, True, log_level="debug"),
        desired(2, True, threads=4),
    ):
        link.desired.put(message)
    board.inbox.tick()
    assert [(each.version, each.error.code if each.error else "") for each in sent] == [(1, ""), (1, "command.set")]
    assert caplog.text.count("desired=not_admitted") == 2


@pytest.mark.broker
def test_a_document_that_holds_has_not_expired(
    tmp_path: Path, link: MqttLink, caplog: pytest.LogCaptureFixture
) -> None:
    """It is retained, and comes again with every connection."""
    board = Board(tmp_path, link, keys=True)
    document = board.document(1, log_level="debug")
    link.desired.put(Message(TOPICS.desired, json.dumps(board.signer.sign(document)).encode()))
    board.inbox.tick()
    late = board.signer.sign({**document, "expires": board.clock.wall_s() - 1.0})
    link.desired.put(Message(TOPICS.desired, json.dumps(late).encode(), retain=True))
    board.inbox.tick()
    assert board.settings.version == 1
    assert "desired=" not in caplog.text


@pytest.mark.broker
def test_delivered_results_are_written_in_batches(
    tmp_path: Path, link: MqttLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick must not be as long as the backlog, nor a transaction be for one row."""
    board, batches = Board(tmp_path, link, keys=False), list[int]()
    delivered = CommandLog.mark_delivered

    def counted(journal: CommandLog, ids: list[str]) -> None:
        batches.append(len(ids))
        delivered(journal, ids)

    monkeypatch.setattr(CommandLog, "mark_delivered", counted)
    for number in range(150):
        link.delivered_results.put(f"x{number}")
    for _ in range(3):
        board.inbox.tick()
    assert batches == [100, 50]


@pytest.mark.broker
def test_a_document_that_came_before_the_board_knew_the_time_is_taken_once_it_does(
    tmp_path: Path, link: MqttLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A board without a clock of its own: the broker is there ten seconds before the time server has answered."""
    board, sent = Board(tmp_path, link, keys=True), list[Reported]()
    monkeypatch.setattr(link, "send", sent.append)
    board.synchronised = False
    document = board.document(1, log_level="debug")
    link.desired.put(Message(TOPICS.desired, json.dumps(board.signer.sign(document)).encode(), retain=True))
    board.inbox.tick()
    board.clock.turn(5.0)
    link.desired.put(Message(TOPICS.desired, json.dumps({**document, "values": {}}).encode()))  # not signed
    board.inbox.tick()
    assert [each.error.code if each.error else "" for each in sent] == ["command.clock"]
    board.synchronised = True
    board.inbox.tick()
    assert sent[1:] == []
    board.clock.turn(5.0)
    board.inbox.tick()
    assert [(each.version, each.error) for each in sent[1:]] == [(1, None)]
