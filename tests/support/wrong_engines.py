"""Candidates that are wrong on purpose, and a backend that builds them.

As a program it is the recalibration child with such a backend: `python wrong_engines.py FAULT JOB_DIRECTORY`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import agent.jobs.candidate
import agent.validation.comparison
from agent.jobs.child_process import run_child
from engines.errors import EngineError
from engines.interface import Array, Backend, BackendOptions, BuildRequest, Built, Engine, Progress, silent
from engines.registry import open_backend

Infer = Callable[[Engine, Array], dict[str, Array]]


def scales_times_ten(graph: onnx.GraphProto) -> None:
    """Multiply the scales of all Q/DQ: twelve steps of a tensor are left."""
    scales = {node.input[1] for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")}
    for tensor in graph.initializer:
        if tensor.name in scales:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(10.0), tensor.name))


def nan_weights(graph: onnx.GraphProto) -> None:
    """One in the last layer's bias."""
    bias = [node for node in graph.node if node.op_type == "Gemm"][-1].input[2]
    for tensor in graph.initializer:
        if tensor.name == bias:
            values = numpy_helper.to_array(tensor).copy()
            values[0] = np.nan
            tensor.CopyFrom(numpy_helper.from_array(values, bias))


def wrong_shape(graph: onnx.GraphProto) -> None:
    """Every score twice."""
    output = graph.output[0]
    graph.node[-1].output[0] = "once"
    graph.node.append(helper.make_node("Concat", ["once", "once"], [output.name], axis=1))
    output.type.tensor_type.shape.dim[1].dim_value *= 2


def slow(engine: Engine, batch: Array) -> dict[str, Array]:
    for _ in range(4):
        engine.infer(batch)
    return engine.infer(batch)


def crash(_engine: Engine, _batch: Array) -> dict[str, Array]:
    os.abort()


def hang(_engine: Engine, _batch: Array) -> dict[str, Array]:
    threading.Event().wait()
    raise AssertionError


def fail(_engine: Engine, _batch: Array) -> dict[str, Array]:
    raise EngineError("engine.run", "a kernel that fails", "one that runs", "none")


GRAPHS: Mapping[str, Callable[[onnx.GraphProto], None]] = {
    "scales_times_ten": scales_times_ten,
    "nan_weights": nan_weights,
    "wrong_shape": wrong_shape,
}
INFERS: Mapping[str, Infer] = {"slow": slow, "crash": crash, "hang": hang, "fail": fail}


class WrongEngine:
    """An engine that another function infers for."""

    def __init__(self, engine: Engine, infer: Infer) -> None:
        self._engine = engine
        self._infer = infer
        self.inputs, self.outputs = engine.inputs, engine.outputs

    def infer(self, batch: Array) -> dict[str, Array]:
        return self._infer(self._engine, batch)

    def close(self) -> None:
        self._engine.close()


class WrongBackend:
    """`sound`, but for what it builds. fault: a key of GRAPHS or INFERS; empty for none."""

    def __init__(self, sound: Backend, fault: str) -> None:
        self._sound = sound
        self._fault = fault
        self._wrong: set[bytes] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sound, name)

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        graph = onnx.ModelProto()
        graph.CopyFrom(request.graph)
        if self._fault in GRAPHS:
            GRAPHS[self._fault](graph.graph)
        built = self._sound.build(replace(request, graph=graph), progress)
        if any(node.op_type == "QuantizeLinear" for node in graph.graph.node):  # else it is the float engine
            self._wrong.add(built.engine)
        return built

    def load(self, engine: bytes) -> Engine:
        loaded = self._sound.load(engine)
        is_wrong = engine in self._wrong and self._fault in INFERS
        return WrongEngine(loaded, INFERS[self._fault]) if is_wrong else loaded


if __name__ == "__main__":
    chosen = sys.argv.pop(1)

    def open_wrong(name: str, options: BackendOptions | None = None) -> Backend:
        return WrongBackend(open_backend(name, options), chosen)

    vars(agent.jobs.candidate)["open_backend"] = open_wrong
    if chosen == "hang":
        agent.validation.comparison._LEAST_DEADLINE_S = 0.5
    raise SystemExit(run_child(agent.jobs.candidate.run_job))
