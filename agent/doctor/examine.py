"""`tared doctor`: what this machine has, what it lacks, and the remedy, subject by subject."""

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
    """Look at everything the daemon uses; with a configuration also at all that it names, for real and within seconds.

    The configuration of an installed service is looked at as the service sees it. root: where the machine's file
    system starts.
    """
    service = SystemdService.of_config(config_path, root) if config_path is not None else None
    with as_the_service(root, service) if service is not None else nullcontext():
        return _examine(config_path, root, service)


def _examine(config_path: Path | None, root: Path, service: SystemdService | None) -> list[Finding]:
    findings: list[Finding] = []
    config: Config | None = None
    if config_path is not None:
        try:
            config = load_config(config_path)
            findings.append(Finding("configuration", str(config_path), True, True))
        except TaredError as error:
            found = " ".join(error.found.split())
            findings.append(Finding("configuration", found, False, True, error.remedy))
    wants_gpu = config is not None and config.backend == "tensorrt"
    sources = [camera.source for camera in config.every_camera] if config is not None else []
    return [
        *findings,
        *examine_machine(root, config, service is not None),
        *examine_software(),
        *examine_gpu(root, wants_gpu),
        *(examine_configured(config, service is not None) if config is not None else examine_unconfigured(root)),
        *examine_service(root, service or TARED, csi=any(source.startswith("csi:") for source in sources)),
    ]


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    """The object that `tared doctor --json` prints."""
    return {"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}


def healthy(findings: list[Finding]) -> bool:
    """Whether everything needed is there."""
    return all(finding.ok for finding in findings if finding.needed)
