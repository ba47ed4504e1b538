"""A frame's answer as one JSON object: a line of `tared infer -o`, and of what the daemon gives away."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from agent.decode import Classification, Prediction
from agent.detections import Detections
from agent.findings import Served
from agent.fitting import Geometry
from agent.model_spec import ModelSpec
from engines.backend import Array

_NULL = np.array(None, object)


def described(prediction: Prediction, geometry: Geometry | None, spec: ModelSpec) -> dict[str, Any]:
    """A prediction in JSON's terms: boxes in frame pixels, null for what is no finite number.

    geometry: where the frame lay in the network input, in whose pixels the boxes are; None: they are in the frame's.
    """
    if isinstance(prediction, Detections):
        in_frame = geometry.to_frame(prediction.boxes) if geometry is not None else prediction.boxes
        boxes = np.round(in_frame.astype(float), 2).tolist()
        found = zip(prediction.classes.tolist(), prediction.scores.tolist(), boxes, strict=True)
        return {
            "detections": [
                {"class": number, "label": spec.label(number), "score": round(score, 4), "box": box}
                for number, score, box in found
            ]
        }
    if isinstance(prediction, Classification):
        label = spec.label(prediction.class_id)
        return {"class": prediction.class_id, "label": label, "score": round(prediction.score, 4)}
    return {"outputs": {name: _values(output) for name, output in prediction.items()}}


def _values(output: Array) -> list[Any]:
    finite = np.isfinite(output)
    values: list[Any] = (output if finite.all() else np.where(finite, output.astype(object), _NULL)).tolist()
    return values


class Answered(NamedTuple):
    """What the frame path hands over of a frame: not its image, which takes MB, and nothing is computed for it."""

    camera: str
    frame: int
    ts: float
    engine_id: str
    captured_ns: int
    done_ns: int
    result: Prediction
    geometry: Geometry | None

    @classmethod
    def of(cls, served: Served) -> Answered:
        frame = served.frame
        times_ns = frame.captured_ns, served.done_ns
        return cls(frame.camera, frame.id, frame.ts, served.engine_id, *times_ns, served.result, served.geometry)


class ResultLine:
    """An answer of the daemon, put into words by whoever asks first."""

    def __init__(self, answered: Answered, spec: ModelSpec) -> None:
        self._answered = answered
        self._spec = spec

    @property
    def camera(self) -> str:
        return self._answered.camera

    @cached_property
    def document(self) -> dict[str, Any]:
        """As `tared infer` has it, with who answered, and the milliseconds from the frame's arrival to its answer."""
        answered = self._answered
        return {
            "frame": answered.frame,
            "ts": answered.ts,
            "camera": answered.camera,
            "engine": answered.engine_id,
            "latency_ms": round((answered.done_ns - answered.captured_ns) / 1e6, 3),
            **described(answered.result, answered.geometry, self._spec),
        }

    @cached_property
    def encoded(self) -> bytes:
        """With the newline."""
        return json.dumps(self.document).encode() + b"\n"
