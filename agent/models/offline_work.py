"""Check work that was done offline before the board begins with it: `start` and `calibration.file` of config.yaml.

`OfflineWork` names an artefact of `tared build`, or a calibration of `tared calibrate`. `OfflineWork.load` checks it as
the store checks its own artefacts: seal and signature, model, input, plan, runtime. The daemon does so before a job,
and the job's child process for its own use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from agent.common.errors import AgentError
from agent.models.model import Model, check_calibration, check_ranges
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, load_calibration
from engines.errors import EngineError
from engines.interface import Backend
from engines.store.artefact import Artefact, check_runtime, fingerprint, read_artefact
from engines.store.signing import canonical

START, CALIBRATION_FILE = "start", "calibration.file"


@dataclass(frozen=True)
class LoadedWork:
    """Offline work that has passed its checks.

    Args:
        calibration: Takes the place of one of the board's own frames.
        model: The model under the plan to begin with.
        artefact: What `start` names; None for a calibration alone.
        misfit: Why the engine of the artefact does not serve here, so that one is built again.
    """

    calibration: Calibration
    model: Model
    artefact: Artefact | None = None
    misfit: EngineError | None = None

    @property
    def content(self) -> str:
        """16 hex digits over all that a candidate follows from."""
        return fingerprint(self.artefact.manifest) if self.artefact is not None else self.calibration.id


@dataclass(frozen=True)
class OfflineWork:
    """The offline work that a setting of config.yaml names. setting: START or CALIBRATION_FILE."""

    setting: str
    path: Path

    def load(self, model: Model, backend: Backend, key: bytes | None) -> LoadedWork:
        """Read and check it.

        Args:
            model: The model under the configured plan.
            key: Has signed the artefact; None accepts any signer.

        Raises EngineError as `read_artefact`, and:
            artefact.precision  a float artefact
            artefact.model      an artefact of another model
            plan.node           a plan of another model
        Raises CalibrationError as `load_calibration`, `check_calibration`, `check_ranges` and
        `PrecisionPlan.from_json`.
        """
        if self.setting == CALIBRATION_FILE:
            calibration = load_calibration(self.path)
            check_calibration(model, calibration)
            check_ranges(model, calibration)
            return LoadedWork(calibration, model)
        artefact = read_artefact(self.path, key)
        inputs = artefact.manifest["inputs"]
        if inputs.get("precision") != "int8":
            found, remedy = f"an artefact of precision {inputs.get('precision')}", "build it with --calibration"
            raise EngineError("artefact.precision", found, "int8 of a calibration", remedy)
        if inputs.get("model") != model.sha256:
            found = f"an artefact of model {str(inputs.get('model'))[:12]}"
            expected = f"one of {model.spec.path.name}, {model.sha256[:12]}"
            raise EngineError("artefact.model", found, expected, "build this model with 'tared build'")
        calibration = load_calibration(artefact.path / "calibration.json")
        plan = PrecisionPlan.from_json(artefact.read_file("plan.json").decode(errors="replace"))
        planned = model.with_plan(_plan_to_begin_with(model, plan))
        check_calibration(planned, calibration)
        check_ranges(planned, calibration)
        return LoadedWork(calibration, planned, artefact, _misfit(artefact, planned, backend))

    def refusal(self, error: TaredError) -> AgentError:
        """Return the error that reports why the work is not used."""
        return not_used(self.setting, self.path, error)


def not_used(setting: str, path: Path, error: TaredError) -> AgentError:
    """Return the error for a setting of config.yaml whose file is not used."""
    found, remedy = f"{setting}: {path} is not used: {error.found}", f"{error.remedy}; the board goes on without it"
    return AgentError(error.code, found, error.expected, remedy)


def _plan_to_begin_with(model: Model, plan: PrecisionPlan) -> PrecisionPlan:
    """Return the plan of an artefact under today's rules, or the configured one, which takes precedence."""
    rules = model.rules
    is_configured = model.plan.evidence or model.plan.essence != PrecisionPlan(rules.floats).essence
    return model.plan if is_configured else replace(plan, floats=rules.apply(plan.floats))


def _misfit(artefact: Artefact, planned: Model, backend: Backend) -> EngineError | None:
    """Return why the engine cannot serve here under this plan; None if it can."""
    remedy = "wait: the artefact is built again from its calibration"
    try:
        check_runtime(artefact, backend.describe())
    except EngineError as error:
        return EngineError(error.code, error.found, error.expected, remedy)
    if canonical(artefact.manifest["inputs"].get("plan", {})) != canonical(planned.plan.essence):
        found, expected = f"{artefact.path} was built under another plan", "the configured plan and precision rules"
        return EngineError("artefact.plan", found, expected, remedy)
    return None
