"""Examine the service on this machine: is it installed, as it ships, and running?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.common.errors import AgentError
from agent.doctor.finding import Finding
from agent.system.board import read_text
from agent.system.service_unit import TARED, SystemdService, unit_text
from engines.store.signing import NO_KEY

_SYSTEMCTL_S = 10.0
_LOADED = re.compile(r"^LoadCredential=([^:\n]+):(.+)$", re.MULTILINE)


def examine_service(root: Path, service: SystemdService = TARED, csi: bool = False) -> list[Finding]:
    """Examine the unit under `root`, and its state where systemd runs. csi: the service has a csi camera."""
    installed = _unit(root, service, csi)
    if not installed.ok and not (root / service.unit_path).exists():
        return [installed]
    return [installed, _state(root, service)]


def _unit(root: Path, service: SystemdService, csi: bool) -> Finding:
    path, config = root / service.unit_path, root / service.config_path
    own = "" if service == TARED else f" --name {service.name.removeprefix(f'{TARED.name}-')}"
    remedy = f"sudo tared install-service{own}"
    if not path.exists():
        return Finding("service", "not installed", False, False, remedy)
    if not config.exists():
        return Finding("service", f"no {config}", False, False, remedy)
    if closed := _closed_path(config):
        found = f"{closed} cannot be read by the user of the service"
        return Finding("service", found, False, False, f"sudo chmod o+{'rx' if closed.is_dir() else 'r'} {closed}")
    if lacking := _lacking_groups(read_text(path), root):
        found = f"no group {', '.join(lacking)}, which systemd needs to start the service"
        return Finding("service", found, False, False, f"sudo groupadd --system {lacking[0]}")
    try:
        same = read_text(path) == unit_text(root, service).strip()
    except AgentError as error:
        return Finding("service", error.found, False, False, error.remedy)
    if csi and not (root / service.drop_ins_path / "csi.conf").exists():
        found = "no csi.conf for csi cameras: the service does not see nvargus-daemon"
        return Finding("service", found, False, False, f"{remedy} --csi")
    found = f"{path}, {'as it ships' if same else 'not as this tared ships it'}"
    return Finding("service", found, same, False, "" if same else f"{remedy}; --dry-run shows what would change")


def _closed_path(config: Path) -> Path | None:
    """Return the folder or the file of the configuration, if not every user may read it."""
    closed = (path for path, need in ((config.parent, 0o005), (config, 0o004)) if path.stat().st_mode & need != need)
    return next(closed, None)


def _lacking_groups(unit: str, root: Path) -> list[str]:
    needed = {name for line in re.findall(r"^SupplementaryGroups=(.*)$", unit, re.MULTILINE) for name in line.split()}
    return sorted(needed - {line.partition(":")[0] for line in read_text(root / "etc/group").splitlines()})


def _state(root: Path, service: SystemdService) -> Finding:
    systemctl = shutil.which("systemctl")
    if systemctl is None or not (root / "run/systemd/system").is_dir():
        return Finding(
            "service state",
            "no systemd runs here",
            False,
            False,
            "run 'tared run -c config.yaml' under another service manager",
        )
    command = [systemctl, "is-active", service.unit]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SYSTEMCTL_S, check=False)
    except subprocess.TimeoutExpired:
        found = f"systemd did not answer within {_SYSTEMCTL_S:.0f} s"
        return Finding("service state", found, False, False, "see journalctl -b, and whether the disk still answers")
    state = done.stdout.strip() or done.stderr.strip() or "unknown"
    remedy = f"systemctl start {service.name}; journalctl -u {service.name} says why it ended"
    return Finding("service state", state, state == "active", False, "" if state == "active" else remedy)


@contextmanager
def as_the_service(root: Path, service: SystemdService) -> Iterator[None]:
    """Give this process the environment that systemd gives to the service (systemd.exec(5)), while the block runs.

    It has the credentials that this user may read; root may read all.
    """
    with tempfile.TemporaryDirectory(prefix="tared-doctor-") as folder:
        for name, file in _LOADED.findall(read_text(root / service.unit_path)):
            _provide_credential(root / file.lstrip("/"), Path(folder, name))
        variables = {"STATE_DIRECTORY": str(root / service.state_path), "CREDENTIALS_DIRECTORY": folder}
        previous = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in previous.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _provide_credential(file: Path, to: Path) -> None:
    """Make a link, since a secret is not copied; or the unit's default for a file that is missing."""
    if os.access(file, os.R_OK):
        to.symlink_to(file)
    elif os.access(file.parent, os.X_OK) and not file.exists():
        to.write_bytes(NO_KEY)
