"""Who makes an INT8 network of a float one, each in processes of its own, and what is INT8 in what they made."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import load_from_string

from benchmarks.peers import HERE, MODELOPT, ROOT, WORKERS, Peer, PeerError, interpreter
from engines.graph.existing_qdq import own_int8
from engines.graph.topology import COMPUTE_OPS, QUANTISE, Topology
from engines.quantise.fusion import node_macs
from engines.store.artefact import read_artefact


@dataclass(frozen=True)
class Job:
    """What a contender is given: the spec of the network and its file, and frames; `folder` is to work in.

    frames: what `tared calibrate --frames` reads. tensors: the same frames, preprocessed, as a .npy file. plan_frames:
    what `tared plan --frames` reads. max_loss: the loss that it is asked to keep.
    """

    spec: Path
    network: Path
    frames: Path
    tensors: Path
    plan_frames: Path
    max_loss: float
    folder: Path


@dataclass(frozen=True)
class Made:
    """A graph with Q/DQ, and the wall and CPU seconds of all processes that made it.

    plan: what `tared plan --json` printed. floats: how many layers its plan leaves float.
    """

    graph: bytes
    wall_s: float
    cpu_s: float
    plan: Mapping[str, Any] | None = None
    floats: int = 0


class _Clock:
    """Runs commands and adds up what they take."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.cpu_s = 0.0

    def run(self, *command: str | Path) -> str:
        """The last line a command printed. Raises PeerError with its last words when it fails."""
        began, before = time.perf_counter(), _children_s()
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
        self.wall_s += time.perf_counter() - began
        self.cpu_s += _children_s() - before
        if done.returncode:
            raise PeerError(f"failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
        return (done.stdout.strip().splitlines() or [""])[-1]

    def tared(self, command: str, *arguments: str | Path) -> dict[str, Any]:
        """The object that a command of ours prints."""
        threads = str(os.cpu_count() or 1)  # as many as the peers take
        found: dict[str, Any] = json.loads(
            self.run(sys.executable, "-m", "fleet.cli", command, *arguments, "--threads", threads, "--json")
        )
        return found


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def plain(job: Job) -> Made:
    """tared, every layer INT8."""
    return _ours(job, planned=False)


def planned(job: Job) -> Made:
    """tared, as its plan has it. By MACs: on a CPU that is slower with INT8, measured times come to the same."""
    return _ours(job, planned=True)


def _ours(job: Job, planned: bool) -> Made:
    clock, plan, how = _Clock(), None, list[str | Path]()
    calibration, path, artefact = (job.folder / name for name in ("calibration.json", "plan.json", "artefact"))
    clock.tared("calibrate", job.spec, "--frames", job.frames, "-o", calibration)
    if planned:
        asked = ("--max-loss", str(job.max_loss), "--costs", "macs")
        found = (job.spec, "--calibration", calibration, "--frames", job.plan_frames, "-o", path)
        plan, how = clock.tared("plan", *found, *asked), ["--plan", path]
    clock.tared("build", job.spec, "--calibration", calibration, *how, "-o", artefact)
    floats = len(json.loads(path.read_text(encoding="utf-8"))["floats"]) if planned else 0
    return Made(read_artefact(artefact).read_engine(), clock.wall_s, clock.cpu_s, plan, floats)


def _peer(tool: str, peer: Peer) -> Callable[[Job], Made]:
    def make(job: Job) -> Made:
        python, clock, output = interpreter(peer), _Clock(), job.folder / "quantised.onnx"
        clock.run(python, WORKERS / "quantise.py", tool, job.network, job.tensors, output)
        return Made(output.read_bytes(), clock.wall_s, clock.cpu_s)

    return make


FP32, PLAIN, PLANNED = "FP32", "tared, plain INT8", "tared, plan"
CONTENDERS: Mapping[str, Callable[[Job], Made]] = {
    PLAIN: plain,
    PLANNED: planned,
    "onnxruntime, its defaults": _peer("default", HERE),
    "onnxruntime, MinMax": _peer("minmax", HERE),
    "onnxruntime, Entropy": _peer("entropy", HERE),
    "modelopt.onnx": _peer("modelopt", MODELOPT),
}


@dataclass(frozen=True)
class Int8Part:
    """What of a graph is INT8, told from its Q/DQ alone, whoever put it there.

    macs_share: the share of the multiply-accumulates of convolutions and matrix products whose two operands come
    through DequantizeLinear, in [0, 1]. decode_quantisers: QuantizeLinear nodes after the last of these layers.
    """

    macs_share: float
    decode_quantisers: int


def int8_part(graph: bytes) -> Int8Part:
    """Read a serialised graph, whatever its nodes are called."""
    model = load_from_string(graph)
    for number, node in enumerate(model.graph.node):
        node.name = f"{number}"
    topology, macs = Topology(model), node_macs(model)
    own = own_int8(topology)
    nodes = {node.name: node for node in topology.nodes}
    int8 = sum(count for name, count in macs.items() if own.multiplies(nodes[name]))
    return Int8Part(int8 / max(sum(macs.values()), 1), _decode_quantisers(topology))


def _decode_quantisers(topology: Topology) -> int:
    feeding: set[str] = set()  # tensors from which a convolution or matrix product can be reached
    found = 0
    for node in reversed(topology.nodes):
        if node.op_type in COMPUTE_OPS or feeding.intersection(node.output):
            feeding.update(node.input)
        elif node.op_type == QUANTISE:
            found += 1
    return found
