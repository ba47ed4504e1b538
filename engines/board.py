"""Which board this is: what an engine built here depends on, beside the runtime and the GPU."""

from __future__ import annotations

import platform
from pathlib import Path

_MODEL = Path("/proc/device-tree/model")
_RELEASE = Path("/etc/nv_tegra_release")
_POWER = Path("/var/lib/nvpmodel/status")  # "pmode:0002": what `nvpmodel -q` reports, readable without root


def board() -> dict[str, str]:
    """Machine and system; on a Jetson also model name, L4T release and power mode, where they can be read."""
    facts = {"machine": platform.machine(), "system": platform.platform()}
    for name, text in (("model", _read(_MODEL)), ("l4t", _read(_RELEASE)), ("power_mode", _read(_POWER))):
        if text:
            facts[name] = text.partition("\n")[0].strip("\0 ")
    return facts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
