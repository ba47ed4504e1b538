"""Declare the commands of operators and model makers: `tared send`, `watch`, `web`, `keys new` and `release`."""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import command, number, option, print_result
from agent.common.errors import AgentError, ConfigError
from fleet.cli.arguments import (
    add_broker_options,
    add_database_option,
    add_metrics_options,
    add_sign_option,
    endpoint_from,
    fleet_from,
    serving_metrics,
    signer_from,
)

if TYPE_CHECKING:  # imported when a command runs, as in agent/cli/offline.py
    from prometheus_client.registry import Collector

    from fleet.web.boards import LiveBoards

_DAY_S = 86_400.0


def add_operator(commands: Any) -> None:
    """Add the commands of operators and model makers, who keep their private keys."""
    send = command(commands, "send", _send, "send a device a command and follow it to its end")
    option(send, "device", "DEVICE", "the board's device name")
    option(send, "op", "OP", lambda: ", ".join(import_module("agent.contract.commands").OPS))
    arguments = "of model: file=MODEL.onnx [release=FILE] [url=URL] [accept=true]; of calibration: file=FILE.bundle"
    option(send, "arguments", "key=value", arguments, nargs="*")
    option(send, "-o --output", "now.jpg", "of snapshot: where to save the picture (default: it is not saved)", Path)
    add_sign_option(send)
    option(send, "--version", "N", "of set: above the version before (default: none)", number(int, 1, 2**53 - 1))
    option(send, "--valid", "S", "seconds until the command expires", number(float, 1.0, 30 * 86400.0), default=60.0)
    add_broker_options(send)
    silence = "seconds of silence after which it gives up"
    option(send, "--timeout", "S", silence, number(float, 0.1, 86400.0), default=30.0)

    watch = command(commands, "watch", _watch, "follow devices live: a table on a terminal, else JSON lines")
    option(watch, "devices", "DEVICE", "their names; none: all of the fleet", nargs="*")
    add_broker_options(watch)

    web = command(commands, "web", _web, "show boards in a browser, live, and send them commands")
    option(web, "--listen", "HOST:PORT", "where it serves its pages", default="127.0.0.1:8470")
    names = "one more name by which browsers may call it (default: none)"
    option(web, "--name", "HOST", names, action="append", default=[])
    secret = "a password demanded of browsers, with any user name (default: none)"
    option(web, "--web-password-file", "FILE", secret, Path)
    add_database_option(web, None)
    files = "the folder of models and calibrations that rollouts of its pages may send (default: none)"
    option(web, "--files", "FOLDER", files, Path)
    add_sign_option(web)
    add_metrics_options(web)
    add_broker_options(web)

    about = "keys that sign commands and releases"
    keys = commands.add_parser("keys", help=about, description=about).add_commands("actions", "ACTION")
    new = command(keys, "new", _new, "make a key")
    option(new, "name", "NAME", "writes NAME.key, which stays with its owner, and NAME.pub for the boards", Path)

    release = command(commands, "release", _release, "sign that a model may run, for 'tared send DEVICE model'")
    option(release, "model", "MODEL.onnx", "the model that may run", Path)
    option(release, "--key", "KEY", "a release key", Path, required=True)
    option(release, "--version", "N", "boards take none below it", number(int, 1, 2**53 - 1), required=True)
    option(release, "--expires", "DAYS", "days until boards refuse it", number(float, 0.001, 3650.0), default=90.0)
    option(release, "--product", "NAME", "for boards of this commands.product (default: boards that name none)")
    option(release, "-o --output", "FILE", "the release to write", Path, default=Path("release.json"))


def _send(options: argparse.Namespace) -> int:
    """Run `tared send`: send one command to a board, and print each result; exit code 1 unless it succeeded.

    Raises AgentError (`cli.arguments`) and ConfigError (`snapshot.write`) before anything is sent.
    """
    from agent.common.console import progress, set_up_logging
    from agent.contract.topics import Topics
    from fleet.operator import FILES, file_arguments_from, new_command, receive_snapshots, send

    set_up_logging("error")  # each failed attempt to connect is a warning; the last one is our error
    pairs: dict[str, Any] = dict(argument.partition("=")[::2] for argument in options.arguments)
    file = None
    if options.op in FILES:
        pairs, file = file_arguments_from(pairs)
    output: Path | None = options.output
    if output is not None and options.op != "snapshot":
        found, remedy = f"-o with op '{options.op[:64]}'", "leave -o out"
        raise AgentError("cli.arguments", found, "a snapshot, which answers with a picture", remedy)
    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise ConfigError("snapshot.write", f"-o {output}", "a writable folder with room", "choose another with -o")
    signer = signer_from(options)
    topics = Topics(fleet_from(options), options.device)
    addressee = topics if signer is not None else None
    request = new_command(options.op, pairs, time.time(), options.valid, addressee, options.version)
    endpoint = endpoint_from(options)
    pictures = receive_snapshots(endpoint, topics, options.timeout) if output is not None else nullcontext()
    with pictures as receive, progress(options.op, 100) as bar:
        for result in send(endpoint, topics, request, options.timeout, signer, file):
            bar.update(round(result.percent or 0.0), result.step or result.status)
            if not options.json and result.step is None:
                print(result.to_json().decode())
        if output is not None and receive is not None and result.status == "SUCCEEDED":
            _save(receive(result), output)
    if options.json:
        print(result.to_json().decode())
    return 0 if result.status == "SUCCEEDED" else 1


def _save(picture: bytes, path: Path) -> None:
    """Write a picture, whole or not at all. Raises ConfigError (`snapshot.write`) when the disk refuses."""
    from engines.store.files import replace_files

    try:
        replace_files({path: picture})
    except OSError as error:
        found = f"{path}: {error.strerror}"
        raise ConfigError("snapshot.write", found, "a file that can be written", "choose another with -o") from error


def _web(options: argparse.Namespace) -> int:
    """Run `tared web`: serve the page of the boards until a signal comes."""
    from agent.common.console import say, set_up_logging
    from fleet.web.command import Listen, run_web

    set_up_logging("error")
    listen = Listen.parse(options.listen, tuple(options.name))
    endpoint, fleet, signer = endpoint_from(options), fleet_from(options), signer_from(options)

    def metrics(boards: LiveBoards) -> AbstractContextManager[None]:
        return serving_metrics(options, "web", lambda: [_web_metrics(boards)])

    run_web(
        endpoint,
        fleet,
        listen,
        options.web_password_file,
        signer,
        lambda url: say(f"boards: {url}"),
        db=options.db,
        files=options.files,
        metrics=metrics,
    )
    return 0


def _web_metrics(boards: LiveBoards) -> Collector:
    from fleet.metrics.processes import ProcessMetrics, web_metrics

    return ProcessMetrics(lambda: web_metrics(boards))


def _watch(options: argparse.Namespace) -> int:
    """Run `tared watch`: print the messages of boards until a signal comes."""
    from agent.common.console import set_up_logging
    from fleet.views.watch import watch

    set_up_logging("error")
    watch(endpoint_from(options), fleet_from(options), frozenset(options.devices), as_json=options.json)
    return 0


def _new(options: argparse.Namespace) -> int:
    """Run `tared keys new`: write a key pair, and print its files and its id."""
    from agent.contract.signing import new_key

    private, public, identity = new_key(options.name)
    return print_result(options, {"private": str(private), "public": str(public), "id": identity})


def _release(options: argparse.Namespace) -> int:
    """Run `tared release`: sign that a model may run, and write the statement.

    Raises ConfigError (`release.write`) for a file that cannot be written.
    """
    from agent.contract.commands import Release
    from agent.contract.signing import Signer
    from fleet.operator import file_arguments

    signer, model, now = Signer(options.key), file_arguments(options.model), time.time()
    release = Release(
        kind="release",
        sha256=model["sha256"],
        size=model["size"],
        version=options.version,
        issued=now,
        expires=now + options.expires * _DAY_S,
        name=options.model.name,
        product=options.product,
    )
    statement = signer.sign(release.model_dump(exclude_none=True))
    try:
        options.output.write_text(json.dumps(statement, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        found = f"{options.output}: {error.strerror}"
        raise ConfigError("release.write", found, "a file that can be written", "choose another with -o") from error
    return print_result(options, {"output": str(options.output), "sha256": release.sha256, "version": release.version})
