"""Examine a machine for `tared doctor`: what there is, what is missing, and the remedy."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.config import Config, load_config
from agent.doctor.configured import examine_configured, examine_unconfigured
from agent.doctor.finding import Finding
from agent.doctor.machine import examine_machine
from agent.doctor.service import as_the_service, examine_service
from agent.doctor.software import examine_gpu, examine_software
from agent.system.service_unit import TARED, SystemdService
from calibrate.errors import TaredError

__all__ = ["Finding", "as_dict", "examine", "healthy"]


def examine(config_path: Path | None = None, root: Path = Path("/")) -> list[Finding]:
    """Examine everything the daemon uses, within seconds.

    Args:
        config_path: Also try everything that this configuration names. That of an installed service is tried with the
            service's environment.
        root: Where the machine's file system starts.
    """
    findings: list[Finding] = []
    config: Config | None = None
    service = SystemdService.from_config(config_path, root) if config_path is not None else None
    with as_the_service(root, service) if service is not None else nullcontext():
        if config_path is not None:
            try:
                config = load_config(config_path)
                findings.append(Finding("configuration", str(config_path), True, True))
            except TaredError as error:
                found = " ".join(error.found.split())
                findings.append(Finding("configuration", found, False, True, error.remedy))
        needs_gpu = config is not None and config.backend == "tensorrt"
        has_csi = config is not None and any(camera.source.startswith("csi:") for camera in config.every_camera)
        return [
            *findings,
            *examine_machine(root, config, service is not None),
            *examine_software(config.backend if config is not None else ""),
            *examine_gpu(root, needs_gpu),
            *(examine_configured(config, service is not None) if config is not None else examine_unconfigured(root)),
            *examine_service(root, service or TARED, csi=has_csi),
        ]


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    """Return the object that `tared doctor --json` prints."""
    return {"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}


def healthy(findings: list[Finding]) -> bool:
    """Return True if everything needed is there."""
    return all(finding.ok for finding in findings if finding.needed)
