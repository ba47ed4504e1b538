"""Try a new model in a child process: build its float reference, which the daemon then loads.

`python -m agent.jobs.reference JOB_DIRECTORY` reports as agent.jobs.child_process defines it.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np

from agent.config import Config, backend_options
from agent.jobs.child_process import Emit, JobOutcome, run_child
from agent.models.build import build_artefact
from agent.models.model import open_model, read_plan
from agent.vision.output_checks import check_batch
from agent.vision.preprocess import network_input
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from calibrate.plan import ALL_INT8
from engines.registry import open_backend
from engines.store.artefact import Store
from engines.store.signing import find_key


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
    (directory / "job.json").write_text(json.dumps(request), encoding="utf-8")


def build_reference(directory: Path, emit: Emit) -> JobOutcome:
    """Build the reference, and infer one frame.

    Raises TaredError for a file that is no model, or a model that this daemon could not serve.
    """
    request = json.loads((directory / "job.json").read_text(encoding="utf-8"))
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


if __name__ == "__main__":
    raise SystemExit(run_child(build_reference))
