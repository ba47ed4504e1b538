"""The operator's side of the MQTT contract: `tared send`, and how its commands are told which broker to use."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import command, number

if TYPE_CHECKING:  # imported when a command runs, as in cli_offline.py
    from agent.mqtt.client import Endpoint
    from agent.mqtt.config import MqttConfig
    from agent.mqtt.endpoint import TlsFiles

_OPS = (
    "status, recalibrate, rollback, cancel, switch, set, log_level, restart, snapshot, model, histograms, calibration"
)
_TLS_FILES = ("ca_file", "cert_file", "key_file")


def add_fleet(commands: Any) -> None:
    """The commands that speak to devices."""
    send = command(commands, "send", _send, "send a device a command and follow it to its end")
    send.add_argument("device")
    send.add_argument("op", help=_OPS)
    send.add_argument(
        "arguments",
        nargs="*",
        metavar="key=value",
        help="of model: file=MODEL.onnx [release=FILE] [url=URL]; of calibration: file=FILE.bundle",
    )
    send.add_argument("--sign", type=Path, metavar="KEY", help="an operator's private key, of 'tared keys new'")
    send.add_argument("--version", type=number(int, 1, 2**53 - 1), metavar="N", help="of set: above the one before")
    send.add_argument("--valid", type=number(float, 1.0, 30 * 86400.0), default=60.0, metavar="S", help="for S s (60)")
    add_broker_options(send)
    send.add_argument(
        "--timeout",
        type=number(float, 0.1, 86400.0),
        default=30.0,
        metavar="S",
        help="give up after S s of silence (30)",
    )

    watch = command(commands, "watch", _watch, "follow devices live: a table on a terminal, else JSON lines")
    watch.add_argument("devices", nargs="*", metavar="DEVICE", help="all of the fleet")
    add_broker_options(watch)


def add_broker_options(parser: argparse.ArgumentParser, fleet: str = "default") -> None:
    """Where the broker is and how to reach it, for `endpoint_from`, `fleet_from` and `fleets_from`. fleet: in words,
    which is meant where none is named."""
    broker = parser.add_argument_group("broker", "what is given here goes before what the configuration says")
    broker.add_argument("-c", "--config", type=Path, metavar="FILE", help="take all this from its mqtt section")
    broker.add_argument("--host", help="the broker (127.0.0.1)")
    broker.add_argument("--port", type=number(int, 1, 65535), help="its port (1883)")
    broker.add_argument("--fleet", help=f"the fleet of the devices ({fleet})")
    broker.add_argument("--username")
    broker.add_argument("--password-file", type=Path, metavar="FILE", help="its first line is the password")
    broker.add_argument("--tls", action="store_true", help="TLS; the broker's certificate is of a CA the system trusts")
    broker.add_argument("--ca-file", type=Path, metavar="PEM", help="TLS; the broker's certificate is of this CA")
    broker.add_argument("--cert-file", type=Path, metavar="PEM", help="TLS; the certificate that says who you are")
    broker.add_argument("--key-file", type=Path, metavar="PEM", help="its private key, without a password")


def endpoint_from(options: argparse.Namespace) -> Endpoint:
    """The broker that `add_broker_options` was told of. Raises ConfigError for a configuration that is none."""
    names = ("host", "port", "username", "password_file")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    configured = _mqtt_config(options).endpoint()
    endpoint = replace(configured, tls=_tls(options, configured.tls), **given)
    if endpoint.exposes_password:
        from agent.common.console import say

        say("warning: the broker's password goes over the network as it is; use --tls, or --ca-file")
    return endpoint


def fleet_from(options: argparse.Namespace) -> str:
    """The fleet whose devices are meant. Raises ConfigError for a configuration that is none, and a name that is none
    (`mqtt.name`)."""
    if options.fleet is None:
        return _mqtt_config(options).fleet
    from agent.contract.topics import Topics

    return Topics(options.fleet, "any").fleet


def fleets_from(options: argparse.Namespace) -> str | None:
    """As `fleet_from`, where without a name or a configuration all are meant: None."""
    return None if options.fleet is None and options.config is None else fleet_from(options)


def _mqtt_config(options: argparse.Namespace) -> MqttConfig:
    from agent.mqtt.config import MqttConfig, read_mqtt_config

    return MqttConfig() if options.config is None else read_mqtt_config(options.config)


def _tls(options: argparse.Namespace, configured: TlsFiles | None) -> TlsFiles | None:
    from agent.common.schema import validate
    from agent.mqtt.endpoint import TlsFiles

    given = {name: getattr(options, name) for name in _TLS_FILES if getattr(options, name) is not None}
    if not given:
        return TlsFiles() if options.tls and configured is None else configured
    return validate(TlsFiles, {**(dict(configured) if configured else {}), **given}, "the command line")


def _send(options: argparse.Namespace) -> int:
    from agent.common.console import progress, set_up_logging
    from agent.contract.signing import Signer
    from agent.contract.topics import Topics
    from fleet.operator import file_arguments, new_command, send

    set_up_logging("error")  # each failed attempt to connect is a warning; the last one is our error
    pairs: dict[str, Any] = dict(argument.partition("=")[::2] for argument in options.arguments)
    file = None
    if options.op in ("model", "calibration"):
        file, release = Path(pairs.pop("file", "")), pairs.pop("release", None)
        pairs |= file_arguments(file, pairs.pop("url", None), Path(release) if release else None)
    signer = Signer(options.sign) if options.sign is not None else None
    topics = Topics(fleet_from(options), options.device)
    to = topics if signer is not None else None
    wanted = new_command(options.op, pairs, time.time(), options.valid, to, options.version)
    result = None
    with progress(options.op, 100) as bar:
        for result in send(endpoint_from(options), topics, wanted, options.timeout, signer, file):
            bar.update(round(result.percent or 0.0), result.step or result.status)
            if not options.json and result.step is None:
                print(result.to_json().decode())
    if result is None or options.json:
        print(result.to_json().decode() if result else "{}")
    return 0 if result is not None and result.status == "SUCCEEDED" else 1


def _watch(options: argparse.Namespace) -> int:
    from agent.common.console import set_up_logging
    from fleet.views.watch import watch

    set_up_logging("error")
    watch(endpoint_from(options), fleet_from(options), frozenset(options.devices), as_json=options.json)
    return 0
