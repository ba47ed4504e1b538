"""Declare the commands that need no daemon: check, calibrate, plan, build, export, inspect, infer, evaluate, ...

Each command imports what it runs when it runs, from agent/cli/offline_runs.py among others: `tared send` must not wait
for OpenCV.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import command, number, option, print_result, table_console
from agent.common.errors import AgentError

if TYPE_CHECKING:
    from calibrate.plan import PrecisionPlan
    from engines.interface import Backend

EXPORT_FORMATS = (  # as agent.models.export.command has them, which loads ONNX
    *("onnx", "trtexec", "tensorrt-cache", "onnxruntime", "openvino"),
    *("deepstream", "triton", "tvm", "ppq"),
)
SHOWN_DIFFERENCES = 20  # most differences listed for a calibration from another tool's cache
MAX_LOSS = "the loss that you accept: 1 - mean fidelity, a share from 0 to 1 (default: that of the model's task)"
MAX_CONFUSION = "the share of a class that may be confused with one other class, 0 to 1"
SOURCES = "a video file, a folder or zip of images, v4l2:/dev/video0, csi:0, rtsp://..., http://..."
MODEL = "the model's spec; 'tared inspect MODEL.onnx -o MODEL.yaml' writes a first one"
TARGET = "an artefact, or a spec for the float reference"
METHODS = "how thresholds are chosen: entropy, mse, max, percentile:99.99, ... (docs/guides/models.md)"
DATASET = "labelled images for top-1 or mAP, too (default: none)"
LABELLED = "images with labels: a folder for each class, YOLO's text files, or COCO's or MMOCR's JSON"
CLASSES = "score these classes alone, by name: a,b,c (default: all)"
EACH_CPU = "CPU threads of each engine (default: one for each CPU)"


def add_offline(commands: Any) -> None:
    """Add the commands that need no daemon."""
    check = command(commands, "check", _check, "draw the model's input and answers; find errors of its spec")
    option(check, "model", "MODEL.yaml", "a spec, or a MODEL.onnx: its spec is guessed", Path)
    option(check, "--frames", "SRC", f"a photo, {SOURCES}", required=True)
    option(check, "--count", "N", "frames to look at (default: 32; of a classifier 128)", number(int, 1, 1000))
    option(check, "--threads", "N", EACH_CPU, number(int, 1), default=os.cpu_count() or 1)
    option(check, "-o --output", "check.png", "the picture of input, answer and other specs (default: none)", Path)

    calibrate = command(commands, "calibrate", _calibrate, "observe frames and choose the INT8 scales")
    option(calibrate, "model", "MODEL.yaml", MODEL, Path)
    option(calibrate, "--frames", "SRC", f"{SOURCES} (default: none; with --from-cache, frames to compare)")
    cache = "take the scales of TensorRT's cache, ONNX Runtime's table or a Q/DQ .onnx (default: of the frames)"
    option(calibrate, "--from-cache", "FILE", cache, Path)
    option(calibrate, "--count", "N", "frames to observe", number(int, 1), default=512)
    option(calibrate, "--method", "METHOD", METHODS, default="entropy")
    planned = "observe the tensors as this plan repairs them (default: as the model has them)"
    option(calibrate, "--plan", "plan.json", planned, Path)
    option(calibrate, "-o --output", "calibration.json", "the calibration to write", Path, required=True)

    plan = command(commands, "plan", _plan, "find the fastest precision plan whose loss stays within a bound")
    option(plan, "model", "MODEL.yaml", "the model's spec; with --explain, --show or --chart a plan.json", Path)
    option(plan, "--calibration", "FILE", "a calibration.json of this model (default: the model brings its own)", Path)
    worst = "given several times, the loss is kept in the worst of them (default: none; a search needs some)"
    option(plan, "--frames", "SRC", f"held out from the calibration: {SOURCES}; {worst}", action="append")
    option(plan, "--max-loss", "L", MAX_LOSS, number(float, 1e-4, 0.999))
    option(plan, "--max-confusion", "C", MAX_CONFUSION, number(float, 1e-3, 0.999), default=0.1)
    budget = "seconds for the search, which then takes the best certified plan (default: no limit)"
    option(plan, "--budget-s", "S", budget, number(float, 0.0))
    costs = "time the layers, or count their multiply-accumulates (macs)"
    plan.add_argument("--costs", choices=("measured", "macs"), default="measured", help=costs)
    option(plan, "--dataset", "LABELLED", DATASET, Path)
    option(plan, "--classes", "NAMES", CLASSES, _names, default=[])
    option(plan, "--seed", "N", "draws the random order of frames", number(int, 0), default=0)
    plan.add_argument("--all", action="store_true", help="list every layer group")
    option(plan, "--explain", "GROUP", "explain one group of a plan.json, by name or glob (default: all groups)")
    plan.add_argument("--show", action="store_true", help="print the table of a plan.json again")
    option(plan, "--chart", "FILE.png", "draw loss against latency; needs matplotlib (default: no chart)", Path)
    option(plan, "-o --output", "plan.json", "the plan to write (default: none; a search needs it)", Path)

    build = command(commands, "build", _build, "build an engine into an artefact")
    option(build, "model", "MODEL.yaml", MODEL, Path)
    option(build, "--calibration", "FILE", "a calibration.json, needed for int8 (default: none)", Path)
    option(build, "--frames", "SRC", "check int8 on these frames (default: the calibration's, if they are still there)")
    precision = build.add_mutually_exclusive_group()
    chosen = "of all layers (default: int8 with a calibration, else the fastest float)"
    precision.add_argument("--precision", choices=("int8", "fp16", "fp32"), help=chosen)
    option(precision, "--plan", "plan.json", "which layers stay float; the others are int8 (default: none)", Path)
    build.add_argument("--best", action="store_true", help="tensorrt: search longest for the fastest kernels")
    accelerator = "tensorrt: the deep learning accelerator to build for (default: the GPU alone)"
    option(build, "--dla", "CORE", accelerator, number(int, 0))
    build.add_argument("--offline", action="store_true", help="tensorrt: without a GPU, to prove it can be built")
    option(build, "--target", "SM", "with --offline: the GPU to build for, such as sm86 (default: none)")
    option(build, "-o --output", "ARTEFACT/", "the folder to write (default: MODEL-PRECISION/)", Path)

    export = command(commands, "export", _export, "write an artefact for another tool, into a folder of its own")
    option(export, "artefact", "ARTEFACT/", "an artefact of 'tared build'", Path)
    tools = f"the tool that reads it: {', '.join(EXPORT_FORMATS)} (docs/guides/export.md)"
    option(export, "--to", "FORMAT", tools, required=True, choices=EXPORT_FORMATS)
    built_of = "the model of which an artefact of tensorrt or openvino was built (default: none)"
    option(export, "--model", "MODEL.onnx", built_of, Path)
    option(export, "--licence", "SPDX", "of the model (default: what its file says)", default="")
    export.add_argument("--overwrite", action="store_true", help="replace a folder that is there already")
    option(export, "--key", "FILE", "verifies signed engines (default: signatures are not checked)", Path)
    option(export, "-o --output", "DIR/", "the folder to write", Path, required=True)

    inspect = command(commands, "inspect", _inspect, "show an artefact, or guess the spec of an ONNX file")
    option(inspect, "target", "ARTEFACT_OR_MODEL.onnx", "an artefact, or a model file", Path)
    inspect.add_argument("--layers", action="store_true", help="the layers that the builder made")
    inspect.add_argument("--time", action="store_true", help="with --layers: run it, and time every layer")
    spec = "of a MODEL.onnx: the file to write its spec to (default: the spec is printed)"
    option(inspect, "-o --output", "model.yaml", spec, Path)
    inspect.add_argument("--overwrite", action="store_true", help="with -o: also a file that is there already")

    report = command(
        commands, "report", _report, "write one HTML file that shows a calibration, a plan, an engine or a board"
    )
    option(report, "subject", "SUBJECT", "a calibration.json, a plan.json, an ARTEFACT/ or a state_dir", Path)
    option(report, "-o --output", "FILE", "the page to write", Path, default=Path("report.html"))
    option(report, "--key", "FILE", "verifies signed engines (default: signatures are not checked)", Path)

    infer = command(commands, "infer", _infer, "run an artefact, or the float reference, over frames")
    option(infer, "target", "ARTEFACT_OR_MODEL.yaml", TARGET, Path)
    option(infer, "--frames", "SRC", SOURCES, required=True)
    option(infer, "-o --output", "results.jsonl", "the answers, a line of JSON for each frame (default: none)", Path)
    drawn = "the frames with the answers drawn in: out.mp4, .mkv, .avi, or a folder (default: none)"
    option(infer, "--save", "OUT", drawn, Path)

    evaluate = command(commands, "evaluate", _evaluate, "measure top-1 or mAP on labelled images")
    option(evaluate, "target", "ARTEFACT_OR_MODEL.yaml", TARGET, Path)
    option(evaluate, "--dataset", "LABELLED", LABELLED, Path, required=True)
    option(evaluate, "--classes", "NAMES", CLASSES, _names, default=[])

    benchmark = command(
        commands, "benchmark", _benchmark, "time every runtime here, in float, in INT8 and under a plan"
    )
    option(benchmark, "model", "MODEL.yaml", MODEL, Path)
    option(benchmark, "--frames", "SRC", SOURCES, required=True)
    option(benchmark, "--count", "N", "frames to run", number(int, 16), default=128)
    option(benchmark, "--max-loss", "L", MAX_LOSS, number(float, 0.0, 1.0))
    option(benchmark, "--dataset", "LABELLED", DATASET, Path)
    option(benchmark, "--classes", "NAMES", CLASSES, _names, default=[])
    option(benchmark, "--threads", "N", "CPU threads of each engine", number(int, 1), default=1)

    for offline in (calibrate, plan, build, infer, evaluate, inspect):
        runtimes = "tensorrt, openvino, onnxruntime, or auto: an artefact's own, else the fastest that works"
        option(offline, "--backend", "RUNTIME", runtimes, default="auto")
        signing = "signs artefacts, and refuses those that it has not signed (default: unsigned)"
        option(offline, "--key", "FILE", signing, Path)
        option(offline, "--threads", "N", EACH_CPU, number(int, 1), default=os.cpu_count() or 1)


def _names(text: str) -> tuple[str, ...]:
    """Parse a list of names for argparse's `type`; a name with a comma in it stands in double quotes."""
    return tuple(name.strip() for name in next(csv.reader([text], skipinitialspace=True), []) if name.strip())


def _check(options: argparse.Namespace) -> int:
    """Run `tared check`: infer a few frames, print the findings, and draw the model's input and answers to -o."""
    from agent.inspection.check import print_check, run_check
    from agent.inspection.picture import check_output, draw_check

    if options.output is not None:
        check_output(options.output)
    check = run_check(options.model, options.frames, options.count, options.threads)
    if options.output is not None:
        draw_check(check, options.output)
    if options.json:
        print(json.dumps({**check.as_dict(), "output": str(options.output) if options.output else None}))
    else:
        print_check(check, table_console())
        if options.output is not None:
            print(f"{options.output} shows it")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    """Run `tared calibrate`: write the calibration of frames, or the scales of another tool's cache."""
    from agent.cli.offline_runs import run_calibrate

    backend = _open_backend(options)
    result = run_calibrate(
        options.model,
        options.frames,
        options.count,
        options.method,
        options.output,
        backend,
        options.plan,
        options.from_cache,
    )
    comparison = None if options.json else result.pop("cache", None)
    print_result(options, result)
    if comparison is not None:
        _print_comparison(comparison)
    return 0


def _print_comparison(comparison: Mapping[str, Any]) -> None:
    """Print how the scales of another tool differ from those that the frames suggest, the largest differences first."""
    from rich.table import Table

    rows, more = comparison["differences"][:SHOWN_DIFFERENCES], comparison["differences"][SHOWN_DIFFERENCES:]
    print(f"scales of {comparison['kind']} for {comparison['tensors']} tensors", end="")
    print(f", of the frames for {len(comparison['from_frames'])}" if comparison["from_frames"] else "")
    if not rows:
        return
    table = Table(
        title="quantisation noise on these frames, under the scale of the file against the scale of the frames"
    )
    table.add_column("tensor", overflow="fold")
    for heading in ("their scale", "frames' scale", "noise, dB", "of it clipping"):
        table.add_column(heading, justify="right")
    for row in rows:
        scales = (f"{row[key]:.4g}" for key in ("scale", "frames_scale"))
        table.add_row(row["tensor"], *scales, f"{row['db']:+.1f}", f"{row['clipping']:.0%}")
    table_console().print(table)
    if more:
        print(f"{len(more)} more differ by at most {abs(more[0]['db']):.1f} dB; --json has all")


def _plan(options: argparse.Namespace) -> int:
    """Run `tared plan`: search for a plan, or show, explain or draw one that is written already."""
    from rich.text import Text

    from agent.cli.plan import read_evidence
    from agent.cli.plan_print import explain, find_groups, print_plan

    if options.explain is not None or options.show or options.model.suffix == ".json":
        plan = read_evidence(options.model)
        result = dict(plan.evidence)
        if options.explain is not None:
            groups = plan.evidence["groups"]
            result = {"groups": [groups[index] for index in find_groups(plan.evidence, options.explain)]}
    else:
        plan, result = _search(options)
    if options.json:
        print(json.dumps(result))
    elif options.explain is not None:
        table_console().print(Text(explain(plan.evidence, options.explain)))
    else:
        print_plan(plan, table_console(), options.all)
    if options.chart is not None:
        from agent.cli.plan_chart import draw_chart

        draw_chart(plan.evidence, options.chart)
    return 0


def _search(options: argparse.Namespace) -> tuple[PrecisionPlan, dict[str, Any]]:
    """Search for a plan; return it, and the object that --json prints.

    Raises AgentError (`cli.arguments`) without --frames or --output, and as `run_plan` does.
    """
    from agent.cli.plan import run_plan
    from agent.planning.search import PlanOptions
    from agent.vision.registry import task_class
    from agent.vision.spec import load_model_spec
    from engines.registry import open_simulator

    missing = [name for name in ("frames", "output") if getattr(options, name) is None]
    if missing:
        found = f"'tared plan' without --{missing[0]}"
        raise AgentError("cli.arguments", found, "--calibration, --frames and --output", "see 'tared plan --help'")
    max_loss = options.max_loss
    if max_loss is None:
        max_loss = task_class(load_model_spec(options.model).task).certified_loss
    budget_s = math.inf if options.budget_s is None else options.budget_s
    limits = PlanOptions(max_loss, options.max_confusion, budget_s, options.costs, options.seed)
    backend = _open_backend(options)
    return run_plan(
        options.model,
        options.calibration,
        options.frames,
        options.output,
        backend,
        open_simulator(backend, options.threads),
        limits,
        options.dataset,
        options.classes,
    )


def _build(options: argparse.Namespace) -> int:
    """Run `tared build`: build an engine into an artefact directory, and check its INT8.

    Raises AgentError (`cli.arguments`) for --offline without --target, or the reverse.
    """
    from agent.cli.offline_runs import run_build

    if options.offline != (options.target is not None):
        given, other = ("--offline", "--target") if options.offline else ("--target", "--offline")
        raise AgentError("cli.arguments", f"{given} without {other}", "both or neither", f"add {other}, or leave both")
    result = run_build(
        options.model,
        options.calibration,
        options.output,
        _open_backend(options, target=options.target, dla=options.dla, best=options.best),
        precision=options.precision,
        plan_path=options.plan,
        frames=options.frames,
        key=_key(options),
    )
    return print_result(options, result)


def _export(options: argparse.Namespace) -> int:
    """Run `tared export`: write an artefact for another tool, and print the files."""
    from agent.models.export.command import run_export

    result = run_export(
        options.artefact,
        options.to,
        options.output,
        model=options.model,
        licence=options.licence,
        overwrite=options.overwrite,
        key=_key(options),
    )
    return print_result(options, result, lambda: print("\n".join(result["files"])))


def _inspect(options: argparse.Namespace) -> int:
    """Run `tared inspect`: show an artefact, or print or write the spec of an ONNX file.

    Raises AgentError (`cli.arguments`) for options of the other kind.
    """
    is_model = options.target.is_file() or options.target.suffix == ".onnx"
    unsuitable = ("layers", "time") if is_model else ("output", "overwrite")
    given = next((name for name in unsuitable if getattr(options, name)), None)
    if given is not None:
        found = f"--{given} for {'a model' if is_model else 'an artefact'}"
        raise AgentError("cli.arguments", found, "arguments as documented", "see 'tared inspect --help'")
    if options.overwrite and options.output is None:
        raise AgentError("cli.arguments", "--overwrite without -o", "a file to write", "name it with -o")
    return _inspect_model(options) if is_model else _inspect_artefact(options)


def _inspect_artefact(options: argparse.Namespace) -> int:
    from agent.inspection.inspect import inspect_artefact, print_artefact_inspection

    backend = _open_backend(options, options.target) if options.time else None
    inspection = inspect_artefact(options.target, options.layers or options.time, backend, _key(options))
    return print_result(options, inspection.as_dict(), lambda: print_artefact_inspection(inspection, table_console()))


def _inspect_model(options: argparse.Namespace) -> int:
    from agent.common.console import say
    from agent.inspection.inspect import inspect_model, spec_lines, write_spec

    inspection, output = inspect_model(options.target), options.output
    if output is not None:
        write_spec(inspection, output, options.overwrite)
    if options.json:
        print(json.dumps({**inspection.as_dict(), "output": str(output) if output is not None else None}))
    else:
        print("\n".join(spec_lines(inspection, Path() if output is None else output.parent)))
        say(f"{output} is written: correct it" if output is not None else "nothing is written: name a file with -o")
    return 0


def _infer(options: argparse.Namespace) -> int:
    """Run `tared infer`: run an engine over a source, and write the predictions, the drawn frames, or both."""
    from agent.cli.offline_runs import run_infer

    backend = _open_backend(options, options.target)
    key = _key(options)
    return print_result(options, run_infer(options.target, options.frames, options.output, backend, key, options.save))


def _report(options: argparse.Namespace) -> int:
    """Run `tared report`: write one HTML file about a calibration, a plan, an engine or a board."""
    from agent.jobs.job import read_journal
    from agent.reports.command import make_report

    return print_result(options, make_report(options.subject, options.output, _key(options), read_journal))


def _evaluate(options: argparse.Namespace) -> int:
    """Run `tared evaluate`: print the accuracy on labelled images, of all and of each class."""
    from agent.cli.offline_runs import run_evaluate
    from agent.common.table import tabulate

    backend = _open_backend(options, options.target)
    result = run_evaluate(options.target, options.dataset, backend, _key(options), options.classes)
    by_class = [] if options.json else result.pop("by_class", [])
    if not options.json:
        result.update({f"map_{size}": value for size, value in result.pop("by_size", {}).items()})
    print_result(options, result)
    if by_class:
        unit, score = list(by_class[0])[2:]  # behind the class and its label
        rows = [(each["label"], str(each[unit]), f"{each[score]:.4f}") for each in by_class]
        console = table_console()
        console.print(tabulate(("class", unit, score), rows, console.width, right=(unit, score)))
    return 0


def _benchmark(options: argparse.Namespace) -> int:
    """Run `tared benchmark`: time every runtime of this machine in float, in INT8 and under a plan."""
    from agent.cli.benchmark import print_benchmark, run_benchmark

    result = run_benchmark(
        options.model,
        options.frames,
        options.count,
        options.threads,
        options.max_loss,
        options.dataset,
        only=options.classes,
    )
    return print_result(options, result, lambda: print_benchmark(result, table_console()))


def _open_backend(options: argparse.Namespace, subject: Path | None = None, **more: Any) -> Backend:
    """Open the requested backend; whatever makes its next build faster is kept in the user's cache.

    Args:
        subject: An artefact whose own runtime is opened if --backend names none; None, or anything else: the fastest.
        more: Further fields of BackendOptions.

    Raises EngineError as `open_backend` and `read_artefact` do.
    """
    from engines.interface import BackendOptions
    from engines.registry import AUTO, backend_of, open_backend
    from engines.store.artefact import read_artefact

    name, key = options.backend, _key(options)
    if name == AUTO and subject is not None and subject.is_dir():
        manifest = read_artefact(subject, key).manifest
        if not manifest.get("verification_only"):  # no machine serves it, whatever runtime it has
            name = backend_of(manifest["inputs"].get("backend", {}))
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return open_backend(name, BackendOptions(options.threads, caches / "tared", key, **more))


def _key(options: argparse.Namespace) -> bytes | None:
    """Return the key of --key or of systemd's credential; None without either. Raises EngineError (`artefact.key`)."""
    from engines.store.signing import find_key

    return find_key(options.key)
