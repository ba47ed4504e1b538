"""Calibrate, build and judge one candidate in a child process; or build a new model's float reference there.

`python -m agent.jobs.candidate JOB_DIRECTORY` reads what the daemon has written there, and reports as
agent.jobs.child_process defines it. A builder that crashes or exhausts the memory takes this process down, never the
video. Whether a new model can be used is found out by building its float reference, which the daemon then loads.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from agent.collection.collection import Collected
from agent.common.errors import AgentError
from agent.config import Config, backend_options
from agent.contract.histograms import read_facts, read_upload
from agent.jobs.child_process import Emit, JobOutcome, run_child
from agent.models.build import build_artefact
from agent.models.model import Model, calibrate, open_model, read_plan
from agent.planning.ladder import REFUSED, Ladder, LadderOptions, Scene
from agent.planning.precision_raise import ObservedScene, PrecisionRaise, PrecisionRaiser
from agent.validation.verdict import MIN_INFORMATIVE, NO_WORSE, RAISED_GAIN, Judge, VerdictLimits
from agent.vision.output_checks import check_batch
from agent.vision.preprocess import network_input
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.calibration import Calibration, load_histograms, save_histograms
from engines.interface import Array, Backend, BackendOptions, Progress
from engines.registry import open_backend
from engines.store.artefact import Store, read_artefact
from engines.store.signing import find_key

# Every fourth held-out frame is used to try repairs and plans, and is not used to judge the candidate.
_TRIED_EVERY = 4
_MERGED, _HELD_OUT, _SAMPLE = "merged.upload", "held_out.npy", "sample.npy"
_REFERENCE = "reference.json"  # the request for the reference of a new model, in the place of job.json


@dataclass(frozen=True)
class JobRequest:
    """The request of the daemon to the child, in job.json; the collected data lies in the same directory.

    Args:
        serving: Directory of the artefact in service; None while the reference engine serves.
        max_loss, max_slowdown: See VerdictLimits. A candidate with more layers float than the engine in service may
            always be slower by MORE_FLOAT_SLOWDOWN.
        plan: The configured plan, whose tensors were observed; as PrecisionPlan.to_json returns it.
        start: The plan in service, with which planning begins; empty: the configured one.
        origin: EngineService.precision_origin, for an artefact of another plan than the configured one.
        planning_s: As LadderOptions.budget_s.
        raising: The fields of PrecisionRaise; None: precision is not raised.
    """

    spec: dict[str, Any]
    model_sha256: str
    backend: str
    threads: int
    method: str
    frames: int
    source: str
    state_dir: str
    serving: str | None
    max_loss: float
    plan: str = ALL_INT8.to_json()
    start: str = ""
    origin: str = ""
    planning_s: float = 120.0
    raising: dict[str, Any] | None = None
    dla: int | None = None
    max_slowdown: float = 1.25


def write_job(
    directory: Path,
    request: JobRequest,
    collected: Collected,
    merged: Path | None = None,
) -> None:
    """Write a job for the child; `directory` must not exist yet. merged: the fleet's calibration that is tried."""
    directory.mkdir(parents=True)
    if merged is not None:
        shutil.copyfile(merged, directory / _MERGED)
    (directory / "job.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
    save_histograms(collected.histograms, directory / "histograms.npz")
    _write_frames(directory / _HELD_OUT, collected.held_out)
    _write_frames(directory / _SAMPLE, collected.sample)


def run_job(directory: Path, emit: Emit) -> JobOutcome:
    """Calibrate; then plan, build and judge, one plan after the other, until an engine is accepted.

    Raises TaredError; `recalibration.refused` if none is good enough.
    """
    request = JobRequest(**json.loads((directory / "job.json").read_text(encoding="utf-8")))
    steps = _Steps(emit)
    steps.progress("CALIBRATING", 40, 40)(0.0, "calibrating")
    key, state = find_key(), Path(request.state_dir)
    backend = open_backend(request.backend, backend_options(state, request.threads, request.dla))
    model = open_model(ModelSpec.model_validate(request.spec), PrecisionPlan.from_json(request.plan))
    if model.sha256 != request.model_sha256:
        raise CalibrationError(
            "calibration.model",
            f"{model.spec.path} has changed since the daemon started",
            "the model that was observed",
            "wait: the daemon takes up the changed model by itself",
        )
    histograms = load_histograms(directory / "histograms.npz")
    calibration = _calibration(model, backend, directory / _MERGED, histograms, request)
    held_out = _read_frames(directory / _HELD_OUT)
    scene = Scene(calibration, _read_frames(directory / _SAMPLE), held_out[MIN_INFORMATIVE::_TRIED_EVERY])
    del held_out[MIN_INFORMATIVE::_TRIED_EVERY]
    without_int8 = _without_int8(model, backend, request.serving, key)
    start = PrecisionPlan.from_json(request.start or request.plan)
    embedded = open_backend("onnxruntime", BackendOptions(request.threads))
    planning, options = steps.progress("PLANNING", 40, 50), LadderOptions(request.max_loss, request.planning_s)
    ladder = Ladder(model, start, scene, without_int8, embedded, options, planning)
    if request.raising is None:
        plans = ladder.plans()
    else:
        observed = ObservedScene(histograms, calibration, scene.tried)
        raiser = PrecisionRaiser(model.with_plan(ladder.start), observed, without_int8, embedded, planning)
        plans = iter([raiser.plan(PrecisionRaise(**request.raising))])
    least_gain = -NO_WORSE if request.raising is None else RAISED_GAIN
    store = Store(state, key)
    refused: AgentError | None = None
    for plan in plans:
        judge = Judge(
            model.with_plan(plan),
            backend,
            request.serving,
            held_out,
            VerdictLimits(request.max_loss, request.max_slowdown, least_gain),
            state,
            {"calibration": calibration.id, "source": request.source, "ladder": ladder.report()},
            lambda error: _end(emit, error),
            steps.progress("VALIDATING", 80, 90),
        )
        try:
            artefact = build_artefact(
                judge.model,
                backend,
                judge.noting_inputs(store.place),
                steps.progress("BUILDING", 50, 80),
                calibration=calibration,
                judge=judge,
                key=key,
                without_int8=without_int8,
                planned_from="" if plan.essence == model.plan.essence else request.origin,
            )
            return JobOutcome(artefact.path, judge.verdict)
        except AgentError as error:
            if request.raising is not None or error.code != REFUSED or not judge.is_refused_for_precision:
                raise
            ladder.note(error.found)
            refused = error
    raise ladder.refusal(refused)


class _Steps:
    """Reports the steps of a job, which never go back: further plans are built and judged in the step of the first."""

    _ORDER = ("CALIBRATING", "PLANNING", "BUILDING", "VALIDATING")

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._step, self._percent = 0, 0

    def progress(self, step: str, begin: int, end: int) -> Progress:
        """Return what reports the progress of a step, which goes from `begin` to `end` percent of the job."""

        def show(fraction: float, _: str) -> None:
            self._step = max(self._step, self._ORDER.index(step))
            self._percent = max(self._percent, begin + round((end - begin) * fraction))
            self._emit({"step": self._ORDER[self._step], "percent": self._percent})

        return show


def _write_frames(path: Path, frames: Sequence[Array]) -> None:
    """Write one array after the other: their shapes may differ. Raises OSError."""
    with path.open("wb") as file:
        for tensor in frames:
            with io.BytesIO() as buffer:
                np.save(buffer, tensor)  # saving straight to the file would not notice a disk that fills up
                file.write(buffer.getbuffer())


def _read_frames(path: Path) -> list[Array]:
    frames: list[Array] = []
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while file.tell() < end:
            frames.append(np.load(file, allow_pickle=False))
    return frames


def _calibration(
    model: Model, backend: Backend, upload: Path, histograms: Mapping[str, AbsHistogram], request: JobRequest
) -> Calibration:
    """Calibrate from the merged histograms of a fleet, if there is an upload, else from the collected frames.

    Raises CalibrationError, and MessageError for a file that is no upload.
    """
    if not upload.exists():
        return calibrate(model, histograms, request.method, request.frames, request.source, backend)
    content = upload.read_bytes()
    facts = read_facts(content)
    merged = facts.merged or {}
    source = f"merged of {merged.get('boards', '?')} boards"
    calibration = calibrate(model, dict(read_upload(content)), facts.method, facts.frames, source, backend)
    return replace(calibration, merged=merged)


def _end(emit: Emit, error: AgentError) -> NoReturn:
    """End this process with an error as its outcome, though its main thread does not come back."""
    emit(JobOutcome(error=error).as_message())
    os._exit(0)


def _without_int8(model: Model, backend: Backend, serving: str | None, key: bytes | None) -> Mapping[str, str]:
    """Return the nodes without an INT8 kernel, as the build of the engine in service noted them, if it still holds."""
    if serving is None:
        return {}
    manifest = read_artefact(Path(serving), key).manifest
    here = {"model": model.sha256, "backend": dict(backend.describe()), "flags": dict(backend.flags())}
    known: Mapping[str, str] = manifest.get("without_int8", {})
    return known if all(manifest["inputs"].get(name) == value for name, value in here.items()) else {}


def write_reference_job(directory: Path, config: Config, model: Path) -> None:
    """Write a job for the child; `directory` must not exist yet. model: the file to try."""
    directory.mkdir(parents=True)
    request = {
        "spec": {**config.model.model_dump(mode="json"), "path": str(model)},
        "plan": str(config.plan) if config.plan else None,
        "backend": config.backend,
        "threads": config.threads,
        "dla": config.dla,
        "batch": config.batch.frames,
        "state_dir": str(config.state_dir),
    }
    (directory / _REFERENCE).write_text(json.dumps(request), encoding="utf-8")


def build_reference(directory: Path, emit: Emit) -> JobOutcome:
    """Build the reference, and infer one frame.

    Raises TaredError for a file that is no model, or a model that this daemon could not serve.
    """
    request = json.loads((directory / _REFERENCE).read_text(encoding="utf-8"))
    emit({"step": "BUILDING", "percent": 0})
    key, state = find_key(), Path(request["state_dir"])
    backend = open_backend(request["backend"], backend_options(state, request["threads"], request["dla"]))
    plan = read_plan(Path(request["plan"])) if request["plan"] else ALL_INT8
    spec = ModelSpec.model_validate(request["spec"])
    artefact = build_artefact(
        open_model(spec, plan),
        backend,
        Store(state, key).place,
        lambda fraction, _: emit({"step": "BUILDING", "percent": round(100 * fraction)}),
        calibration=None,
        precision=backend.precisions[0],
        key=key,
    )
    with closing(backend.load(artefact.read_engine())) as engine:
        check_batch(request["batch"], engine, spec)
        height, width = network_input(spec, engine.inputs[0]).min_size
        task = VisionTask(spec, engine.inputs, engine.outputs)
        task.infer(engine, np.zeros((height, width, 3), np.uint8))
    return JobOutcome(artefact.path)


def _work(directory: Path, emit: Emit) -> JobOutcome:
    return (build_reference if (directory / _REFERENCE).exists() else run_job)(directory, emit)


if __name__ == "__main__":
    raise SystemExit(run_child(_work))
