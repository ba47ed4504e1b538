"""Write what a job's child process works on: the request, and the collected data beside it in the job's directory.

The daemon writes, agent.jobs.candidate reads. The daemon imports this module alone: planning and building are the
child's, with the libraries that they need.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agent.collection.collection import Collected
from calibrate.plan import ALL_INT8
from engines.calibration import save_histograms
from engines.interface import Array

if TYPE_CHECKING:  # the child has the request alone
    from agent.config import Config

JOB, HISTOGRAMS, MERGED, HELD_OUT, SAMPLE = "job.json", "histograms.npz", "merged.upload", "held_out.npy", "sample.npy"
REFERENCE = "reference.json"  # the request for the reference of a new model, in the place of JOB


@dataclass(frozen=True)
class JobRequest:
    """The request of the daemon to the child, in job.json; the collected data lies in the same directory.

    Args:
        serving: Directory of the artefact in service; None while the float engine serves.
        float_engine: Directory of that one's artefact; None while INT8 serves: a job that needs one builds it.
        max_loss, max_slowdown: See VerdictLimits. A candidate with more layers float than the engine in service may
            always be slower by MORE_FLOAT_SLOWDOWN.
        plan: The configured plan, whose tensors were observed; as PrecisionPlan.to_json returns it.
        start: The plan in service, with which planning begins; empty: the configured one.
        offline: The fields of OfflineWork, which takes the place of the collected histograms; None: they count.
        origin: EngineService.precision_origin, for an artefact of another plan than the configured one.
        planning_s: As LadderOptions.budget_s.
        raising: The fields of PrecisionRaise; None: precision is not raised.
        reference: As in BackendOptions.
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
    offline: dict[str, str] | None = None
    dla: int | None = None
    reference: Literal["own", "onnxruntime"] = "own"
    max_slowdown: float = 1.25
    float_engine: str | None = None


def write_job(
    directory: Path,
    request: JobRequest,
    collected: Collected,
    merged: Path | None = None,
) -> None:
    """Write a job for the child; `directory` must not exist yet. merged: the fleet's calibration that is tried."""
    directory.mkdir(parents=True)
    if merged is not None:
        shutil.copyfile(merged, directory / MERGED)
    (directory / JOB).write_text(json.dumps(asdict(request)), encoding="utf-8")
    save_histograms(collected.histograms, directory / HISTOGRAMS, collected.extremes)
    _write_frames(directory / HELD_OUT, collected.held_out)
    _write_frames(directory / SAMPLE, collected.sample)


def write_reference_job(
    directory: Path, config: Config, model: Path, serving: Path, held_out: Sequence[Array], accepted: bool = False
) -> None:
    """Write a job for the child; `directory` must not exist yet.

    Args:
        model: The file to try.
        serving: Directory of the artefact in service.
        held_out: Network inputs of the model in service, on which the answers of both are compared.
        accepted: The owner accepts that the new model answers otherwise.
    """
    directory.mkdir(parents=True)
    _write_frames(directory / HELD_OUT, held_out)
    request = {
        "spec": {**config.model.model_dump(mode="json"), "path": str(model)},
        "plan": str(config.plan) if config.plan else None,
        "backend": config.backend,
        "threads": config.threads,
        "dla": config.dla,
        "batch": config.batch.frames,
        "state_dir": str(config.state_dir),
        "serving": str(serving),
        "max_loss": None if accepted else config.max_loss,
    }
    (directory / REFERENCE).write_text(json.dumps(request), encoding="utf-8")


def _write_frames(path: Path, frames: Sequence[Array]) -> None:
    """Write one array after the other: their shapes may differ. Raises OSError."""
    with path.open("wb") as file:
        for tensor in frames:
            with io.BytesIO() as buffer:
                np.save(buffer, tensor)  # saving straight to the file would not notice a disk that fills up
                file.write(buffer.getbuffer())


def read_frames(path: Path) -> list[Array]:
    """Return what `_write_frames` wrote. Raises OSError, ValueError."""
    frames: list[Array] = []
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while file.tell() < end:
            frames.append(np.load(file, allow_pickle=False))
    return frames
