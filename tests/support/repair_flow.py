"""From a model and its frames to what is calibrated, observed and proposed, for the tests of repairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto
from zoo import Net, image

from calibrate.histogram import AbsHistogram, merge_into
from calibrate.repair import Extremes, merge_extremes
from engines.calibration import Calibration, calibrate_histograms
from engines.graph.topology import Topology
from engines.interface import BuildRequest
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.quantise.equalise import can_divide
from engines.quantise.placement import place
from engines.quantise.repairs import FAMILIES, LayerStatistics, Proposal, observe_channels, propose_repairs

Frames = list[NDArray[np.float32]]
RUNTIME = OnnxRuntimeBackend()
CLIPPING = "percentile:95"  # clips one value in twenty


def uneven_net(activation: str = "Relu", pad: int = 1, widest: float = 1000.0) -> ModelProto:
    """A stem whose channels range from 1 to `widest`, a depthwise layer that evens them out, and a classifier."""
    net = Net((1, 3, 12, 12))
    ranges = np.geomspace(1.0, widest, 8).astype(np.float32).reshape(8, 1, 1, 1)
    stem = net.node("Conv", "image", net.constant(net.rng.normal(size=(8, 3, 3, 3)).astype(np.float32) * ranges))
    active = net.node("Mul", stem, net.node("Sigmoid", stem)) if activation == "SiLU" else net.node(activation, stem)
    depthwise = net.constant(net.rng.normal(size=(8, 1, 3, 3)).astype(np.float32) / ranges)
    even = net.node("Relu", net.node("Conv", active, depthwise, net.weight(8), group=8, pads=[pad] * 4))
    return net.model(net.node("Conv", even, net.weight(4, 8, 1, 1), net.weight(4)))


def frames_for(model: ModelProto, count: int = 16) -> Frames:
    return [image(model, seed) for seed in range(count)]


def calibrated(model: ModelProto, frames: Frames, method: str = "max") -> Calibration:
    """Of a model as it is, or of one that is equalised already."""
    placement, topology = place(model), Topology(model)
    layers = [node.name for node in topology.nodes if node.name in placement.weights and can_divide(topology, node)]
    observer = RUNTIME.observer(BuildRequest(model), placement.taps, layers=layers)
    histograms: dict[str, AbsHistogram] = {}
    extremes: dict[str, Extremes] = {}
    for frame in frames:
        seen = observer.observe(frame)
        merge_into(histograms, seen.histograms)
        merge_extremes(extremes, seen.extremes)
    return calibrate_histograms(
        histograms,
        placement.shared,
        model_sha256="",
        method=method,
        frames=len(frames),
        source="",
        extremes=extremes,
    )


def observed(model: ModelProto, frames: Frames, **options: Any) -> dict[str, LayerStatistics]:
    weights = place(model).weights
    layers = [node for node in model.graph.node if node.name in weights]
    return observe_channels(model, layers, frames, RUNTIME, **options)


def proposed(model: ModelProto, frames: Frames, families: Sequence[str] = FAMILIES, method: str = "max") -> Proposal:
    calibration = calibrated(model, frames, method)
    return propose_repairs(model, place(model), calibration, observed(model, frames), families)
