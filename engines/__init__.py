"""The seam between tared and the inference runtimes. It imports calibrate, never agent.

Read in this order: interface, registry, onnxruntime_backend, openvino_backend, quantise/placement.

    interface      Backend, Engine, Observer and what they exchange: BuildRequest, Built, Observation, ...
    registry       open_backend, choose_backend, options_for
    trial, trial_process   why_not: a runtime is tried in a process of its own
    errors         EngineError, DeviceError
    calibration    Calibration: a model's histograms, extremes and scales, and its file
    onnxruntime_backend    the runtime that computes a graph as it is written, on the CPU
    openvino_backend       the runtime with integer kernels, on the CPU
    kernel_nodes   from kernels to the nodes that they compute
    preprocessing  ImageTransform: preprocessing in numbers, and as a kernel's table
    board, trace   which board this is; ranges on NVIDIA's timeline
    graph/         from an ONNX file to the FP32 master graph
    quantise/      where Q/DQ go, repairs, fusion groups and their costs
    half/          the float16 form of a graph
    cuda/          kernels on a GPU
    trt/           TensorRT
    store/         artefacts on disk
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import cast

# ONNX Runtime, 1.29 and later, reports to Microsoft what runs here, from its import on, with a thread and a database in
# the user's cache. Only a variable that is set before the import prevents all of it. Source: Privacy.md in its package.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# OpenVINO reports to Google Analytics that it was imported, under an identity that it writes into the user's home. It
# does neither without this package, which Python finds no more. Source: openvino/tools/ovc/__init__.py in its package.
sys.modules["openvino_telemetry"] = cast("ModuleType", None)
