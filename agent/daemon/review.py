"""Score every engine that served, and the reference, on the same frames of a labelled video after the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.camera.reader import Image, read_images
from agent.camera.source import Source
from agent.camera.stream_health import StreamState
from agent.common.console import progress
from agent.common.errors import ConfigError, DatasetError
from agent.control.summary import Period, Score
from agent.models.model import Model
from agent.vision.answer import Answer
from agent.vision.fidelity import fidelity
from agent.vision.labels import LabelError, Truth
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from agent.vision.tasks.opening import open_task
from engines.interface import Backend, Engine
from engines.store.artefact import Artefact
from engines.store.files import read_text

_MOST_BYTES = 1 << 30  # largest file of labels

REFERENCE = "reference"
FRAMES_PER_PERIOD = 120


def read_labels(path: Path, spec: ModelSpec) -> dict[int, Truth]:
    """Read labels by frame number from JSON lines `{"frame", "labels"}`.

    Labels are as `LabelKind.read` takes them.

    Raises ConfigError: `labels.task` for a model whose task has no labels. Raises DatasetError: `labels.unreadable`
    naming the line, `labels.task` for labels of another task.
    """
    kind = open_task(spec).labels
    if kind is None:
        found = f"labels of a camera with a model of task '{spec.task}'"
        raise ConfigError("labels.task", found, "a task that has labels", "remove camera.labels")
    kind, where = kind.fitted(spec), str(path)
    try:
        labels: dict[int, Truth] = {}
        for number, line in enumerate(read_text(path, _MOST_BYTES).splitlines(), 1):
            where = f"{path}, line {number}"
            entry = json.loads(line)
            labels[int(entry["frame"])] = kind.read(entry["labels"], spec.labels)
        return labels
    except (LabelError, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, LabelError) and error.code == "labels.task":
            raise DatasetError("labels.task", f"{where}: {error.found}", error.expected, "correct it") from error
        raise DatasetError(
            "labels.unreadable",
            f"{where}: {error.found if isinstance(error, LabelError) else f'{type(error).__name__}: {error}'}",
            f'JSON lines {{"frame": 17, "labels": {kind.example}}}',
            "correct the file that camera.labels names",
        ) from error


class Panel:
    """The reference and some artefacts, loaded to answer the same frames."""

    def __init__(self, model: Model, backend: Backend, artefacts: Sequence[Artefact]) -> None:
        reference = model.open_observer(backend)
        self._task = VisionTask(model.spec, reference.inputs, reference.outputs)
        loaded = {artefact.id: backend.load(artefact.read_engine()) for artefact in artefacts}
        self._engines: dict[str, Engine] = {REFERENCE: reference, **loaded}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def answers(self, image: Image) -> tuple[dict[str, Answer], Geometry]:
        """Return what each engine sees on a BGR image (H, W, 3), by REFERENCE or artefact id.

        Places are in pixels of the network input; the geometry leads from there to the frame.
        """
        tensor, geometry = self._task.preprocess(image)
        engines = self._engines.items()
        return {name: self._task.answer(engine.infer(tensor), tensor) for name, engine in engines}, geometry

    def score(self, image: Image, truth: Truth) -> dict[str, Score]:
        """Return the score of each engine on one frame: BGR image (H, W, 3), its label."""
        answers, geometry = self.answers(image)
        return {
            name: Score(answer.in_frame(geometry).hits(truth).counts, fidelity(answer, answers[REFERENCE]).value, 1)
            for name, answer in answers.items()
        }


def review(
    panel: Panel, source: Source, labels: Mapping[int, Truth], unnamed: Truth, periods: Sequence[Period]
) -> dict[str, dict[str, Score]]:
    """Score reference and artefacts on every period: [period name][REFERENCE or artefact id].

    The frames are read again through the capture path, at most FRAMES_PER_PERIOD of each period, evenly spaced.

    unnamed: The label of a frame that `labels` does not name.
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
                for name, score in panel.score(image, labels.get(number + reading.skipped, unnamed)).items():
                    total[name] = total[name] + score if name in total else score
                done += 1
                bar.update(done)
    return scores
