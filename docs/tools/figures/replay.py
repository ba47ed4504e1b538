"""The engines of a run answer its recording again, and its drift monitor watches it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.camera.reader import read_images
from agent.config import DriftConfig
from agent.daemon.review import REFERENCE, Panel, read_labels
from agent.models.model import Model, open_model, tap_weights
from agent.monitoring.drift import DriftMonitor, Regime
from agent.monitoring.observation_budget import ObservationBudget
from agent.vision.answer import MatchCounts
from agent.vision.boxes import NO_BOXES, LabelledBoxes
from agent.vision.detections import Detections, count_matches
from agent.vision.fidelity import fidelity
from agent.vision.task import VisionTask
from calibrate.plan import ALL_INT8, PrecisionPlan
from calibrate.statistics.evidence import DriftDetector
from docs.tools.figures.street_run import StreetRun
from engines.calibration import load_calibration
from engines.interface import Backend
from engines.registry import backend_of, open_backend

_EVERY = 2  # frames: five a second


@dataclass(frozen=True)
class Answered:
    """One frame, and what each engine saw on it, by REFERENCE or the engine's id; boxes are in the frame's pixels.

    fidelity: By engine, in [0, 1]; empty where neither it nor the reference found anything.
    """

    ts: float
    image: NDArray[np.uint8]
    labels: LabelledBoxes
    answers: Mapping[str, Detections]
    fidelity: Mapping[str, float]

    def matches(self, engine: str) -> MatchCounts:
        """Return how an engine's boxes match the labels."""
        return count_matches(self.answers[engine], self.labels)


def answered_frames(run: StreetRun) -> Iterator[Answered]:
    """Yield every second frame of the recording, answered by the reference and by both engines."""
    camera = run.config.every_camera[0]
    assert camera.labels is not None
    truths = read_labels(camera.labels, run.config.model)
    model, backend = _open(run, ALL_INT8)
    with closing(Panel(model, backend, run.engines)) as panel:
        for number, (ts, image) in enumerate(read_images(camera.to_source())):
            if number % _EVERY:
                continue
            answers, geometry = panel.answers(image)
            agreements = {
                name: fidelity(each, answers[REFERENCE]) for name, each in answers.items() if name != REFERENCE
            }
            truth = truths.get(number, NO_BOXES)
            assert isinstance(truth, LabelledBoxes)
            yield Answered(
                ts,
                image,
                truth,
                {name: each.in_frame(geometry) for name, each in answers.items() if isinstance(each, Detections)},
                {name: each.value for name, each in agreements.items() if not each.is_empty},
            )


@dataclass(frozen=True)
class Block:
    """A block of observed frames: its end (capture time in s), the predicted gain, and the evidence after it."""

    ts: float
    gain_db: float
    e_value: float
    state: str
    onset_ts: float | None


def drift_blocks(run: StreetRun) -> list[Block]:
    """Watch the engine of the night from its first frame on to the alarm, at the paces of the daemon.

    The run keeps the gain each five seconds alone. Here other frames are observed, at the same rate: the alarm comes
    within a block or two of that of the run.
    """
    night = run.engines[0]
    plan = PrecisionPlan.from_json(night.read_file("plan.json").decode("utf-8"))
    calibration = load_calibration(night.path / "calibration.json")
    model, backend = _open(run, plan)
    regime = Regime.from_calibration(night.id, calibration, model.scales(calibration), tap_weights(model, calibration))
    config = run.config
    monitor = DriftMonitor(config.drift, config.regimes.switch_db, regime)
    observe = config.observe
    budget = ObservationBudget(None, observe.period_s, observe.alert_period_s, burst=1)
    blocks = list[Block]()
    with closing(model.open_observer(backend)) as observer:
        task = VisionTask(model.spec, observer.inputs, observer.outputs)
        for ts, image in read_images(config.every_camera[0].to_source()):
            if ts < run.summary["swaps"][0]["ts"] or not budget.due(ts):
                continue
            tensor, _ = task.preprocess(image)
            if not monitor.update(ts, observer.observe(tensor).histograms):
                continue
            state = monitor.state
            budget.set_pace(alert=state.closely)
            blocks.append(Block(ts, state.gain_db, state.e_value, state.state, state.onset_ts))
            if state.state == "alarm":
                break
    return blocks


def detector_of(config: DriftConfig) -> DriftDetector:
    """Return a detector with the monitor's thresholds."""
    return DriftDetector(config.false_alarms_per_30d, config.tolerance_db, config.block_s)


def _open(run: StreetRun, plan: PrecisionPlan) -> tuple[Model, Backend]:
    """Return the run's model under a plan, and the runtime that its engines were built for."""
    described = run.engines[0].manifest["inputs"]["backend"]
    return open_model(run.config.model, plan), open_backend(backend_of(described), run.config.backend_options())
