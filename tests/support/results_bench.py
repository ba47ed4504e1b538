"""Answers as the frame path hands them over, and the lines that come of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from agent.camera.capture import Frame
from agent.camera.config import CameraConfig
from agent.config import Config
from agent.results.writer import ResultLine
from agent.vision.answer import Answer
from agent.vision.detections import Detections
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame
from agent.vision.tasks.classify import Classification

SPEC = ModelSpec.model_validate({"path": "model.onnx", "task": "detect", "decoder": "yolox", "labels": ["a", "b"]})
CONFIG = Config(model=SPEC, camera=CameraConfig(name="street", source="clip.avi"))
IMAGE = np.zeros((100, 200, 3), np.uint8)
HALVED = Geometry(200, 100, 0.5, 0.5, 0, 25)  # 200 x 100 in the middle of 100 x 100


def detections(*scores: float) -> Detections:
    """A box each, of class 1, from (10, 30) to (20, 45)."""
    boxes = np.tile(np.array([10.0, 30.0, 20.0, 45.0], np.float32), (len(scores), 1))
    return Detections(boxes=boxes, classes=np.ones(len(scores), np.int64), scores=np.array(scores, np.float32))


def served(number: int, result: Answer | None = None, geometry: Geometry | None = None) -> ServedFrame:
    """An answer after 2.5 ms."""
    answer = result if result is not None else Classification(1, 0.75)
    return ServedFrame(
        Frame(number, number / 10.0, 1_000_000, IMAGE, "street"), "f00d", answer, 3_500_000, 0.001, geometry
    )


def line(number: int, result: Answer | None = None, spec: ModelSpec = SPEC) -> ResultLine:
    return ResultLine(served(number, result), spec)


def frames_of(text: bytes | Path) -> list[int]:
    """The numbers of the frames in whole lines; fails on anything that is none."""
    content = text if isinstance(text, bytes) else text.read_bytes()
    assert content.endswith(b"\n") or not content
    documents: list[dict[str, Any]] = [json.loads(each) for each in content.splitlines()]
    return [document["frame"] for document in documents]
