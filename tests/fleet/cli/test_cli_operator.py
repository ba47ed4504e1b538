"""Commands of an operator: keys, releases, commands with progress, and watching devices."""

from __future__ import annotations

import io
import json
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from brokers import RealBroker, free_port, on_the_air
from device import TOPICS
from rich.console import Console

from agent.common.errors import AgentError
from agent.contract.commands import Release
from agent.contract.messages import Birth
from agent.contract.signing import Keyring
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.receive_queue import Arrival
from fleet.cli.main import main
from fleet.operator import new_command
from fleet.views import watch as watching


def test_keys_are_made_and_sign_a_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", str(tmp_path / "maker"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert stat.S_IMODE(Path(made["private"]).stat().st_mode) == 0o600
    model, statement = tmp_path / "model.onnx", tmp_path / "release.json"
    model.write_bytes(b"a model")
    arguments = [
        "release",
        str(model),
        "--key",
        made["private"],
        "--version",
        "3",
        "--expires",
        "2",
        "--product",
        "gate",
    ]
    assert main([*arguments, "-o", str(statement)]) == 0
    document = json.loads(statement.read_text())
    assert Keyring([Path(made["public"])]).signer_id(document) == made["id"]
    release = Release.model_validate(document)
    assert (release.size, release.version, release.name, release.product) == (7, 3, "model.onnx", "gate")
    assert release.expires - release.issued == pytest.approx(2 * 86_400.0)


def test_a_key_that_cannot_have_its_other_half_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bob.pub").write_text("of another bob")
    assert main(["keys", "new", str(tmp_path / "bob")]) == 2
    assert "key.exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bob.pub"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["keys", "new", "{}/maker"], "key.exists"),
        (["watch", "--fleet", "#"], "mqtt.name"),
        (["release", "{}/model.onnx", "--key", "{}/maker.pub", "--version", "1"], "key.mode"),
        (["release", "{}/none.onnx", "--key", "{}/maker.key", "--version", "1"], "command.args"),
        (["release", "{}/model.onnx", "--key", "{}/maker.key", "--version", "0"], "cli.arguments"),
        (["release", "{}/model.onnx", "--key", "{}/maker.key", "--version", "1", "-o", "{}/no/where"], "release.write"),
        (["send", "board", "model", "file={}/none.onnx"], "command.args"),
        (["send", "board", "model"], "command.args"),
        (["send", "board", "status", "-o", "{}/now.jpg"], "cli.arguments"),
        (["send", "board", "snapshot", "-o", "{}/no/now.jpg"], "snapshot.write"),
        (["send", "board", "set", "log_level=debug", "--sign", "{}/none.key"], "key.unreadable"),
    ],
)
def test_an_impossible_command_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str
) -> None:
    main(["keys", "new", str(tmp_path / "maker")])
    (tmp_path / "model.onnx").write_bytes(b"a model")
    assert main([each.format(tmp_path) for each in arguments]) == 2
    assert f"error: {code}" in capsys.readouterr().err


def test_values_of_set_are_read_as_json() -> None:
    typed = {"recalibration.max_loss": "0.2", "recalibration.automatic": "false", "log_level": "debug", "x": "null"}
    command = new_command("set", typed, 1000.5)
    values = {"recalibration.max_loss": 0.2, "recalibration.automatic": False, "log_level": "debug", "x": None}
    assert json.loads(command.to_json())["args"] == {"values": values}
    assert command.version == 1_000_500, "one that rises by itself"
    assert new_command("set", typed, 1.0, version=7).version == 7


class Ended:
    """Of a watch: once so many lines were written."""

    def __init__(self, lines: int) -> None:
        self.stream = io.StringIO()
        self._lines = lines
        self._give_up_s = time.monotonic() + 10.0

    def __call__(self) -> bool:
        assert time.monotonic() < self._give_up_s, self.stream.getvalue()
        return self.stream.getvalue().count("\n") >= self._lines


@pytest.mark.broker
def test_devices_are_watched_as_lines_of_json(any_broker: RealBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_the_air(any_broker.endpoint, TOPICS, Birth(agent_version="0")):
        ended = Ended(2)
        monkeypatch.setattr(sys, "stdout", ended.stream)
        watching.watch(any_broker.endpoint, TOPICS.fleet, frozenset({TOPICS.device}), as_json=True, ended=ended)
    lines: list[dict[str, Any]] = [json.loads(line) for line in ended.stream.getvalue().splitlines()]
    assert {line["device"] for line in lines} == {"board"}
    assert {line["topic"] for line in lines} == {"status", "birth"}
    assert next(line for line in lines if line["topic"] == "birth")["agent_version"] == "0"


def test_a_table_has_a_row_for_each_device_whatever_they_send() -> None:
    known: dict[str, watching.WatchedDevice] = {}
    for name, kind, document in [
        ("a", "status", {"state": "online"}),
        ("a", "birth", {"engine": "0123456789abcdef"}),
        ("a", "telemetry", {"cameras": {"c": {"fps": 9.96, "latency_ms": {"p50": 1.5}, "fidelity": {"estimate": 1}}}}),
        ("a", "event", {"kind": "job", "trigger": "alarm", "step": "BUILDING"}),
        ("b", "status", {"state": "[bold]\x1b[2J"}),
        ("b", "telemetry", {"cameras": {"c": {"fps": "fast", "latency_ms": [1], "drift": 7}}}),
        ("c", "telemetry", {"cameras": [1]}),
        ("c", "birth", {"engine": ["x"]}),
    ]:
        message = Arrival(f"tared/v1/fleet/{name}/{kind}".encode(), json.dumps(document).encode())
        watching._receive(message, "fleet", frozenset({"a", "b", "c"}), known, None)
    shown = Console(file=(text := io.StringIO()), width=200, force_terminal=False)
    shown.print(watching._table(known, 200))
    rows = text.getvalue()
    for words in ("online", "0123456789abcdef", "9.96", "1.5", "job alarm BUILDING"):
        assert words in rows
    assert "\x1b[2J" not in rows


def test_foreign_messages_are_passed_over() -> None:
    known: dict[str, watching.WatchedDevice] = {}
    for name, payload in (("a", b"no JSON"), ("other", b"{}")):
        watching._receive(
            Arrival(f"tared/v1/fleet/{name}/status".encode(), payload), "fleet", frozenset("a"), known, None
        )
    assert known == {}


def test_a_watch_without_a_broker_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_CONNECT_S", 0.2)
    with pytest.raises(AgentError, match=r"broker\.unreachable"):
        watching.watch(Endpoint("127.0.0.1", free_port()), "default")
