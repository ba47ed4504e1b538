"""Operators' commands take the broker from flags, from a configuration, or from both."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from brokers import RealBroker, eventually, on_the_air, report
from warm_start import TalkingProcess

from agent.common.errors import ConfigError
from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.mqtt.endpoint import Endpoint, TlsFiles
from fleet.cli.arguments import add_broker_options, endpoint_from, fleet_from
from fleet.cli.fleet import _print

CONFIG = """
mqtt:
  host: broker.example
  port: 8883
  fleet: north
  username: me
  password_file: secret
  tls: {ca_file: ca.pem, cert_file: me.pem, key_file: "credential:my-key"}
  transport: websockets
  protocol: 5
"""


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_broker_options(parser)
    return parser.parse_args(arguments)


@pytest.fixture(name="config")
def configuration(tmp_path: Path) -> Path:
    """One that no daemon could run with: it has only what an operator needs."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path / "config.yaml"


def test_a_configuration_says_all(config: Path) -> None:
    parsed = options("-c", str(config))
    folder = config.parent
    assert fleet_from(parsed) == "north"
    assert endpoint_from(parsed) == Endpoint(
        "broker.example",
        8883,
        username="me",
        password_file=folder / "secret",
        tls=TlsFiles(ca_file=folder / "ca.pem", cert_file=folder / "me.pem", key_file=Path("credential:my-key")),
        transport="websockets",
        protocol="5",
    )


def test_options_go_before_the_configuration(config: Path) -> None:
    parsed = options(
        *("-c", str(config), "--host", "other", "--port", "1", "--fleet", "south", "--username", "you"),
        *("--password-file", "p", "--ca-file", "other.pem"),
    )
    endpoint = endpoint_from(parsed)
    assert (endpoint.host, endpoint.port, fleet_from(parsed)) == ("other", 1, "south")
    assert (endpoint.username, endpoint.password_file) == ("you", Path("p"))
    assert endpoint.tls == TlsFiles(
        ca_file=Path("other.pem"), cert_file=config.parent / "me.pem", key_file=Path("credential:my-key")
    )


def test_tls_by_an_option() -> None:
    assert endpoint_from(options("--tls")).tls == TlsFiles()
    assert endpoint_from(options("--ca-file", "ca.pem")).tls == TlsFiles(ca_file=Path("ca.pem"))
    own = endpoint_from(options("--cert-file", "me.pem", "--key-file", "me.key")).tls
    assert own == TlsFiles(cert_file=Path("me.pem"), key_file=Path("me.key"))
    with pytest.raises(ConfigError, match="key_file: expected cert_file beside it"):
        endpoint_from(options("--key-file", "key.pem"))


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [
        (("--host", "broker.example"), True),
        (("--host", "broker.example", "--tls"), False),
        (("--host", "127.0.0.1"), False),
    ],
)
def test_a_password_that_everybody_could_read_is_warned_of(
    arguments: tuple[str, ...], warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint_from(options(*arguments, "--username", "me", "--password-file", "p"))
    assert ("crosses the network unencrypted" in " ".join(capsys.readouterr().err.split())) == warns


@pytest.mark.broker
def test_the_reader_of_a_watch_may_leave(any_broker: RealBroker) -> None:
    """As `head -1` does."""
    with (
        on_the_air(any_broker.endpoint, Topics("default", "board"), Birth(agent_version="0")) as link,
        TalkingProcess(["watch", "--port", str(any_broker.port)]) as watching,
    ):
        assert json.loads(watching.stdout.readline())["device"] == "board"
        watching.stdout.close()

        def has_ended() -> bool:
            report(link)
            return watching.poll() is not None

        eventually(has_ended)
        assert watching.stderr.read() == ""
        assert watching.returncode == 141


def test_a_merge_says_for_people_what_it_has_made(capsys: pytest.CaptureFixture[str]) -> None:
    calibration = SimpleNamespace(merged={"boards": {"a": 1, "b": 1}}, id="0123", frames=64, amax={"t": 1.0})
    merged: Any = SimpleNamespace(calibration=calibration, excluded={"c": "far away"}, distances={})
    exchange: Any = SimpleNamespace(failed={"d": "no answer"}, inbox=SimpleNamespace(counts={}))
    _print(argparse.Namespace(json=False, output=Path("fleet.json")), exchange, merged)
    assert capsys.readouterr().out.splitlines() == [
        "2 boards, 64 frames: fleet.json, 0123",
        "excluded: c: far away",
        "sent nothing: d: no answer",
    ]
