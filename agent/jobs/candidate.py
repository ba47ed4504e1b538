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
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from agent.common.errors import AgentError
from agent.config import Config, backend_options
from agent.contract.histograms import read_facts, read_upload
from agent.jobs.child_process import Emit, JobOutcome, run_child
from agent.models.build import build_artefact
from agent.models.model import Model, calibrate, open_model, read_plan
from agent.planning.precision_raise import ObservedScene, PrecisionRaise, PrecisionRaiser
from agent.validation.comparison import HeldOut
from agent.validation.verdict import MIN_INFORMATIVE, NO_WORSE, RAISED_GAIN, Judge, VerdictLimits
from agent.vision.output_checks import check_batch
from agent.vision.preprocess import network_input
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.calibration import Calibration, load_histograms, save_histograms
from engines.interface import Array, Backend, BackendOptions
from engines.registry import open_backend
from engines.store.artefact import Store, read_artefact
from engines.store.signing import find_key

# Every fourth held-out frame is used to try which layers to raise, and is not used to judge the candidate.
_TRIED_EVERY = 4
_MERGED = "merged.upload"
_REFERENCE = "reference.json"  # the request for the reference of a new model, in the place of job.json


@dataclass(frozen=True)
class JobRequest:
    """The request of the daemon to the child, in job.json; the collected data lies in the same directory.

    Args:
        serving: Directory of the artefact in service; None while the reference engine serves.
        max_loss, max_slowdown: See VerdictLimits. A candidate with more layers float than the engine in service may
            always be slower by MORE_FLOAT_SLOWDOWN.
        plan: As PrecisionPlan.to_json returns it.
        raised_from: As for `build_artefact`, of the plan or of the plan that it is raised to.
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
    raised_from: str = ""
    raising: dict[str, Any] | None = None
    dla: int | None = None
    max_slowdown: float = 1.25


def write_job(
    directory: Path,
    request: JobRequest,
    histograms: Mapping[str, AbsHistogram],
    held_out: HeldOut,
    merged: Path | None = None,
) -> None:
    """Write a job for the child; `directory` must not exist yet. merged: the fleet's calibration that is tried."""
    directory.mkdir(parents=True)
    if merged is not None:
        shutil.copyfile(merged, directory / _MERGED)
    (directory / "job.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
    save_histograms(histograms, directory / "histograms.npz")
    with (directory / "held_out.npy").open("wb") as file:  # one array after the other: their shapes may differ
        for tensor in held_out:
            with io.BytesIO() as buffer:
                np.save(buffer, tensor)  # saving straight to the file would not notice a disk that fills up
                file.write(buffer.getbuffer())


def run_job(directory: Path, emit: Emit) -> JobOutcome:
    """Calibrate, build and judge. Raises TaredError; `recalibration.refused` if the candidate is not good enough."""
    request = JobRequest(**json.loads((directory / "job.json").read_text(encoding="utf-8")))
    emit({"step": "CALIBRATING", "percent": 40})
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
    held_out: list[Array] = []
    with (directory / "held_out.npy").open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while file.tell() < end:
            held_out.append(np.load(file, allow_pickle=False))
    without_int8 = _without_int8(model, backend, request.serving, key)
    if request.raising is not None:
        scene = ObservedScene(histograms, calibration, held_out[MIN_INFORMATIVE::_TRIED_EVERY])
        del held_out[MIN_INFORMATIVE::_TRIED_EVERY]
        raiser = PrecisionRaiser(
            model,
            scene,
            without_int8,
            open_backend("onnxruntime", BackendOptions(request.threads)),
            lambda fraction, _: emit({"step": "PLANNING", "percent": 40 + round(10 * fraction)}),
        )
        model = model.with_plan(raiser.plan(PrecisionRaise(**request.raising)))
    judge = Judge(
        model,
        backend,
        request.serving,
        held_out,
        VerdictLimits(request.max_loss, request.max_slowdown, -NO_WORSE if request.raising is None else RAISED_GAIN),
        state,
        {"calibration": calibration.id, "source": request.source},
        lambda error: _end(emit, error),
        lambda fraction, _: emit({"step": "VALIDATING", "percent": 80 + round(10 * fraction)}),
    )
    store = Store(state, key)

    def place(inputs: Mapping[str, Any]) -> Path:
        judge.inputs = inputs
        return store.place(inputs)

    artefact = build_artefact(
        model,
        backend,
        place,
        lambda fraction, _: emit({"step": "BUILDING", "percent": 50 + round(30 * fraction)}),
        calibration=calibration,
        judge=judge,
        key=key,
        without_int8=without_int8,
        raised_from=request.raised_from,
    )
    return JobOutcome(artefact.path, judge.verdict)


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
