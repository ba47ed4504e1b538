"""Calibrate, build and judge one candidate in a child process; or build a new model's float reference there.

`python -m agent.jobs.candidate JOB_DIRECTORY` reads what the daemon has written there, and reports as
agent.jobs.child_process defines it. A builder that crashes or exhausts the memory takes this process down, never the
video. Whether a new model can be used is found out by building its float reference, which the daemon then loads.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from agent.common.clock import Clock
from agent.common.errors import AgentError
from agent.jobs.child_process import Emit, JobOutcome, run_child
from agent.jobs.request import HELD_OUT, HISTOGRAMS, JOB, MERGED, REFERENCE, SAMPLE, JobRequest, read_frames
from agent.models.build import adopt_artefact, build_artefact
from agent.models.model import Model, calibrate, open_model, read_plan
from agent.models.offline_work import LoadedWork, OfflineWork
from agent.planning.costs import PlanBuilder
from agent.planning.kept_costs import KeptCosts
from agent.planning.ladder import REFUSED, Ladder, LadderOptions, Scene
from agent.planning.raising import PrecisionRaise
from agent.validation.model_change import model_change
from agent.validation.pictures import differing_pictures
from agent.validation.verdict import MIN_INFORMATIVE, NO_WORSE, RAISED_GAIN, Judge, VerdictLimits
from agent.vision.output_checks import check_batch
from agent.vision.preprocess import network_input
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from calibrate.errors import CalibrationError, TaredError
from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.calibration import Calibration, load_histograms
from engines.errors import EngineError
from engines.interface import Backend, Engine, Progress
from engines.registry import open_backend, open_simulator, options_for
from engines.store.artefact import Artefact, Store, read_artefact
from engines.store.signing import find_key

_TRIED_EVERY = 4  # one held-out frame in so many tries repairs and plans, and does not judge the candidate


def run_job(directory: Path, emit: Emit) -> JobOutcome:
    """Calibrate; then plan, build and judge, one plan after the other, until an engine is accepted.

    With offline work the calibration is there, and with an artefact the plan, and the engine where it serves here.

    The outcome has the error `recalibration.refused` if none is good enough. Raises TaredError for other failures.
    """
    request = JobRequest(**json.loads((directory / JOB).read_text(encoding="utf-8")))
    steps = _Steps(emit)
    steps.progress("CALIBRATING", 40, 40)(0.0, "calibrating")
    key, state = find_key(), Path(request.state_dir)
    runtime = options_for(state, request.threads, request.dla, request.reference)
    backend = open_backend(request.backend, runtime)
    model = open_model(ModelSpec.model_validate(request.spec), PrecisionPlan.from_json(request.plan))
    if model.sha256 != request.model_sha256:
        raise CalibrationError(
            "calibration.model",
            f"{model.spec.path} has changed since the daemon started",
            "the model that was observed",
            "wait until the daemon loads the changed model by itself",
        )
    offline: LoadedWork | None = None
    if request.offline is not None:
        offline = OfflineWork(request.offline["setting"], Path(request.offline["path"])).load(model, backend, key)
    calibration = offline.calibration if offline is not None else _calibrate(model, backend, directory, request)
    held_out = read_frames(directory / HELD_OUT)
    scene = Scene(calibration, read_frames(directory / SAMPLE), [held_out[MIN_INFORMATIVE::_TRIED_EVERY]])
    del held_out[MIN_INFORMATIVE::_TRIED_EVERY]
    without_int8 = _without_int8(model, backend, request.serving, key)
    start = PrecisionPlan.from_json(request.start or request.plan)
    embedded = open_simulator(backend, request.threads)
    raising = PrecisionRaise(**request.raising) if request.raising is not None else None
    options = LadderOptions(request.max_loss, request.planning_s, raising)
    builder = PlanBuilder(model, calibration, backend, without_int8)
    costs = KeptCosts(builder, scene.sample, runtime, lambda warning: emit({"warning": warning}))
    planning = steps.progress("PLANNING", 40, 50)
    spent = _CpuClock(request.threads)
    ladder = Ladder(model, start, scene, without_int8, embedded, options, planning, costs.find, clock=spent)
    only: PrecisionPlan | None = None
    if offline is not None and offline.artefact is not None:  # it was built under this plan
        only = offline.model.plan
    elif (directory / MERGED).exists():  # a fleet's calibration has to do under the plan that serves
        only = ladder.start
    least_gain = -NO_WORSE if raising is None else RAISED_GAIN
    store = Store(state, key)

    def load_float() -> Engine:
        if request.float_engine is not None:
            return backend.load(read_artefact(Path(request.float_engine), key).read_engine())
        wanted = model.build_request(model.master, backend.precisions[-1], calibration.seen)
        return backend.load(backend.build(wanted).engine)

    slow = refused = first = None
    for plan in ladder.plans() if only is None else [only]:
        judge = Judge(
            model.with_plan(plan),
            backend,
            request.serving,
            held_out,
            VerdictLimits(request.max_loss, request.max_slowdown, least_gain, backend.int8_must_gain),
            state,
            {"calibration": calibration.id, "source": request.source, "ladder": ladder.report(plan)},
            lambda error: _end(emit, error),
            steps.progress("VALIDATING", 80, 90),
            load_float if backend.int8_must_gain else None,
        )
        planned_from = "" if plan.essence == model.plan.essence else request.origin
        try:
            artefact = _adopted(offline, judge, store, planned_from) or build_artefact(
                judge.model,
                backend,
                judge.noting_inputs(store.place),
                steps.progress("BUILDING", 50, 80),
                calibration=calibration,
                judge=judge,
                key=key,
                without_int8=ladder.without_int8,
                planned_from=planned_from,
            )
            _leave_report(artefact, judge, emit)
            return JobOutcome(artefact.path, judge.verdict)
        except AgentError as error:
            first = first or judge.verdict
            if only is not None or error.code != REFUSED or not judge.is_refused_for_precision:
                return JobOutcome(None, first, error)
            ladder.note(error.found, is_too_loud=not judge.is_refused_for_gain)
            refused = error
            if judge.is_refused_for_gain:
                if slow is not None:  # the fastest plan of the search: those after it are slower
                    break
                slow = error
    return JobOutcome(None, first, slow or ladder.refusal(refused))


def _leave_report(artefact: Artefact, judge: Judge, emit: Emit) -> None:
    """Keep the report on an accepted engine. One that fails is a warning, and no failure of the job."""
    from agent.reports.artefact import artefact_report, keep_report  # what draws it takes long to import

    try:
        pictures = differing_pictures(judge.differing, judge.model.spec)
        keep_report(judge.state_dir, artefact.id, artefact_report(artefact, pictures))
    except (OSError, TaredError) as error:
        emit({"warning": f"no report on the engine: {error}"})


class _CpuClock(Clock):
    """The CPU time per thread of this process. A child that is stopped, as the board is too hot, spends none."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def monotonic_s(self) -> float:
        return time.process_time() / self._threads

    def monotonic_ns(self) -> int:
        return round(1e9 * self.monotonic_s())


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


def _adopted(offline: LoadedWork | None, judge: Judge, store: Store, planned_from: str) -> Artefact | None:
    """Take over the artefact of offline work whose engine serves here; None where an engine has to be built.

    Raises as `adopt_artefact`.
    """
    if offline is None or offline.artefact is None or offline.misfit is not None:
        return None
    place = judge.noting_inputs(store.place)
    try:
        return adopt_artefact(
            offline.artefact, judge.backend, place, judge=judge, key=store.key, planned_from=planned_from
        )
    except EngineError as error:
        if error.code != "engine.unreadable":  # what another library refuses that calls itself the same version
            raise
        return None


def _calibrate(model: Model, backend: Backend, directory: Path, request: JobRequest) -> Calibration:
    """Calibrate with the merged histograms of a fleet, if there is an upload, or else with the collected frames.

    A fleet's uploads have no extremes: the divided tensors of the plan in service keep their ranges.

    Raises CalibrationError, and MessageError for a file that is no upload.
    """
    upload = directory / MERGED
    if not upload.exists():
        histograms, extremes = load_histograms(directory / HISTOGRAMS)
        return calibrate(model, histograms, request.method, request.frames, request.source, backend, extremes)
    from agent.contract.histograms import read_facts, read_upload  # its schemas take a tenth of a child's imports

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


def build_reference(directory: Path, emit: Emit) -> JobOutcome:
    """Build the reference of a new model, and compare its answers with those of the engine in service.

    Raises TaredError for a file that is no model, or a model that this daemon could not serve; as `model_change`, and
    `model.answers` for a change that the owner has not accepted.
    """
    request = json.loads((directory / REFERENCE).read_text(encoding="utf-8"))
    steps = _Steps(emit)
    building = steps.progress("BUILDING", 0, 80)
    building(0.0, "reading")
    key, state = find_key(), Path(request["state_dir"])
    backend = open_backend(request["backend"], options_for(state, request["threads"], request["dla"]))
    plan = read_plan(Path(request["plan"])) if request["plan"] else ALL_INT8
    spec = ModelSpec.model_validate(request["spec"])
    artefact = build_artefact(
        open_model(spec, plan),
        backend,
        Store(state, key).place,
        building,
        calibration=None,
        precision=backend.precisions[0],
        key=key,
    )
    with closing(backend.load(artefact.read_engine())) as engine:
        check_batch(request["batch"], engine, spec)
        height, width = network_input(spec, engine.inputs[0]).min_size
        task = VisionTask(spec, engine.inputs, engine.outputs)
        task.infer(engine, np.zeros((height, width, 3), np.uint8))
        steps.progress("VALIDATING", 80, 90)(0.0, "comparing")
        held_out = read_frames(directory / HELD_OUT)
        with closing(backend.load(read_artefact(Path(request["serving"]), key).read_engine())) as serving:
            change = model_change(spec, engine, serving, held_out)
    if request["max_loss"] is not None:
        change.check(request["max_loss"])
    if change.agreement < 1.0 or not change.frames:
        emit({"warning": change.text})
    return JobOutcome(artefact.path)


def _work(directory: Path, emit: Emit) -> JobOutcome:
    return (build_reference if (directory / REFERENCE).exists() else run_job)(directory, emit)


if __name__ == "__main__":
    raise SystemExit(run_child(_work))
