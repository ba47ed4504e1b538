"""The doctor run on a machine that a test describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from worlds import make_world

from agent.doctor.examine import Finding


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    found = {finding.name: finding for finding in findings}
    assert len(found) == len(findings)
    for finding in findings:
        assert bool(finding.remedy) or finding.ok, f"{finding} names no remedy"
    return found


# ---- what the configuration names


def configured(folder: Path, **sections: Any) -> Path:
    world = make_world(folder, lambda _: 0.5, 1.0)
    (folder / "config.yaml").write_text(yaml.safe_dump({**world.config, **sections}))
    return folder / "config.yaml"
