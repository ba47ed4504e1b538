"""The command line, `tared`: the same code the daemon runs, one job at a time."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from agent.errors import AgentError, ConfigError
from calibrate.errors import TaredError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
SOURCES = "a video file, a folder or zip of images, v4l2:/dev/video0, csi:0, rtsp://..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors go to stderr as one line `error: CODE: found; expected; remedy`, exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which cleans up; the daemon sets its own
    try:
        options = _parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except ConfigError as error:  # lists the errors of a file, one per line
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except TaredError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Refuses arguments in the form of all other errors."""

    def error(self, message: str) -> NoReturn:
        raise AgentError("cli.arguments", message, "arguments as documented", f"see '{self.prog} --help'")


class _Version(argparse.Action):
    """Looks the version up when it is asked for: that takes longer than all other preparations together."""

    def __call__(self, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"tared {version('tared')}")
        raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tared", description="Keeps a quantised vision model true on the board that runs it.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = _command(commands, "run", _run, "the daemon; a finite source ends the run with a summary")
    run.add_argument("-c", "--config", type=Path, default=Path("config.yaml"), metavar="FILE")
    run.add_argument("--frames", type=_number(int, 1), default=0, metavar="N", help="stop after N frames")
    run.add_argument("--backend", help="instead of the configured one")

    _add_offline(commands)
    _add_send(commands)
    _command(commands, "doctor", _doctor, "what this machine has, what is missing, and the remedy")
    return parser


def _add_offline(commands: Any) -> None:
    """The jobs that need no daemon."""
    calibrate = _command(commands, "calibrate", _calibrate, "observe frames and choose the INT8 scales")
    calibrate.add_argument("model", type=Path, metavar="MODEL.yaml")
    calibrate.add_argument("--frames", required=True, metavar="SRC", help=SOURCES)
    calibrate.add_argument("--count", type=_number(int, 1), default=512, metavar="N", help="frames to observe (512)")
    calibrate.add_argument("--method", default="entropy", help="entropy (default), mse, percentile:P, ...: README")
    calibrate.add_argument("-o", "--output", type=Path, required=True, metavar="calibration.json")

    build = _command(commands, "build", _build, "build an engine into an artefact")
    build.add_argument("model", type=Path, metavar="MODEL.yaml")
    build.add_argument("--calibration", type=Path, metavar="FILE", help="needed for int8")
    precision = build.add_mutually_exclusive_group()
    precision.add_argument("--precision", choices=("int8", "fp16", "fp32"), default="int8")
    precision.add_argument(
        "--plan", type=Path, metavar="plan.json", help="which layers stay float; the others are int8"
    )
    build.add_argument("-o", "--output", type=Path, required=True, metavar="ARTEFACT/")

    infer = _command(commands, "infer", _infer, "run an artefact over frames")
    infer.add_argument("artefact", type=Path, metavar="ARTEFACT/")
    infer.add_argument("--frames", required=True, metavar="SRC", help=SOURCES)
    infer.add_argument("-o", "--output", type=Path, metavar="results.jsonl")

    evaluate = _command(commands, "evaluate", _evaluate, "top-1 or mAP on labelled images")
    evaluate.add_argument("target", type=Path, metavar="ARTEFACT_OR_MODEL.yaml")
    evaluate.add_argument("--dataset", type=Path, required=True, metavar="DIR_OR_ZIP")

    for offline in (calibrate, build, infer, evaluate):
        offline.add_argument("--backend", default="onnxruntime", help="the inference runtime (onnxruntime)")
        offline.add_argument("--threads", type=_number(int, 1), default=os.cpu_count() or 1, metavar="N")


def _add_send(commands: Any) -> None:
    """The operator's side of the MQTT contract."""
    send = _command(commands, "send", _send, "send a device a command and follow it to its end")
    send.add_argument("device")
    send.add_argument("op", help="status, recalibrate, rollback")
    send.add_argument("arguments", nargs="*", metavar="key=value")
    send.add_argument("--host", default="127.0.0.1", help="the broker (127.0.0.1)")
    send.add_argument("--port", type=_number(int, 1, 65535), default=1883, help="its port (1883)")
    send.add_argument("--fleet", default="default")
    send.add_argument(
        "--timeout",
        type=_number(float, 0.1, 86400.0),
        default=30.0,
        metavar="S",
        help="give up after S s of silence (30)",
    )


def _command(commands: Any, name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run)
    return parser


def _number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """The parser of a number from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            bound = "up" if high == math.inf else f"to {high}"
            raise argparse.ArgumentTypeError(f"expected a number from {low} {bound}, got '{text}'")
        return value

    return parse


# The commands import what they need when they run: `tared send` should not wait for OpenCV.


def _run(options: argparse.Namespace) -> int:
    from agent.config import load_config
    from agent.console import set_up_logging
    from agent.daemon import run_daemon
    from agent.summary_table import print_summary

    config = load_config(options.config)
    if options.backend:
        config = config.model_copy(update={"backend": options.backend})
    set_up_logging(config.log_level)
    summary = run_daemon(config, options.frames)
    if options.json:
        print(json.dumps(summary.as_dict()))
    else:
        print_summary(summary, Console())
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from agent.offline import run_calibrate
    from engines.backend import open_backend

    backend = open_backend(options.backend, options.threads)
    result = run_calibrate(options.model, options.frames, options.count, options.method, options.output, backend)
    return _print(options, result)


def _build(options: argparse.Namespace) -> int:
    from agent.offline import run_build
    from engines.backend import open_backend

    backend = open_backend(options.backend, options.threads)
    result = run_build(
        options.model, options.calibration, options.output, backend, precision=options.precision, plan_path=options.plan
    )
    return _print(options, result)


def _infer(options: argparse.Namespace) -> int:
    from agent.offline import run_infer
    from engines.backend import open_backend

    backend = open_backend(options.backend, options.threads)
    return _print(options, run_infer(options.artefact, options.frames, options.output, backend))


def _evaluate(options: argparse.Namespace) -> int:
    from agent.offline import run_evaluate
    from engines.backend import open_backend

    backend = open_backend(options.backend, options.threads)
    return _print(options, run_evaluate(options.target, options.dataset, backend))


def _send(options: argparse.Namespace) -> int:
    from agent.console import set_up_logging
    from agent.mqtt import Endpoint
    from agent.topics import Topics
    from fleet.operator import new_command, send

    set_up_logging("error")  # each failed attempt to connect is a warning; the last one is our error
    pairs = dict(argument.partition("=")[::2] for argument in options.arguments)
    command = new_command(options.op, pairs, time.time())
    endpoint, topics = Endpoint(options.host, options.port), Topics(options.fleet, options.device)
    result = None
    for result in send(endpoint, topics, command, options.timeout):
        if not options.json:
            print(result.to_json().decode())
    if result is None or options.json:
        print(result.to_json().decode() if result else "{}")
    return 0 if result is not None and result.status == "SUCCEEDED" else 1


def _doctor(options: argparse.Namespace) -> int:
    from agent.doctor import as_dict, examine, healthy

    findings = examine()
    if options.json:
        print(json.dumps(as_dict(findings)))
    else:
        for finding in findings:
            mark = "ok" if finding.ok else "MISSING" if finding.needed else "no"
            print(f"{mark:8} {finding.name:18} {finding.found:24} {'' if finding.ok else finding.remedy}".rstrip())
    return 0 if healthy(findings) else 1


def _print(options: argparse.Namespace, result: dict[str, Any]) -> int:
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:16} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
