"""The recalibration child: calibrate, build and judge one candidate in a process of its own.

`python -m agent.jobs.candidate JOB_DIRECTORY` reads what the daemon collected and prints one JSON object per line:
progress `{"step", "percent"}`, and last a JobOutcome: `{"artefact", "verdict"}` or `{"error": {"code", "found",
"expected", "remedy"}}`. A builder that crashes or eats the memory takes this
process down, never the video.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from agent.common.errors import AgentError
from agent.config import backend_options
from agent.contract.histograms import read_facts, read_upload
from agent.jobs.child_protocol import Emit, JobOutcome, run_child
from agent.models.build import build_artefact
from agent.models.model import Model, calibrate, open_model
from agent.planning.precision_raise import ObservedScene, PrecisionRaise, PrecisionRaiser
from agent.validation.comparison import HeldOut
from agent.validation.verdict import MIN_TELLING, NO_WORSE, RAISED_GAIN, Judge, VerdictLimits
from agent.vision.spec import ModelSpec
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.calibration import Calibration, load_histograms, save_histograms
from engines.interface import Array, Backend, BackendOptions
from engines.registry import open_backend
from engines.store.artefact import read_artefact
from engines.store.signing import find_key
from engines.store.store import Store

_TRIED_EVERY = 4  # held-out frame on which groups are tried: it is not among those that the candidate is judged on

_MERGED = "merged.upload"


@dataclass(frozen=True)
class JobRequest:
    """What the daemon asks of the child; the collected data lies beside it.

    serving: directory of the artefact in service, None while the reference engine serves. plan: as its `to_json`.
    raised_from: as for `build_artefact`, of the plan or of what it is raised to. raising: a PrecisionRaise as its
    `as_dict`. max_loss: largest 1 - mean fidelity at which a candidate is good whatever serves now. max_slowdown: see
    `VerdictLimits`; a candidate with more layers float than what serves may always be MORE_FLOAT_SLOWDOWN.
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
    """Lay down a job for the child; `directory` must not exist yet. merged: the fleet's calibration that is tried."""
    directory.mkdir(parents=True)
    if merged is not None:
        shutil.copyfile(merged, directory / _MERGED)
    (directory / "job.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
    save_histograms(histograms, directory / "histograms.npz")
    with (directory / "held_out.npy").open("wb") as file:  # one array behind the other: their shapes may differ
        for tensor in held_out:
            with io.BytesIO() as buffer:
                np.save(buffer, tensor)  # straight to the file it would not notice a disk that fills up
                file.write(buffer.getbuffer())


def _read_held_out(path: Path) -> list[Array]:
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        tensors = []
        while file.tell() < end:
            tensors.append(np.load(file, allow_pickle=False))
        return tensors


def run_job(directory: Path, emit: Emit) -> JobOutcome:
    """Do the job. Raises TaredError; `recalibration.refused` for a candidate that is not good enough."""
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
    calibration = _calibration(model, directory / _MERGED, histograms, request)
    held_out = _read_held_out(directory / "held_out.npy")
    without_int8 = _without_int8(model, backend, request.serving, key)
    if request.raising is not None:
        scene = ObservedScene(histograms, calibration, held_out[MIN_TELLING::_TRIED_EVERY])
        del held_out[MIN_TELLING::_TRIED_EVERY]
        model = _raised(model, PrecisionRaise(**request.raising), scene, without_int8, request.threads, emit)
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
        judge.known_as(inputs)
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
    model: Model, merged: Path, histograms: Mapping[str, AbsHistogram], request: JobRequest
) -> Calibration:
    """From the frames that were collected, or from what a fleet has merged, where that lies there.

    Raises CalibrationError, and MessageError for what is no upload.
    """
    if not merged.exists():
        return calibrate(model, histograms, request.method, request.frames, request.source)
    content = merged.read_bytes()
    facts = read_facts(content)
    of = facts.merged or {}
    source = f"merged of {of.get('boards', '?')} boards"
    calibration = calibrate(model, dict(read_upload(content)), facts.method, facts.frames, source)
    return replace(calibration, merged=of)


def _end(emit: Emit, error: AgentError) -> NoReturn:
    """End this process with an outcome, though its main thread does not come back."""
    emit(JobOutcome(error=error).message())
    os._exit(0)


def _raised(
    model: Model,
    raising: PrecisionRaise,
    scene: ObservedScene,
    without_int8: Mapping[str, str],
    threads: int,
    emit: Emit,
) -> Model:
    """The model under a plan with more layers float."""

    def planning(fraction: float, _: str) -> None:
        emit({"step": "PLANNING", "percent": 40 + round(10 * fraction)})

    embedded = open_backend("onnxruntime", BackendOptions(threads))
    plan = PrecisionRaiser(model, scene, without_int8, embedded, planning).find(raising)
    return model.under(plan)


def _without_int8(model: Model, backend: Backend, serving: str | None, key: bytes | None) -> Mapping[str, str]:
    """The nodes that had no INT8 kernel when the engine in service was built, of the same model by the same builder."""
    if serving is None:
        return {}
    manifest = read_artefact(Path(serving), key).manifest
    here = {"model": model.sha256, "backend": dict(backend.describe()), "flags": dict(backend.flags())}
    known: Mapping[str, str] = manifest.get("without_int8", {})
    return known if all(manifest["inputs"].get(name) == value for name, value in here.items()) else {}


if __name__ == "__main__":
    raise SystemExit(run_child(run_job))
