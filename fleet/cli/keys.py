"""`tared keys new` and `tared release`: make keys that sign commands and releases, and sign a release."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from agent.cli.arguments import command, number, print_result
from agent.common.errors import ConfigError

_DAY_S = 86_400.0


def add_keys(commands: Any) -> None:
    """Add the commands of operators and model makers, who keep their private keys."""
    keys = commands.add_parser("keys", help="keys that sign commands and releases")
    new = command(keys.add_subparsers(required=True, metavar="COMMAND"), "new", _new, "make a key")
    new.add_argument("name", type=Path, help="writes NAME.key, which stays with its owner, and NAME.pub for the boards")

    release = command(commands, "release", _release, "say that a model may run, for 'tared send DEVICE model'")
    release.add_argument("model", type=Path, metavar="MODEL.onnx")
    release.add_argument("--key", type=Path, required=True, help="a release key")
    release.add_argument("--version", type=number(int, 1, 2**53 - 1), required=True, help="boards take none below it")
    release.add_argument("--expires", type=number(float, 0.001, 3650.0), default=90.0, metavar="DAYS", help="(90)")
    release.add_argument("--product", help="for boards of this commands.product; else for those that name none")
    release.add_argument("-o", "--output", type=Path, default=Path("release.json"), metavar="FILE")


def _new(options: argparse.Namespace) -> int:
    from agent.contract.signing import new_key

    private, public, identity = new_key(options.name)
    return print_result(options, {"private": str(private), "public": str(public), "id": identity})


def _release(options: argparse.Namespace) -> int:
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
