"""Write a first config.yaml and model.yaml from a camera, a model and a broker: `tared init`.

It asks for the three, opens the camera and reads the model. Nothing is written before both work, and no file is
overwritten. config.yaml has the keys that people set (FIRST_KEYS of agent/config.py) and no other.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import command, option, print_result
from agent.common.errors import AgentError

if TYPE_CHECKING:  # imported when the command runs, as in offline.py
    from agent.camera.config import CameraConfig
    from agent.vision.spec import ModelSpec

EMBEDDED = "embedded"
_CAMERA = "v4l2:/dev/video0, csi:0, rtsp://..., http://..., or a video file"
_WIDTH = 118  # characters in a line, without the mark of a comment
_SHORT = 200  # characters of the comment of a key
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z{]|[\w-]+:)")
_BROKER = f"HOST or HOST:PORT of an MQTT broker, or {EMBEDDED}: one on this machine"


def add_init(commands: Any) -> None:
    """Add `tared init`."""
    init = command(commands, "init", _init, "write a first config.yaml: asks for camera, model and broker")
    option(init, "--camera", "SRC", f"{_CAMERA} (default: it asks)")
    option(init, "--model", "MODEL", "a MODEL.onnx, or its MODEL.yaml (default: it asks)", Path)
    option(init, "--broker", "BROKER", f"{_BROKER} (default: it asks)")
    init.add_argument("--yes", action="store_true", help="ask nothing, and take every default")
    option(init, "-o --output", "DIR", "the folder to write config.yaml and model.yaml to", Path, default=Path("."))


def _init(options: argparse.Namespace) -> int:
    """Run `tared init`: ask, look, write both files, and print the next command.

    Raises AgentError:
        init.exists  a file is there already
        init.answer  an answer is missing, and nothing can ask
        init.camera  the camera delivers no frame
        init.write   the folder is not writable
    """
    from agent.config import check_config
    from agent.inspection.inspect import write_spec

    folder: Path = options.output
    config_path, spec_path = folder / "config.yaml", folder / "model.yaml"
    _check_new(config_path)
    asks = sys.stdin.isatty() and not options.yes
    camera, seen = _open_camera(options.camera or _answer("camera", _CAMERA, _first_camera(), asks))
    model = options.model or Path(_answer("model", "a MODEL.onnx, or its MODEL.yaml", _first_model(folder), asks))
    spec, inspection = _inspect_model(model)
    broker = options.broker or _answer("broker", _BROKER, EMBEDDED, asks)
    if inspection is not None:
        _check_new(spec_path)
    named = spec_path if inspection is not None else model
    values = {
        "model": os.path.relpath(named.resolve(), folder.resolve()),
        "camera.source": camera.source,
        **_broker_keys(broker),
    }
    notes = {"model": f"This one: {spec.path.name}, task {spec.task}.", "camera.source": f"A first frame: {seen}."}
    text = _config_text(values, notes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if inspection is not None:
            write_spec(inspection, spec_path, may_overwrite=False)
        with config_path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise AgentError(
            "init.write", f"{config_path}: {error.strerror}", "a writable folder", "name another folder with -o"
        ) from error
    check_config(config_path)
    result = {
        "config": str(config_path),
        "model": str(named),
        "task": spec.task,
        "camera": seen,
        "next": f"tared check {named} --frames {camera.source} -o check.png; tared run -c {config_path}",
    }
    from agent.common.redaction import redact

    return print_result(options, {key: redact(value) for key, value in result.items()})


def _check_new(path: Path) -> None:
    if os.path.lexists(path):
        remedy = "name another folder with -o, or move it away"
        raise AgentError("init.exists", f"{path} is there already", "a new file", remedy)


def _answer(key: str, what: str, offered: str, asks: bool) -> str:
    """Ask for a value, or take what is offered. Raises AgentError (`init.answer`) where there is neither."""
    if asks:
        from agent.common.console import console

        console.print(f"{key}: {what}" + (f" [{offered}]" if offered else ""), markup=False)
        with suppress(EOFError):
            offered = input("> ").strip() or offered
    if not offered:
        raise AgentError("init.answer", f"no {key}", what, f"give --{key}")
    return offered


def _first_camera() -> str:
    devices = sorted(Path("/dev").glob("video*"))
    return f"v4l2:{devices[0]}" if devices else ""


def _first_model(folder: Path) -> str:
    """Return the one model in the folder; empty if there is none, or more than one."""
    found = [*folder.glob("*.onnx")]
    return str(found[0]) if len(found) == 1 else ""


def _open_camera(text: str) -> tuple[CameraConfig, str]:
    """Take a frame; return the camera, and the frame's size and time in words. Raises AgentError (`init.camera`)."""
    from agent.camera.config import CameraConfig
    from agent.camera.source import is_live
    from agent.doctor.configured import examine_camera

    source = text if is_live(text) else str(Path(text).resolve())
    camera = CameraConfig(source=source)
    finding = examine_camera(camera, "camera")
    if not finding.ok:
        raise AgentError("init.camera", finding.found, "a camera or video that gives a frame", finding.remedy)
    return camera, finding.found.rpartition(": ")[2]


def _inspect_model(path: Path) -> tuple[ModelSpec, Any]:
    """Return the spec of a model, and the inspection to write it from; None for one that is written already."""
    from agent.inspection.inspect import inspect_model
    from agent.vision.spec import load_model_spec

    if path.suffix in (".yaml", ".yml"):
        return load_model_spec(path), None
    inspection = inspect_model(path)
    return inspection.spec(), inspection


def _broker_keys(broker: str) -> dict[str, object]:
    """Return the keys of the answer `HOST`, `HOST:PORT` or `embedded`."""
    if broker == EMBEDDED:
        return {}
    host, colon, port = broker.rpartition(":")
    return {"mqtt.host": host, "mqtt.port": int(port)} if colon and port.isdecimal() else {"mqtt.host": broker}


def _config_text(values: Mapping[str, object], notes: Mapping[str, str]) -> str:
    """Return a config.yaml of FIRST_KEYS, each under the first sentences that the reference says of it.

    Args:
        values: By key; the others have their defaults.
        notes: What is to be added to the comment of a key.
    """
    from agent.cli.configuration import comments
    from agent.common.bounded_yaml import load_yaml
    from agent.config import FIRST_KEYS
    from agent.inspection.inspect import one_line_yaml
    from agent.system.service_unit import shipped_path

    reference = shipped_path("config.yaml").read_text(encoding="utf-8")
    defaults, meanings = load_yaml(reference), comments(reference)
    lines = [
        f"# yaml-language-server: $schema={shipped_path('docs/schemas/config.schema.json')}",
        "# Written by 'tared init': the keys that people set. 'tared config --example' shows all.",
        "# 'tared config --check' checks this file. Relative paths are relative to it.",
    ]
    sections: list[str] = []
    shown = ""
    for key in FIRST_KEYS:
        *above, name = path = tuple(key.split("."))
        if above[:1] != sections[:1] or not above:
            lines.append("")
        opened = (depth for depth in range(len(above)) if above[: depth + 1] != sections[: depth + 1])
        lines += [f"{'  ' * depth}{above[depth]}:" for depth in opened]
        sections, pad = above, "  " * len(above)
        comment = f"{_first_sentences(meanings[path])} {notes.get(key, '')}".rstrip()
        if comment != shown:  # neighbours may share one
            lines += [f"{pad}# {line}" for line in wrap(comment, _WIDTH - len(pad), break_on_hyphens=False)]
        shown = comment
        lines.append(f"{pad}{name}: {one_line_yaml(values.get(key, reduce(getitem, path, defaults)))}")
    return "\n".join(lines) + "\n"


def _first_sentences(text: str) -> str:
    """Return the first sentence of a comment, and the second where both are short."""
    first, *rest = _SENTENCE_END.split(text)
    both = f"{first} {rest[0]}" if rest else first
    return both if len(both) <= _SHORT else first
