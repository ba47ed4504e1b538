"""What a plan would do to a model's answers, on a few frames, without building an engine for it.

A graph with Q/DQ computes on the embedded runtime what an INT8 engine computes, up to the rounding of sums. So plans
are compared there, whatever runtime will serve, and what serves is measured later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.fidelity import fidelity
from agent.model import Model
from agent.planning.divergence import DetectorDivergence, Sighting, outputs_divergence, sightings_divergence
from agent.vision import VisionTask
from calibrate.plan import PrecisionPlan
from engines.backend import Backend
from engines.calibration import Calibration
from engines.planned import quantised_graph

Frames = Sequence[NDArray[np.float32]]


@dataclass(frozen=True)
class Answer:
    """divergence: mean over frames, see divergence.py. loss: 1 - mean fidelity over the telling frames."""

    divergence: float
    loss: float
    telling: int


class WhatIf:
    """The reference's answers to a few network inputs (1, C, H, W), and a plan's beside them."""

    def __init__(self, model: Model, calibration: Calibration, frames: Frames, runtime: Backend) -> None:
        self.asked = 0
        self._model = model
        self._calibration = calibration
        self._runtime = runtime
        self._frames = frames
        with closing(runtime.load(model.master.SerializeToString())) as engine:
            self._task = VisionTask(model.spec, engine.inputs, engine.outputs)
            self._detector = DetectorDivergence(model.spec, engine) if model.spec.task == "detect" else None
            self._outputs = [engine.infer(frame) for frame in frames]
        self._sightings = [self._read(outputs, frame) for outputs, frame in zip(self._outputs, frames, strict=True)]
        self.telling = sum(sighting is not None and len(sighting.found) > 0 for sighting in self._sightings)
        """Frames on which the reference detects something."""

    def ask(self, plan: PrecisionPlan, frames: int | None = None) -> Answer:
        """The answers of a plan's INT8 graph on the first so many frames, on all by default."""
        graph = quantised_graph(self._model.master, plan, self._calibration).graph
        divergences, losses = list[float](), list[float]()
        with closing(self._runtime.load(graph.SerializeToString())) as engine:
            for index, frame in enumerate(self._frames[:frames]):
                outputs = engine.infer(frame)
                divergence = self._divergence(outputs, index)
                if divergence is not None:
                    divergences.append(divergence)
                served, reference = (self._task.decode(each, frame.shape) for each in (outputs, self._outputs[index]))
                agreement = fidelity(served, reference, self._model.spec.min_sqnr_db)
                finite = all(np.isfinite(output).all() for output in outputs.values())
                if not (agreement.is_empty and finite):
                    losses.append(1.0 - agreement.value if finite else 1.0)
        self.asked += 1
        return Answer(_mean(divergences), _mean(losses), len(losses))

    def _read(self, outputs: dict[str, NDArray[np.generic]], frame: NDArray[np.float32]) -> Sighting | None:
        return self._detector.read(outputs, frame.shape) if self._detector is not None else None

    def _divergence(self, outputs: dict[str, NDArray[np.generic]], index: int) -> float | None:
        """Of detections where the frames show any, else of the outputs as they are."""
        reference = self._sightings[index]
        if reference is None or not self.telling:
            return outputs_divergence(outputs, self._outputs[index])
        sighting = self._read(outputs, self._frames[index])
        assert sighting is not None
        return sightings_divergence(sighting, reference)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
