"""The commands that need no daemon: calibrate, build, inspect, infer, evaluate."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agent.arguments import command, number, print_result
from agent.errors import AgentError

if TYPE_CHECKING:  # the commands import what they need when they run: `tared send` should not wait for OpenCV
    from engines.backend import Backend

_WIDE = 180  # columns of a table that is piped on
SOURCES = "a video file, a folder or zip of images, v4l2:/dev/video0, csi:0, rtsp://..."


def add_offline(commands: Any) -> None:
    """The jobs that need no daemon."""
    calibrate = command(commands, "calibrate", _calibrate, "observe frames and choose the INT8 scales")
    calibrate.add_argument("model", type=Path, metavar="MODEL.yaml")
    calibrate.add_argument("--frames", required=True, metavar="SRC", help=SOURCES)
    calibrate.add_argument("--count", type=number(int, 1), default=512, metavar="N", help="frames to observe (512)")
    calibrate.add_argument("--method", default="entropy", help="entropy (default), mse, percentile:P, ...: README")
    calibrate.add_argument("-o", "--output", type=Path, required=True, metavar="calibration.json")

    build = command(commands, "build", _build, "build an engine into an artefact")
    build.add_argument("model", type=Path, metavar="MODEL.yaml")
    build.add_argument("--calibration", type=Path, metavar="FILE", help="needed for int8")
    precision = build.add_mutually_exclusive_group()
    precision.add_argument(
        "--precision", choices=("int8", "fp16", "fp32"), help="int8 with a calibration, else the fastest float"
    )
    precision.add_argument(
        "--plan", type=Path, metavar="plan.json", help="which layers stay float; the others are int8"
    )
    build.add_argument("--best", action="store_true", help="tensorrt: search longest for the fastest kernels")
    build.add_argument("--dla", type=number(int, 0), metavar="CORE", help="tensorrt: this accelerator, else the GPU")
    build.add_argument("--offline", action="store_true", help="tensorrt: without a GPU, to prove it can be built")
    build.add_argument("--target", metavar="SM", help="with --offline: the GPU to build for, such as sm86")
    build.add_argument("-o", "--output", type=Path, metavar="ARTEFACT/", help="MODEL-PRECISION/ by default")

    inspect = command(commands, "inspect", _inspect, "what is in an artefact")
    inspect.add_argument("artefact", type=Path, metavar="ARTEFACT/")
    inspect.add_argument("--layers", action="store_true", help="the layers that the builder made")
    inspect.add_argument("--time", action="store_true", help="with --layers: run it, and time every layer")

    infer = command(commands, "infer", _infer, "run an artefact over frames")
    infer.add_argument("artefact", type=Path, metavar="ARTEFACT/")
    infer.add_argument("--frames", required=True, metavar="SRC", help=SOURCES)
    infer.add_argument("-o", "--output", type=Path, metavar="results.jsonl")

    evaluate = command(commands, "evaluate", _evaluate, "top-1 or mAP on labelled images")
    evaluate.add_argument("target", type=Path, metavar="ARTEFACT_OR_MODEL.yaml")
    evaluate.add_argument("--dataset", type=Path, required=True, metavar="DIR_OR_ZIP")

    for offline in (calibrate, build, infer, evaluate, inspect):
        offline.add_argument("--backend", default="onnxruntime", help="onnxruntime (default) or tensorrt")
        offline.add_argument("--key", type=Path, metavar="FILE", help="signs artefacts, and refuses those it has not")
        offline.add_argument("--threads", type=number(int, 1), default=os.cpu_count() or 1, metavar="N")


def _calibrate(options: argparse.Namespace) -> int:
    from agent.offline import run_calibrate

    method, output = options.method, options.output
    return print_result(
        options, run_calibrate(options.model, options.frames, options.count, method, output, _open(options))
    )


def _build(options: argparse.Namespace) -> int:
    from agent.offline import run_build

    if options.offline != (options.target is not None):
        given, other = ("--offline", "--target") if options.offline else ("--target", "--offline")
        raise AgentError("cli.arguments", f"{given} without {other}", "both or neither", f"add {other}, or leave both")
    backend = _open(options, target=options.target, dla=options.dla, best=options.best)
    result = run_build(
        options.model,
        options.calibration,
        options.output,
        backend,
        precision=options.precision,
        plan_path=options.plan,
        key=_key(options),
    )
    return print_result(options, result)


def _inspect(options: argparse.Namespace) -> int:
    from agent.inspection import inspect_artefact, print_inspection

    backend = _open(options) if options.time else None
    inspection = inspect_artefact(options.artefact, options.layers or options.time, backend, _key(options))
    if options.json:
        print(json.dumps(inspection.as_dict()))
    else:
        print_inspection(inspection, Console(width=None if sys.stdout.isatty() else _WIDE))
    return 0


def _infer(options: argparse.Namespace) -> int:
    from agent.offline import run_infer

    result = run_infer(options.artefact, options.frames, options.output, _open(options), _key(options))
    return print_result(options, result)


def _evaluate(options: argparse.Namespace) -> int:
    from agent.offline import run_evaluate

    return print_result(options, run_evaluate(options.target, options.dataset, _open(options), _key(options)))


def _open(options: argparse.Namespace, **more: Any) -> Backend:
    """The backend of an offline command; what makes its next build faster is kept in the user's cache."""
    from engines.backend import BackendOptions, open_backend

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return open_backend(options.backend, BackendOptions(options.threads, caches / "tared", _key(options), **more))


def _key(options: argparse.Namespace) -> bytes | None:
    from engines.seal import find_key

    return find_key(options.key)
