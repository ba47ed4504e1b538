"""Remember the job that was refused, so that nothing is repeated in vain.

A job whose candidate was judged, and not good enough, would end alike if it began again: with the same model, runtime
and settings, on frames of the same scene. `RefusalMemory` keeps the latest one over a restart, with its `Attempt`:
what the candidate came of. agent.control.triggers lets no job begin by itself while it stands and the scene is the
same; each camera's monitor compares the scene with that of the attempt (`CameraMonitor.compare_with_refused`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

from agent.common.errors import AgentError
from agent.common.state_files import parse_state
from agent.config import Config
from agent.jobs.limits import REFUSED
from agent.models.engine_service import EngineService
from agent.monitoring.drift import Regime
from agent.monitoring.regimes import parse_regime
from agent.state.salvage import Row
from agent.state.store import StateStore
from calibrate.errors import TaredError
from engines.store.artefact import fingerprint


@dataclass(frozen=True)
class Attempt:
    """The origins of a candidate: settings and scene.

    Args:
        settings: As `settings_id` returns it.
        scene: The regime that suits its frames best.
    """

    settings: str
    scene: Regime


def settings_id(
    config: Config, service: EngineService, frames: int = 0, method: str = "", max_loss: float | None = None
) -> str:
    """Return a fingerprint of everything a candidate and its verdict depend on but the scene.

    It covers this tared, the runtime, the model with its spec and plan, the engine in service, and the settings.

    Args:
        frames, method, max_loss: Those of a job, where they are not as configured.
    """
    calibration, recalibration = config.calibration, config.recalibration
    return fingerprint(
        {
            "tared": version("tared"),
            "identity": service.identity,
            "serving": service.serving.id,
            "threads": config.threads,
            "held_out": config.observe.held_out,
            "frames": frames or calibration.frames,
            "within_s": calibration.within_s,
            "method": method or calibration.method,
            "max_loss": config.max_loss if max_loss is None else max_loss,
            "max_slowdown": recalibration.max_slowdown,
            "planning": config.planning.model_dump(mode="json"),
            "probation": config.probation.model_dump(mode="json"),
        }
    )


def raising_id(config: Config, service: EngineService) -> str:
    """Return a fingerprint of what decides whether precision can be raised, but for the artefact and the scene."""
    return fingerprint(
        {
            "tared": version("tared"),
            "identity": service.identity,
            "origin": service.precision_origin,
            "max_loss": config.max_loss,
            "planning": config.planning.model_dump(mode="json"),
        }
    )


@dataclass(frozen=True)
class Refusal:
    """An attempt, and why its candidate was refused."""

    attempt: Attempt
    error: AgentError


class RefusalMemory:
    """The latest refusal.

    Attributes:
        settings: `settings_id` as of now; whoever changes what it covers sets it again.
    """

    def __init__(self, state: StateStore) -> None:
        """Read the refusal that an earlier process kept."""
        self.settings = ""
        self._state = state
        self._latest: Refusal | None = state.read("refusal", _parse)

    @property
    def standing(self) -> Refusal | None:
        """The latest refusal, if its settings are those of now; the scene may be another one."""
        latest = self._latest
        return latest if latest is not None and latest.attempt.settings == self.settings else None

    def note(self, attempt: Attempt, error: TaredError) -> bool:
        """Note that a job with this attempt failed; return True if that is a refusal which stands.

        1. Only an error that judges the candidate is a refusal. Others, such as a full disk, may pass.
        2. An attempt with other settings than those of now, by command, says nothing of the jobs that begin by
           themselves.
        """
        if error.code not in REFUSED or attempt.settings != self.settings:
            return False
        words = error.as_dict()
        self._latest = Refusal(attempt, AgentError(**words))
        self._state.write("refusal", [(attempt.settings, json.dumps(asdict(attempt.scene)), json.dumps(words))])
        return True


def _parse(rows: Sequence[Row]) -> Refusal:
    """Raises KeyError, TypeError, ValueError for what `note` has not written."""
    ((settings, scene, error),) = rows
    kept = parse_state(error)
    words = {key: str(kept[key]) for key in ("code", "found", "expected", "remedy")}
    return Refusal(Attempt(settings, parse_regime(parse_state(scene))), AgentError(**words))
