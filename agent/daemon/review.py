"""Score every engine that served, and the reference, on the same frames of a labelled video after the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from agent.camera.reader import Image, read_images
from agent.camera.source import Source
from agent.camera.stream_health import StreamState
from agent.common.console import progress
from agent.common.errors import ConfigError, DatasetError
from agent.control.summary import Period, Score
from agent.models.model import Model
from agent.monitoring.accuracy import Truth
from agent.vision.detections import NO_BOXES, Detections, LabelledBoxes
from agent.vision.fidelity import count_matches, fidelity
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from engines.interface import Backend, Engine
from engines.store.artefact import Artefact
from engines.store.files import read_text

_MOST_BYTES = 1 << 30  # largest file of labels

REFERENCE = "reference"
FRAMES_PER_PERIOD = 120


def read_labels(path: Path, spec: ModelSpec) -> dict[int, Truth]:
    """Read labels by frame number from JSON lines `{"frame", "labels"}`.

    A detector's labels are `[{"class", "box": [x1, y1, x2, y2]}]`, with boxes in frame pixels; a classifier's are a
    class id, or one of the spec's names.

    Raises ConfigError: `labels.task` for a model of another task. Raises DatasetError: `labels.unreadable` naming the
    line, `labels.task` for a detector's labels of a classifier.
    """

    def boxes(labels: Any) -> LabelledBoxes:
        corners = np.array([label["box"] for label in labels], np.float32).reshape(-1, 4)
        return LabelledBoxes(boxes=corners, classes=np.array([label["class"] for label in labels], np.int64))

    def class_id(label: Any) -> int:
        if isinstance(label, list):
            found = f"boxes in {path} for a model of task 'classify'"
            raise DatasetError("labels.task", found, "a class id or name per frame", "correct camera.labels")
        number = spec.labels.index(label) if isinstance(label, str) else index(label)
        if number < 0 or (spec.labels and number >= len(spec.labels)):
            raise ValueError(f"no class {label} among {len(spec.labels)}")
        return number

    if spec.task == "raw":
        found = f"labels of a camera with a model of task '{spec.task}'"
        raise ConfigError("labels.task", found, "task detect or classify", "remove camera.labels")
    where = str(path)
    try:
        labels: dict[int, Truth] = {}
        for number, line in enumerate(read_text(path, _MOST_BYTES).splitlines(), 1):
            where = f"{path}, line {number}"
            entry = json.loads(line)
            truth = entry["labels"]
            labels[int(entry["frame"])] = boxes(truth) if spec.task == "detect" else class_id(truth)
        return labels
    except (OSError, ValueError, KeyError, TypeError) as error:
        example = '[{"class": 0, "box": [x1, y1, x2, y2]}]}' if spec.task == "detect" else "3}, a class id or name"
        raise DatasetError(
            "labels.unreadable",
            f"{where}: {type(error).__name__}: {error}",
            f'JSON lines {{"frame": 17, "labels": {example}',
            "correct the file that camera.labels names",
        ) from error


class Panel:
    """The reference and some artefacts, loaded to answer the same frames."""

    def __init__(self, model: Model, backend: Backend, artefacts: Sequence[Artefact]) -> None:
        self._min_sqnr_db = model.spec.min_sqnr_db
        reference = model.open_observer(backend)
        self._task = VisionTask(model.spec, reference.inputs, reference.outputs)
        loaded = {artefact.id: backend.load(artefact.read_engine()) for artefact in artefacts}
        self._engines: dict[str, Engine] = {REFERENCE: reference, **loaded}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def answers(self, image: Image) -> tuple[dict[str, Detections], Geometry]:
        """Return what each engine sees on a BGR image (H, W, 3), by REFERENCE or artefact id.

        Boxes are in pixels of the network input; the geometry leads from there to the frame.
        """
        tensor, geometry = self._task.preprocess(image)
        answers = {}
        for name, engine in self._engines.items():
            detections = self._task.decode(engine.infer(tensor), tensor.shape)
            assert isinstance(detections, Detections)  # labels are refused for other tasks
            answers[name] = detections
        return answers, geometry

    def score(self, image: Image, truth: LabelledBoxes) -> dict[str, Score]:
        """Return the score of each engine on one frame: BGR image (H, W, 3), its labels in frame pixels."""
        answers, geometry = self.answers(image)
        scores = {}
        for name, detections in answers.items():
            in_frame = replace(detections, boxes=geometry.to_frame(detections.boxes))
            agreement = fidelity(detections, answers[REFERENCE], self._min_sqnr_db).value
            scores[name] = Score(count_matches(in_frame, truth), agreement, 1)
        return scores


def review(
    panel: Panel, source: Source, labels: Mapping[int, LabelledBoxes], periods: Sequence[Period]
) -> dict[str, dict[str, Score]]:
    """Score reference and artefacts on every period: [period name][REFERENCE or artefact id].

    The frames are read again through the capture path, at most FRAMES_PER_PERIOD of each period, evenly spaced.
    """
    scores: dict[str, dict[str, Score]] = {period.name: {} for period in periods}
    due = {period.name: period.start_s for period in periods}
    with progress("review", FRAMES_PER_PERIOD * len(periods)) as bar:
        done = 0
        reading = StreamState()
        for number, (ts, image) in enumerate(read_images(source, reading=reading)):
            for period in periods:
                if not due[period.name] <= ts < period.end_s:
                    continue
                due[period.name] += (period.end_s - period.start_s) / FRAMES_PER_PERIOD
                total = scores[period.name]
                for name, score in panel.score(image, labels.get(number + reading.skipped, NO_BOXES)).items():
                    total[name] = total[name] + score if name in total else score
                done += 1
                bar.update(done)
    return scores
