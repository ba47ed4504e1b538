"""Write the graph for consumers that compile it: any ONNX runtime, trtexec, OpenVINO, TVM."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from onnx import ModelProto

from agent.common.errors import AgentError
from agent.models.export.source import Export, ExportSource
from engines.graph.load import image_input
from engines.graph.passes import standard_opset
from engines.half.convert import half_precision
from engines.interface import Profile, ShapeRange
from engines.registry import open_backend

MODEL = "model.onnx"
FLOAT32, FLOAT16 = "model_fp32.onnx", "model_fp16.onnx"
ENGINE = "model.engine"
_LAST_OPSET_OF_8 = 17  # the newest that TensorRT 8.5 parses


def export_onnx(source: ExportSource) -> Export:
    """Write the Q/DQ graph as it is, with names, licence and calibration in its metadata."""
    return Export(
        {MODEL: source.graph.SerializeToString()},
        (
            f"{MODEL}: the graph of {source.name}, of an artefact in {source.precision}; Q/DQ nodes have its scales.",
            f"Run it with any ONNX runtime: onnxruntime.InferenceSession('{MODEL}'). Class names: metadata 'names'.",
            "Input: metadata key 'tared.spec'; calibration: 'tared.calibration'; licence: 'license' (SPDX).",
        ),
    )


def export_trtexec(source: ExportSource) -> Export:
    """Write the graph in the forms that TensorRT's releases take, and for each release the command that builds it."""
    files = trtexec_files(source)
    typed = FLOAT16 if FLOAT16 in files else FLOAT32
    scripts = sorted(name for name in files if name.endswith(".sh"))
    return Export(
        files,
        (
            f"On the board that serves it, by the number of its TensorRT release: sh {', sh '.join(scripts)}.",
            f"Each writes {ENGINE}; options of trtexec may follow. The graph decides the precision, not --best.",
            f"{typed} is built strongly typed; {FLOAT32} is for 8.5, whose --fp16 chooses the float type.",
        ),
    )


def trtexec_files(source: ExportSource) -> dict[str, bytes]:
    """Return the graphs, and a script with one trtexec command per release.

    An FP32 artefact stays FP32 on every release. For TensorRT 8.5 there is a script only where its parser knows the
    opset, and a single range of shapes, which spans all profiles.

    Raises EngineError as `half_precision`, AgentError as `ExportSource.graph`.
    """
    graph, profiles = source.graph, source.profiles
    files, typed = {FLOAT32: graph.SerializeToString()}, FLOAT32
    if source.precision != "fp32":
        seen = source.calibration.seen if source.calibration is not None else {}
        typed, files[FLOAT16] = FLOAT16, half_precision(graph, seen).model.SerializeToString()
    old = {"int8": ["--int8", "--fp16"], "fp16": ["--fp16"], "fp32": []}[source.precision]
    if standard_opset(graph) <= _LAST_OPSET_OF_8:
        spanning = [_spanning(profiles)] if profiles else []
        files["build_8.5.sh"] = _script(FLOAT32, old, spanning)
    files["build_10.sh"] = _script(typed, ["--stronglyTyped"], profiles)
    files["build_11.sh"] = _script(typed, [], profiles)  # it types every network strongly
    return files


def _script(model: str, flags: Sequence[str], profiles: Sequence[Profile]) -> bytes:
    words = ["trtexec", f"--onnx={model}", *flags]
    for index, profile in enumerate(profiles):
        words += [f"--profile={index}"] if len(profiles) > 1 else []
        for bound in ("min", "opt", "max"):
            shapes = (f"{name}:{'x'.join(map(str, getattr(shape, bound)))}" for name, shape in profile.items())
            words.append(f"--{bound}Shapes={','.join(shapes)}")
    command = shlex.join([*words, f"--saveEngine={ENGINE}"])
    return f'#!/bin/sh\ncd "$(dirname "$0")" && exec {command} "$@"\n'.encode()


def _spanning(profiles: Sequence[Profile]) -> Profile:
    """Return one profile that spans all of them, tuned for the first."""
    spanning = {}
    for name, first in profiles[0].items():
        lows, highs = ([getattr(each[name], bound) for each in profiles] for bound in ("min", "max"))
        spanning[name] = ShapeRange(
            tuple(map(min, zip(*lows, strict=True))), first.opt, tuple(map(max, zip(*highs, strict=True)))
        )
    return spanning


def export_openvino(source: ExportSource) -> Export:
    """Write OpenVINO's IR. Raises EngineError as `write_ir`, and `backend.missing` without OpenVINO."""
    return Export(
        openvino_files(source.graph_with_uint8),
        (
            "OpenVINO's IR: openvino.Core().compile_model('model.xml', 'CPU'); model.bin holds the weights.",
            f"{source.name}, of an artefact in {source.precision}; FakeQuantize nodes have the scales of INT8 layers.",
            f"Input {_input_text(source.graph_with_uint8)}, prepared as the artefact's model spec says.",
        ),
    )


def openvino_files(graph: ModelProto) -> dict[str, bytes]:
    """Return `model.xml` and `model.bin`. Raises EngineError as `export_openvino`."""
    open_backend("openvino")
    from engines.openvino_backend import write_ir  # only where the package is, which the line above has seen to

    return write_ir(graph)


_TVM_SCRIPT = """#!/usr/bin/env python3
# Compiles {model} for this machine's CPU into model.so (packages apache-tvm and onnx). Another target: TARGET.
import sys
from pathlib import Path

import onnx
import tvm
from tvm.relax.frontend.onnx import from_onnx

folder = Path(__file__).resolve().parent
target = tvm.target.Target(sys.argv[1] if len(sys.argv) > 1 else "llvm")
module = from_onnx(onnx.load(folder / "{model}"))
tvm.compile(module, target).export_library(str(folder / "model.so"))
"""


def export_tvm(source: ExportSource) -> Export:
    """Write the graph at one fixed shape, and the script with which Apache TVM compiles it.

    Raises AgentError: `export.shape`  several input shapes
    """
    graph = ModelProto()
    graph.CopyFrom(source.graph)
    for profile in source.profiles:
        for name, shape in profile.items():
            if len(source.profiles) > 1 or shape.min != shape.max:
                raise AgentError(
                    "export.shape",
                    f"{len(source.profiles)} profiles of input '{name}', from {list(shape.min)} to {list(shape.max)}",
                    "one input shape, for which TVM compiles",
                    "build an artefact with one profile whose min, opt and max are equal",
                )
            _fix_shape(graph, name, shape.opt)
    return Export(
        {MODEL: graph.SerializeToString(), "compile.py": _TVM_SCRIPT.format(model=MODEL).encode()},
        (
            "python compile.py [TARGET] compiles for this machine's CPU, or for a TVM target, into model.so.",
            "Run it: tvm.relax.VirtualMachine(tvm.runtime.load_module('model.so'), tvm.cpu())['main'](image).",
            f"Input {_input_text(graph)}. Needs apache-tvm and onnx (pip install apache-tvm onnx).",
        ),
    )


def _fix_shape(graph: ModelProto, name: str, shape: Sequence[int]) -> None:
    for value in graph.graph.input:
        if value.name == name:
            for dimension, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
                dimension.dim_value = size


def _input_text(graph: ModelProto) -> str:
    image = image_input(graph)
    shape = ", ".join("any" if size is None else str(size) for size in image.shape)
    return f"'{image.name}', {image.dtype} [{shape}]"
