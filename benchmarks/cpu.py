"""What INT8 gains on this CPU: every runtime in float, in plain INT8 and under a plan, as `tared benchmark` has them.

    python -m benchmarks.cpu [--parts engines ...] [--models resnet20 ...] [--peers] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data), and for `sample` the video that `make run` renders. One thread; all
engines of a model answer the same frames in turn. Of COCO's photos half calibrate, and all are scored. Meaningful on a
quiet machine only. The graphs that OpenVINO is given are also run on ONNX Runtime, which computes them as they are
written.

With --peers other tools quantise each network, too, calibrated on the same images (benchmarks/workers/quantise.py):
NNCF, which OpenVINO's documentation names, and ONNX Runtime's own. A peer beats ours where it is faster on OpenVINO,
and more accurate by more than chance.

`instructions` limits oneDNN's kernels to those of older processors, and compares the outputs of plain INT8 with the
graph as it is written (benchmarks/workers/openvino_instructions.py).

`layers` has OpenVINO's profiler say where plain INT8 and float spend their time, and how much of FP32's on ONNX Runtime
the INT8 kernels take alone: no engine of them can be faster (benchmarks/workers/openvino_layers.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agent.camera.reader import read_spread
from agent.camera.source import parse_source
from agent.cli.benchmark import AS_WRITTEN, FLOAT, PLAIN, PLANNED, Entry, run_benchmark
from agent.collection.collection import CalibrationSet
from agent.common.console import say
from agent.models.build import build_int8
from agent.models.model import calibrate, open_model
from agent.vision.spec import load_model_spec
from agent.vision.task import VisionTask
from benchmarks.daemon_process import CIFAR_TEST, CIFAR_TRAIN, COCO, model_spec
from benchmarks.models import DATA
from benchmarks.peers import HERE, NNCF, ROOT, WORKERS, PeerError, interpreter
from benchmarks.report import Bar, Section, add_output_option, at_most, bars_section, publish
from calibrate.plan import ALL_INT8
from engines.interface import Array, BackendOptions, silent
from engines.registry import open_backend

_FRAMES = 128  # frames of each scene: half calibrate, half measure
_MAX_LOSS = 0.1


@dataclass(frozen=True)
class Case:
    """frames and dataset lie in ../shared/data; most: of the time of FP32 on ONNX Runtime, the bar."""

    frames: str
    dataset: str | None
    most: float


CASES = {
    "resnet20": Case(CIFAR_TRAIN, CIFAR_TEST, 0.40),
    "ultraface": Case("vid_face_asl_walk_640x480.mkv", None, 0.33),
    "fastestdet": Case(COCO, COCO, 0.82),
    "yolox_nano": Case(COCO, COCO, 0.95),
    "sample": Case("", None, 0.60),
}
_LIMITS = ("DEFAULT", "AVX512_CORE", "AVX2", "SSE41")  # oneDNN's names; DEFAULT: all that the processor has
_EIGHT_BITS = BackendOptions(unsigned=True)  # as for OpenVINO where products are exact
_COMPARED = 12  # frames
_PARTS = ("engines", "instructions", "layers")
_SHARES = {  # kinds of kernels, as the worker has them
    "int8": "INT8 kernels", "float": "convolutions in float", "others": "others", "copies": "copies",
    "conversions": "conversions", "call": "the call",
}  # fmt: skip
_POINTS, _FIDELITY = 0.3, 0.01  # allowed between a graph on OpenVINO and as it is written
_CHANCE, _FIDELITY_CHANCE = 0.007, 0.01  # mAP on 128 photos (benchmarks/RESULTS.md), fidelity on 64 frames
# Tools of benchmarks/workers/quantise.py, the environment of each, and the runtimes that serve what it makes.
_PEERS = {
    "NNCF symmetric": ("nncf", NNCF, ("openvino",)),
    "NNCF mixed": ("nncf-mixed", NNCF, ("openvino",)),
    "NNCF, accuracy control": ("nncf-accuracy", NNCF, ("openvino",)),
    "quantize_static": ("default", HERE, ("openvino", "onnxruntime")),
}


def measure(name: str, folder: Path, with_peers: bool = False) -> list[Entry]:
    """Return the engines of one model. Raises TaredError as `run_benchmark`."""
    case, spec = CASES[name], _spec(name, folder)
    dataset = DATA / case.dataset if case.dataset is not None else None
    others, missing = quantise_by_peers(name, spec, folder) if with_peers else ({}, [])
    result = run_benchmark(spec, str(_frames(name)), _FRAMES, 1, _MAX_LOSS, dataset, others, as_written=True)
    return [*(Entry(**row) for row in result["rows"]), *missing]


def quantise_by_peers(name: str, spec_path: Path, folder: Path) -> tuple[dict[tuple[str, str], bytes], list[Entry]]:
    """Return what the peers made, by runtime and name, and an entry for each that made nothing."""
    spec = load_model_spec(spec_path)
    images = list(read_spread(parse_source(str(_frames(name))), _FRAMES))[::2]  # those that calibrate tared's
    with closing(open_backend("onnxruntime").load(spec.path.read_bytes())) as engine:
        task = VisionTask(spec, engine.inputs, engine.outputs)
        tensors, output = folder / f"{name}-calibrating.npy", folder / f"{name}-peer.onnx"
        np.save(tensors, np.concatenate([task.preprocess(image)[0].copy() for image in images]))
    made, missing = dict[tuple[str, str], bytes](), list[Entry]()
    for peer, (tool, environment, runtimes) in _PEERS.items():
        say(f"{name}: {peer}")
        try:
            command = [interpreter(environment), WORKERS / "quantise.py", tool, spec.path, tensors, output, spec_path]
            done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise PeerError((done.stderr.strip().splitlines() or ["it failed without a word"])[-1])
            made |= {(runtime, peer): output.read_bytes() for runtime in runtimes}
        except PeerError as error:
            missing += [Entry(runtime, peer, str(error)) for runtime in runtimes]
    return made, missing


def _spec(name: str, folder: Path) -> Path:
    if name == "sample":
        return ROOT / "examples" / "street" / "model.yaml"
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(model_spec(name).model_dump(mode="json")))
    return path


def _frames(name: str) -> Path:
    return ROOT / "var" / "sample" / "street.mp4" if name == "sample" else DATA / CASES[name].frames


def of(entries: Sequence[Entry], backend: str, precision: str) -> Entry:
    """Return the entry of an engine on a runtime."""
    return next(each for each in entries if (each.backend, each.precision) == (backend, precision))


def engines_section(found: Mapping[str, Sequence[Entry]]) -> Section:
    """One row an engine."""
    columns = ("model", "runtime", "engine", "p50, ms", "p99, ms", "to FP32", "fidelity", "top-1, mAP", "memory, MiB")
    table = Section("INT8 on this CPU", (*columns, "engine, MiB", "made in, s"), note="FP32: that of ONNX Runtime.")
    for name, entries in found.items():
        base = of(entries, "onnxruntime", FLOAT).p50_ms or 1.0
        for each in entries:
            if each.latency_ms is None:
                if each.precision in _PEERS:
                    table.rows.append((name, each.backend, f"{each.precision}: {each.reason}", *[""] * 9))
                continue
            p50_ms, p99_ms = (each.latency_ms[key] for key in ("p50", "p99"))
            figures: list[Any] = [each.fidelity, each.metric, each.memory_bytes, each.engine_bytes, each.seconds]
            fidelity, metric, memory, size, seconds = (0.0 if value is None else value for value in figures)
            table.rows.append(
                (
                    name, each.backend, each.precision, f"{p50_ms:.2f}", f"{p99_ms:.2f}",
                    f"{p50_ms / base:.2f}x", f"{fidelity:.3f}", "" if each.metric is None else f"{metric:.4f}",
                    f"{memory / 2**20:.0f}", f"{size / 2**20:.2f}", f"{seconds:.1f}",
                )
            )  # fmt: skip
    return table


def bars(found: Mapping[str, Sequence[Entry]]) -> list[Bar]:
    """Return the bars of every model: the plan's time, its time to OpenVINO's float, and what it computes."""
    judged = list[Bar]()
    for name, entries in found.items():
        base, own = of(entries, "onnxruntime", FLOAT).p50_ms, of(entries, "openvino", FLOAT).p50_ms
        served = min((of(entries, "openvino", engine) for engine in (PLAIN, PLANNED)), key=_time_of_good)
        plan = of(entries, "openvino", PLANNED)
        written = of(entries, "onnxruntime", AS_WRITTEN.format(PLANNED, "openvino"))
        assert served.p50_ms is not None
        assert base is not None
        assert own is not None
        judged.append(
            at_most(f"{name}: {served.precision} on OpenVINO, to FP32", CASES[name].most, served.p50_ms / base)
        )
        judged.append(at_most(f"{name}: the same, to OpenVINO's FP32", 1.0, served.p50_ms / own))
        if plan.metric is not None and written.metric is not None:
            points = 100.0 * abs(plan.metric - written.metric)
            judged.append(at_most(f"{name}: the plan, to the same graph as written", _POINTS, points, " points"))
        elif plan.fidelity is not None and written.fidelity is not None:
            apart = abs(plan.fidelity - written.fidelity)
            judged.append(at_most(f"{name}: the plan's fidelity, to the same graph's as written", _FIDELITY, apart, ""))
        rivals = [each for each in entries if each.precision in _PEERS and each.backend == "openvino" and each.p50_ms]
        if rivals:
            better = [each.precision for each in rivals if beats(each, served)]
            judged.append(at_most(f"{name}: peers that beat it {' '.join(better)}".rstrip(), 0, len(better), ""))
    return judged


def beats(peer: Entry, ours: Entry) -> bool:
    """Return whether a peer's engine is faster, and more accurate by more than chance."""
    assert peer.p50_ms is not None
    assert ours.p50_ms is not None
    if peer.metric is not None and ours.metric is not None:
        is_better = peer.metric - ours.metric > _CHANCE
    else:
        is_better = (peer.fidelity or 0.0) - (ours.fidelity or 0.0) > _FIDELITY_CHANCE
    return peer.p50_ms < ours.p50_ms and is_better


def _time_of_good(entry: Entry) -> float:
    """Return the time of an engine that a daemon would accept; others come last."""
    is_good = entry.fidelity is not None and entry.fidelity >= 1.0 - _MAX_LOSS
    return (entry.p50_ms or 0.0) + (0.0 if is_good else 1e6)


def instructions(names: Sequence[str], folder: Path) -> Section:
    """One row a model and limit of instructions."""
    columns = ("model", "instructions up to", "products", "as tared gives it, dB", "weights of eight bits, dB")
    table = Section("OpenVINO's outputs to the graph as written", columns, note=f"Over {_COMPARED} frames.")
    for name in names:
        graph, _, tensors = _graphs(name, folder)
        for limit in _LIMITS:
            found = _worker("openvino_instructions", graph, tensors, limit=limit)
            ratios = [f"{found[key]:.1f}" if key in found else found["error"] for key in ("built", "eight_bits")]
            table.rows.append((name, limit, found["products"], *ratios))
    return table


def layers(names: Sequence[str], folder: Path) -> Section:
    """One row a model and engine."""
    columns = ("model", "engine", "ms", "to FP32", *_SHARES.values(), "the INT8 kernels alone, to FP32")
    note = "FP32: on ONNX Runtime. All in turn, one thread; parts of the time in percent, by OpenVINO's profiler."
    table = Section("Where the time goes on OpenVINO", columns, note=note)
    for name in names:
        found = _worker("openvino_layers", *_graphs(name, folder))
        base = found["ms"]["onnxruntime"]
        for engine, precision in (("int8", PLAIN), ("float", FLOAT)):
            parts, ms = found["shares"][engine], found["ms"][engine]
            alone = f"{ms * parts['int8'] / base:.2f}x" if engine == "int8" else ""
            shown = (f"{100.0 * parts[share]:.0f}" for share in _SHARES)
            table.rows.append((name, precision, f"{ms:.2f}", f"{ms / base:.2f}x", *shown, alone))
    return table


def _graphs(name: str, folder: Path) -> tuple[Path, Path, Path]:
    """Write a model's plain INT8 graph for OpenVINO, its float graph, and inputs that did not calibrate it."""
    model, backend = open_model(load_model_spec(_spec(name, folder))), open_backend("onnxruntime", _EIGHT_BITS)
    images = list(read_spread(parse_source(str(_frames(name))), _FRAMES))
    collection, inputs = CalibrationSet(held_out_size=0), list[Array]()
    with closing(model.open_observer(backend)) as observer:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        for number, image in enumerate(images):
            tensor, _ = task.preprocess(image)
            if number % 2 == 0:
                collection.add(tensor, observer.observe(tensor))
            elif len(inputs) < _COMPARED:
                inputs.append(tensor.copy())
    calibration = calibrate(model, collection.histograms, "entropy", collection.frames, name, backend)
    graph, in_float, tensors = (folder / f"{name}{end}" for end in (".onnx", "-float.onnx", ".npy"))
    graph.write_bytes(build_int8(model, backend, ALL_INT8, calibration, {}, silent).built.engine)
    in_float.write_bytes(model.master.SerializeToString())
    np.save(tensors, np.stack(inputs))
    return graph, in_float, tensors


def _worker(module: str, *paths: Path, limit: str = _LIMITS[0]) -> dict[str, Any]:
    """Return what a worker prints, under a limit of instructions."""
    command = [sys.executable, "-m", f"benchmarks.workers.{module}", *map(str, paths)]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": limit}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What INT8 gains on this CPU.")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peers", action="store_true", help="quantised by other tools, too")
    add_output_option(parser)
    options = parser.parse_args()
    sections = list[Section]()
    with tempfile.TemporaryDirectory() as folder:
        if "engines" in options.parts:
            found = dict[str, list[Entry]]()
            for name in options.models:
                say(name)
                found[name] = measure(name, Path(folder), options.peers)
            sections += [engines_section(found), bars_section(bars(found))]
        if "instructions" in options.parts:
            sections.append(instructions(options.models, Path(folder)))
        if "layers" in options.parts:
            sections.append(layers(options.models, Path(folder)))
    publish(sections, options)


if __name__ == "__main__":
    main()
