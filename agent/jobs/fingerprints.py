"""Fingerprints of what a job depends on, so that nothing is repeated in vain, and what may differ is tried again."""

from __future__ import annotations

from importlib.metadata import version

from agent.config import Config
from agent.models.engine_service import EngineService
from engines.store.artefact import fingerprint


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
