"""What a plan would do to a model's answers, on a few frames, without building an engine for it.

A graph with Q/DQ computes on the embedded runtime what an INT8 engine computes, up to the rounding of sums. So plans
are compared there, whatever runtime will serve, and what serves is measured later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from agent.decode import RawOutputs
from agent.fidelity import fidelity
from agent.model import Model
from agent.planning.divergence import DetectorDivergence, Sighting, outputs_divergence, sightings_divergence
from agent.vision import VisionTask
from calibrate.plan import PrecisionPlan
from engines.backend import Array, Backend
from engines.calibration import Calibration
from engines.planned import quantised_graph

Frames = Sequence[Array]


@dataclass(frozen=True)
class Answer:
    """divergence: mean over frames, see divergence.py. loss: 1 - mean fidelity over the telling frames."""

    divergence: float
    loss: float
    telling: int


class WhatIf:
    """The reference's answers to a few network inputs (1, C, H, W), and a plan's beside them."""

    def __init__(self, model: Model, calibration: Calibration, frames: Frames, runtime: Backend) -> None:
        self._model = model
        self._calibration = calibration
        self._runtime = runtime
        with closing(runtime.load(model.master.SerializeToString())) as engine:
            self._task = VisionTask(model.spec, engine.inputs, engine.outputs)
            self._detector = DetectorDivergence(model.spec, engine) if model.spec.task == "detect" else None
            answered = [(frame, outputs := engine.infer(frame), self._read(outputs, frame)) for frame in frames]
        self._known = sorted(answered, key=lambda known: not _is_telling(known[2]))
        self._telling = any(_is_telling(sighting) for *_, sighting in self._known)

    def ask(self, plan: PrecisionPlan, frames: int | None = None) -> Answer:
        """The answers of a plan's INT8 graph on so many frames, on all by default; first those that show something."""
        graph = quantised_graph(self._model.master, plan, self._calibration).graph
        divergences, losses = list[float](), list[float]()
        with closing(self._runtime.load(graph.SerializeToString())) as engine:
            for frame, expected, sighting in self._known[:frames]:
                outputs = engine.infer(frame)
                divergence = self._divergence(outputs, frame, expected, sighting)
                if divergence is not None:
                    divergences.append(divergence)
                served, reference = (self._task.decode(each, frame.shape) for each in (outputs, expected))
                agreement = fidelity(served, reference, self._model.spec.min_sqnr_db)
                finite = all(np.isfinite(output).all() for output in outputs.values())
                if not (agreement.is_empty and finite):
                    losses.append(1.0 - agreement.value if finite else 1.0)
        return Answer(_mean(divergences), _mean(losses), len(losses))

    def _read(self, outputs: RawOutputs, frame: Array) -> Sighting | None:
        return self._detector.read(outputs, frame.shape) if self._detector is not None else None

    def _divergence(
        self, outputs: RawOutputs, frame: Array, expected: RawOutputs, reference: Sighting | None
    ) -> float | None:
        """Of detections where the frames show any, else of the outputs as they are."""
        if reference is None or not self._telling:
            return outputs_divergence(outputs, expected)
        sighting = self._read(outputs, frame)
        assert sighting is not None
        return sightings_divergence(sighting, reference)


def _is_telling(sighting: Sighting | None) -> bool:
    return sighting is not None and len(sighting.found) > 0


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
