"""From a model and its frames to what is calibrated, observed and proposed, for the tests of repairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto
from zoo import image

from calibrate.histogram import merge_all
from engines.calibration import Calibration, calibrate_histograms
from engines.interface import BuildRequest
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.quantise.placement import place
from engines.quantise.repairs import FAMILIES, LayerStatistics, Proposal, observe_channels, propose_repairs

Frames = list[NDArray[np.float32]]
RUNTIME = OnnxRuntimeBackend()
CLIPPING = "percentile:95"  # clips one value in twenty


def frames_for(model: ModelProto, count: int = 16) -> Frames:
    return [image(model, seed) for seed in range(count)]


def calibrated(model: ModelProto, frames: Frames, method: str = "max") -> Calibration:
    """Of a model as it is, or of one that is equalised already."""
    placement = place(model)
    observer = RUNTIME.observer(BuildRequest(model), placement.taps)
    seen = [observer.observe(frame).histograms for frame in frames]
    histograms = {tap: merge_all([each[tap] for each in seen], seen[0][tap].bits) for tap in placement.taps}
    return calibrate_histograms(
        histograms, placement.shared, model_sha256="", method=method, frames=len(frames), source=""
    )


def observed(model: ModelProto, frames: Frames, **options: Any) -> dict[str, LayerStatistics]:
    weights = place(model).weights
    layers = [node for node in model.graph.node if node.name in weights]
    return observe_channels(model, layers, frames, RUNTIME, **options)


def proposed(model: ModelProto, frames: Frames, families: Sequence[str] = FAMILIES, method: str = "max") -> Proposal:
    calibration = calibrated(model, frames, method)
    return propose_repairs(model, place(model), calibration, observed(model, frames), families)
