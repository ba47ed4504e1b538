"""The recalibration child: calibrate, build and judge one candidate in a process of its own.

`python -m agent.candidate JOB_DIRECTORY` reads what the daemon collected and prints one JSON object per line:
progress `{"step", "percent"}`, and last an Outcome: `{"artefact", "verdict"}` or `{"error": {"code", "found",
"expected", "remedy"}}`. A builder that crashes or eats the memory takes this
process down, never the video.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.build import build_artefact
from agent.config import backend_options
from agent.errors import AgentError
from agent.model import Model, calibrate, open_model
from agent.model_spec import ModelSpec
from agent.raising import RaisedPlan, Raising, Scene
from agent.verdict import MIN_TELLING, HeldOut, Verdict, judge
from calibrate.errors import CalibrationError, TaredError
from calibrate.histogram import AbsHistogram
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.backend import Backend, BackendOptions, Engine, open_backend
from engines.calibration import load_histograms, save_histograms
from engines.seal import find_key
from engines.store import Store, read_artefact

Emit = Callable[[Mapping[str, Any]], None]

_TRIED_EVERY = 4  # held-out frame on which groups are tried: it is not among those that the candidate is judged on


@dataclass(frozen=True)
class JobRequest:
    """What the daemon asks of the child; the collected data lies beside it.

    serving: directory of the artefact in service, None while the reference engine serves. plan: as its `to_json`.
    raised_from: as for `build_artefact`, of the plan or of what it is raised to. raising: a Raising as its `as_dict`.
    max_loss: largest 1 - mean fidelity at which a candidate is good whatever serves now.
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
    nice: int
    plan: str = ALL_INT8.to_json()
    raised_from: str = ""
    raising: dict[str, Any] | None = None
    dla: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with an accepted artefact and its verdict, or with an error."""

    artefact: Path | None = None
    verdict: Verdict | None = None
    error: TaredError | None = None

    def message(self) -> dict[str, Any]:
        """The child's last line."""
        if self.error is not None:
            return {"error": {key: getattr(self.error, key) for key in ("code", "found", "expected", "remedy")}}
        return {"artefact": str(self.artefact), "verdict": asdict(self.verdict) if self.verdict else None}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Outcome:
        """What `message` gave, on the other side of the pipe."""
        if "error" in message:
            return cls(error=AgentError(**message["error"]))
        return cls(Path(message["artefact"]), Verdict(**message["verdict"]))


def write_job(directory: Path, request: JobRequest, histograms: Mapping[str, AbsHistogram], held_out: HeldOut) -> None:
    """Lay down a job for the child; `directory` must not exist yet."""
    directory.mkdir(parents=True)
    (directory / "job.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
    save_histograms(histograms, directory / "histograms.npz")
    with (directory / "held_out.npy").open("wb") as file:  # one array behind the other: their shapes may differ
        for tensor in held_out:
            with io.BytesIO() as buffer:
                np.save(buffer, tensor)  # straight to the file it would not notice a disk that fills up
                file.write(buffer.getbuffer())


def _read_held_out(path: Path) -> list[NDArray[np.float32]]:
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        tensors = []
        while file.tell() < end:
            tensors.append(np.load(file, allow_pickle=False))
        return tensors


def run_job(directory: Path, emit: Emit) -> Outcome:
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
            "restart the daemon",
        )
    histograms = load_histograms(directory / "histograms.npz")
    calibration = calibrate(model, histograms, request.method, request.frames, request.source)
    held_out = _read_held_out(directory / "held_out.npy")
    without_int8 = _without_int8(model, backend, request.serving, key)
    if request.raising is not None:
        scene = Scene(histograms, calibration, held_out[MIN_TELLING::_TRIED_EVERY])
        del held_out[MIN_TELLING::_TRIED_EVERY]
        model = _raised(model, Raising(**request.raising), scene, without_int8, request.threads, emit)
    verdicts: list[Verdict] = []

    def validating(fraction: float, _: str) -> None:
        emit({"step": "VALIDATING", "percent": 80 + round(10 * fraction)})

    def judge_engine(engine: Engine) -> Mapping[str, Any]:
        validating(0.0, "")
        verdict = judge(model, backend, engine, request.serving, held_out, request.max_loss, validating)
        verdicts.append(verdict)
        if not verdict.accepted:
            raise _refusal(verdict)
        return {"verdict": asdict(verdict)}

    artefact = build_artefact(
        model,
        backend,
        Store(state, key).place,
        lambda fraction, _: emit({"step": "BUILDING", "percent": 50 + round(30 * fraction)}),
        calibration=calibration,
        judge=judge_engine,
        key=key,
        without_int8=without_int8,
        raised_from=request.raised_from,
    )
    return Outcome(artefact.path, verdicts[0])


def _raised(
    model: Model, raising: Raising, scene: Scene, without_int8: Mapping[str, str], threads: int, emit: Emit
) -> Model:
    """The model under a plan with more layers float."""

    def ranking(fraction: float, _: str) -> None:
        emit({"step": "RANKING", "percent": 40 + round(10 * fraction)})

    embedded = open_backend("onnxruntime", BackendOptions(threads))
    plan = RaisedPlan(model, scene, without_int8, embedded, ranking).find(raising)
    return model.under(plan)


def _without_int8(model: Model, backend: Backend, serving: str | None, key: bytes | None) -> Mapping[str, str]:
    """The nodes that had no INT8 kernel when the engine in service was built, of the same model by the same builder."""
    if serving is None:
        return {}
    manifest = read_artefact(Path(serving), key).manifest
    here = {"model": model.sha256, "backend": dict(backend.describe()), "flags": dict(backend.flags())}
    known: Mapping[str, str] = manifest.get("without_int8", {})
    return known if all(manifest["inputs"].get(name) == value for name, value in here.items()) else {}


def _refusal(verdict: Verdict) -> AgentError:
    return AgentError(
        "recalibration.refused",
        verdict.reason,
        f"at least {MIN_TELLING} frames with something on them, and a loss within recalibration.max_loss or clearly "
        "below today's",
        "the engine in service serves on; a model that plain INT8 does not suit needs layers kept float",
    )


def main() -> int:
    """Entry point of the child process."""

    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not tear the channel

    def emit(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=channel, flush=True)

    directory = Path(sys.argv[1])
    with contextlib.suppress(OSError):  # where memory runs out, this process goes and never the video
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        os.nice(json.loads((directory / "job.json").read_text(encoding="utf-8"))["nice"])
        outcome = run_job(directory, emit)
    except TaredError as error:
        outcome = Outcome(error=error)
    emit(outcome.message())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
