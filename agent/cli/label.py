"""Label drawn frames in a browser or with another tool, and list the progress: `tared label`."""

from __future__ import annotations

import argparse
import json
import os
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import add_config_option, command, option, print_result, table_console
from agent.cli.configuration import load_board_config
from agent.common.errors import AgentError

if TYPE_CHECKING:  # imported when the command runs, as in offline.py
    from agent.labelling.accuracy import MeasuredAccuracy
    from agent.labelling.proposal import PolicyProposal
    from agent.labelling.store import Cell, DrawnFrame, LabelStore
    from agent.vision.spec import ModelSpec
    from calibrate.statistics.evidence import Interval

_ANY_PORT = "127.0.0.1:0"
_USAGE = """tared label [-h] [--json] [-c FILE]
                   [--listen HOST:PORT | --list | --propose |
                   --export FOLDER [--all] | --import FILE.json]"""  # argparse does not wrap such a choice
_SCORES = ("frames", "labels", "served", "reference", "INT8 loss")
_CLASS_SCORES = ("class", "precision", "recall")
_COLUMNS = ("camera", "regime", "drawn", "labelled", "skipped", "waiting")


def add_label(commands: Any) -> None:
    """Add `label`, which may run beside the daemon."""
    label = command(commands, "label", _label, "label the frames that the daemon has drawn (docs/guides/labels.md)")
    add_config_option(label)
    label.usage = _USAGE
    ways = label.add_mutually_exclusive_group()
    place = f"the page's address, which only this machine reaches (default: {_ANY_PORT}, any port)"
    option(ways, "--listen", "HOST:PORT", place)
    written = "write frames that wait for another tool: COCO's JSON, or class folders of a classifier (default: no)"
    option(ways, "--export", "FOLDER", written, Path)
    read = "store the labels of another tool: COCO's JSON, or class folders (default: no)"
    option(ways, "--import", "FILE.json", read, Path, dest="import_path")
    ways.add_argument(
        "--list", action="store_true", help="list how many frames are drawn and labelled, and the accuracy"
    )
    proposed = "show the policy that the labels of a regime support, and the command that sets it; change nothing"
    ways.add_argument("--propose", action="store_true", help=proposed)
    label.add_argument("--all", action="store_true", help="with --export: labelled frames, too")


def _label(options: argparse.Namespace) -> int:
    """Run `tared label`: label, export, import or propose, then list the progress.

    Raises AgentError (`cli.arguments`) for options that exclude each other, and as `_open` does.
    """
    if options.all and options.export is None:
        raise AgentError("cli.arguments", "--all without --export", "both", "see 'tared label --help'")
    store, spec = _open(options)
    if options.export is not None:
        from agent.labelling.exchange import export_frames

        return print_result(options, export_frames(store, spec, options.export, options.all))
    if options.import_path is not None:
        from agent.labelling.exchange import import_labels

        return print_result(options, import_labels(store, spec, options.import_path))
    if options.propose:
        return _propose(options, store)
    if not options.list:
        with suppress(KeyboardInterrupt):
            _label_in_browser(store, spec, options.listen or _ANY_PORT)
    return _list(options, store, spec.labels)


def _open(options: argparse.Namespace) -> tuple[LabelStore, ModelSpec]:
    """Return the store of the configured model, and its spec.

    Raises AgentError:
        labelling.task  the model's frames cannot be labelled
        state.read  the folder is another user's
        labelling.none  no frame was drawn
    """
    from agent.common.console import say
    from agent.labelling.store import KEPT_ASIDE, LabelStore
    from agent.models.model import open_model
    from agent.vision.tasks.opening import open_task

    config = load_board_config(options.config)
    spec = config.model
    if open_task(spec).labels is None:
        expected = "a task whose frames people can label; nobody draws outputs or distances"
        remedy = "compare the engine with the float model by its fidelity, or with measured labels by `tared evaluate`"
        raise AgentError("labelling.task", f"a model of task {spec.task}", expected, remedy)
    try:
        exists = LabelStore(config.state_dir, "", spec.task).exists
    except PermissionError as error:
        found, remedy = f"{config.state_dir}: {error.strerror}", "run it as the daemon's user, or with sudo"
        raise AgentError("state.read", found, "a state directory of this user", remedy) from error
    if not exists:
        raise _none_drawn(f"no drawn frame in {config.state_dir}")
    store = LabelStore(config.state_dir, open_model(spec).sha256, spec.task)  # the hash is of the prepared graph
    for task, labels in store.labels_of_other_tasks().items():
        say(f"{labels} labels of task {task}: {KEPT_ASIDE}")
    if not store.frames():
        raise _none_drawn(f"no drawn frame of {spec.path.name} for task {spec.task} in {config.state_dir}")
    return store, spec


def _none_drawn(found: str) -> AgentError:
    remedy = "let the daemon run for a while, with `labelling` in its config.yaml; or name another config.yaml with -c"
    return AgentError("labelling.none", found, "frames that a daemon has drawn for labelling", remedy)


def _label_in_browser(store: LabelStore, spec: ModelSpec, listen: str) -> None:
    from agent.common.console import say
    from agent.labelling.browser import LabelPage, open_listener

    with open_listener(listen) as listener:
        page = LabelPage(store, spec, listener)
        say(f"label frames at {page.address} (Ctrl-C ends)")
        if store.kind.form == "shapes":
            say("the page takes frames with nothing in them; draw in a tool for COCO's JSON: --export, then --import")
        forward = f"ssh -L {page.forwarding} THIS-BOARD"
        say(f"frames stay on this machine; from another machine, run '{forward}' there, then open the same address")
        has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if has_display and os.geteuid() != 0:  # no browser should run as root
            webbrowser.open(page.address)
        page.serve()


def _list(options: argparse.Namespace, store: LabelStore, labels: Sequence[str]) -> int:
    """Print how many frames are labelled, by camera and regime, and the accuracy by these labels."""
    from agent.labelling.accuracy import measured_accuracy

    frames = store.frames()
    cells = {
        cell: _progress([frame for frame in frames if frame.cell == cell])
        for cell in sorted({frame.cell for frame in frames})
    }
    measured = measured_accuracy(frames, labels, store.counted())
    if options.json:
        rows = [{"camera": camera, "regime": regime, **each} for (camera, regime), each in cells.items()]
        accuracy = measured.document() if measured is not None else None
        print(json.dumps({**_progress(frames), "cells": rows, "accuracy": accuracy}))
        return 0
    _print_progress(_progress(frames), cells)
    if measured is not None:
        _print_accuracy(measured)
    return 0


def _progress(frames: Sequence[DrawnFrame]) -> dict[str, int]:
    """Return the progress of the labels of some frames; suggested: labels that began as the model's answer."""
    return {
        "drawn": len(frames),
        "labelled": sum(frame.is_labelled for frame in frames),
        "suggested": sum(frame.suggested for frame in frames),
        "skipped": sum(frame.skipped for frame in frames),
        "waiting": sum(frame.is_waiting for frame in frames),
    }


def _print_progress(total: Mapping[str, int], cells: Mapping[Cell, Mapping[str, int]]) -> None:
    from agent.common.table import tabulate

    shown = {**cells, ("all", ""): total} if len(cells) > 1 else cells
    rows = [[*cell, *(str(each[column]) for column in _COLUMNS[2:])] for cell, each in shown.items()]
    console = table_console()
    console.print(tabulate(_COLUMNS, rows, console.width, right=_COLUMNS[2:]))


def _print_accuracy(measured: MeasuredAccuracy) -> None:
    from agent.common.table import tabulate

    scopes = [("all", measured.overall)]
    scopes += [(f"camera {name}", each) for name, each in measured.cameras.items()]
    scopes += [(f"regime {name}", each) for name, each in measured.regimes.items()]
    rows = [
        [name, str(each.accuracy.n), _shown(each.accuracy), _shown(each.reference), _shown(each.int8_loss)]
        for name, each in scopes
    ]
    by_class = [[name, _shown(each.precision), _shown(each.recall)] for name, each in measured.classes.items()]
    console = table_console()
    print(f"\naccuracy by {measured.labels} labels that count; in brackets its interval of 95 % confidence")
    console.print(tabulate(_SCORES, rows, console.width, right=("labels",)))
    print()
    console.print(tabulate(_CLASS_SCORES, by_class, console.width))
    if measured.suggested:
        print(f"{measured.suggested} of these labels began with the model's answer, and follow the model")
    if measured.doubt:
        print(f"the labels are in doubt: {measured.doubt}")


def _propose(options: argparse.Namespace, store: LabelStore) -> int:
    from agent.common.console import say_error
    from agent.control.policies import Policies
    from agent.labelling.proposal import propose
    from agent.state.store import StateStore

    config = load_board_config(options.config)
    state = StateStore.copy_of(config.state_dir, ["policies"])
    policies = Policies(config, state)
    state.report_to(lambda error: say_error(str(error)))
    frames = store.frames()
    stored = config.state_dir / "artefacts"
    regimes = [each for each in dict.fromkeys(frame.regime for frame in frames) if (stored / each).is_dir()]
    found = [propose(frames, regime, config.model, policies.in_frames(regime)) for regime in regimes]
    proposals = [
        (each, policies.command(each.artefact, each.score_threshold, each.classes))
        for each in found
        if each is not None
    ]
    if options.json:
        print(json.dumps({"proposals": [{**each.document(config.model), "command": text} for each, text in proposals]}))
        return 0
    for proposal, text in proposals:
        _print_proposal(proposal, text, config.model.label)
    if not proposals:
        print("the labels support no other policy")
    return 0


def _print_proposal(proposal: PolicyProposal, command: str, name: Callable[[int], str]) -> None:
    print(f"regime {proposal.artefact}, by {proposal.labels} labels:")
    if proposal.gain is not None and proposal.f1 is not None and proposal.f1_present is not None:
        print(f"  score_threshold {proposal.score_threshold:g} instead of {proposal.present:g}")
        print(f"  F1 {_shown(proposal.f1)} instead of {_shown(proposal.f1_present)}, a gain of {_shown(proposal.gain)}")
    for number, precision in proposal.never_right.items():
        print(f"  without {name(number)}, whose precision is {_shown(precision)}")
    print(f"  to confirm: {command}")


def _shown(interval: Interval) -> str:
    return f"{interval.estimate:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
