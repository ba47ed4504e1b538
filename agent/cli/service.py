"""Prepare and examine the machine that tared runs on: `tared install-service` and `tared doctor`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from agent.cli.arguments import command, option

# Characters of the column that shows the doctor's findings. Longer findings push their remedies aside.
_WIDEST = 48


def add_service(commands: Any) -> None:
    """Add the commands that concern a machine, not a model."""
    about = "write the systemd unit and a first configuration; a second time changes nothing"
    install = command(commands, "install-service", _install, about)
    name = "one more service, tared-NAME, with a model and cameras of its own (default: the service tared)"
    option(install, "--name", "NAME", name)
    install.add_argument("--dry-run", action="store_true", help="only list the changes")
    install.add_argument("--uninstall", action="store_true", help="take the unit away; configuration and state stay")
    option(install, "--root", "DIR", "the root folder of an image, instead of this machine", Path, default=Path("/"))
    install.add_argument("--now", action="store_true", help="start the service too")
    drop_ins = install.add_argument_group("additions to the unit, see systemd/tared.service.d; what is there stays")
    drop_ins.add_argument("--csi", action="store_true", help="for csi cameras: sees, and restarts with, nvargus-daemon")
    jit = "no code that is made as it runs; may not suit CUDA"
    drop_ins.add_argument("--jit-hardened", action="store_true", help=jit)
    doctor = command(commands, "doctor", _doctor, "check this machine: its parts, the missing ones, and the remedies")
    about = "also examine the requirements of this configuration (default: the machine alone)"
    option(doctor, "-c --config", "FILE", about, Path)


def _install(options: argparse.Namespace) -> int:
    """Run `tared install-service`: write or remove the systemd unit, and list each step."""
    from agent.system.service_unit import TARED, SystemdService, carry_out, need_root, plan_install, plan_uninstall

    service = TARED if options.name is None else SystemdService.from_name(options.name)
    if not options.dry_run:
        need_root(options.root)
    if options.uninstall:
        steps = plan_uninstall(options.root, service)
    else:
        requested = {"csi.conf": options.csi, "jit-hardened.conf": options.jit_hardened}
        drop_ins = [name for name, is_requested in requested.items() if is_requested]
        steps = plan_install(options.root, drop_ins, options.now, service)
    if not options.dry_run:
        carry_out(steps, options.root)
    if options.json:
        listed = [{"action": step.action, "what": step.what} for step in steps]
        print(json.dumps({"dry_run": options.dry_run, "changed": any(step.changes for step in steps), "steps": listed}))
        return 0
    for step in steps:
        print(f"{step.action:8} {step.what}")
    if options.dry_run:
        print("nothing was changed")
    elif any(step.action == "write" and step.what.endswith(str(service.config_path)) for step in steps):
        print(f"fill in /{service.config_path}, then: systemctl start {service.name}")
    elif any(step.changes for step in steps) and not options.now and not options.uninstall:
        print("restart a running service to apply the change: systemctl restart " + service.name)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    """Run `tared doctor`: list findings with remedies; exit code 1 if a needed part is missing."""
    from agent.doctor.examine import as_dict, examine, healthy

    findings = examine(options.config)
    if options.json:
        print(json.dumps(as_dict(findings)))
    else:
        width = max(len(finding.found) for finding in findings if len(finding.found) <= _WIDEST)
        for finding in findings:
            mark = "ok" if finding.ok else "MISSING" if finding.needed else "no"
            remedy = "" if finding.ok else f"-> {finding.remedy}"
            print(f"{mark:8} {finding.name:18} {finding.found:{width}}  {remedy}".rstrip())
    return 0 if healthy(findings) else 1
