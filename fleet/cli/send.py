"""`tared send` and `tared watch`: send a device a command, and follow devices live."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from agent.cli.arguments import command, number
from fleet.cli.arguments import add_broker_options, endpoint_from, fleet_from

_OPS = (
    "status, recalibrate, rollback, cancel, switch, set, log_level, restart, snapshot, model, histograms, calibration"
)


def add_send(commands: Any) -> None:
    """Add the commands that talk to devices."""
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
    addressee = topics if signer is not None else None
    request = new_command(options.op, pairs, time.time(), options.valid, addressee, options.version)
    result = None
    with progress(options.op, 100) as bar:
        for result in send(endpoint_from(options), topics, request, options.timeout, signer, file):
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
