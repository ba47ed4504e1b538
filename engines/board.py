"""Identify this board: an engine built here depends on it, besides the runtime and the GPU."""

from __future__ import annotations

import platform
from pathlib import Path

_MODEL = Path("/proc/device-tree/model")
_RELEASE = Path("/etc/nv_tegra_release")
_CPUS = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")
_POWER = Path("/var/lib/nvpmodel/status")  # "pmode:0002": what `nvpmodel -q` reports, readable without root


def board() -> dict[str, str]:
    """Return machine, system and NVIDIA's driver; of a Jetson model name, L4T release and power mode, if readable."""
    facts = {"machine": platform.machine(), "system": platform.platform()}
    files = {"model": _MODEL, "l4t": _RELEASE, "driver": _DRIVER, "power_mode": _POWER}
    for name, text in ((name, _read(path)) for name, path in files.items()):
        if text:
            facts[name] = text.partition("\n")[0].strip("\0 ")
    return facts


def processor() -> str:
    """Return the model of the CPU, as Linux names it; empty where it does not."""
    return _first_of("model name", "CPU part")


def instructions() -> str:
    """Return the instructions that the CPU has beyond the least, as Linux lists them; empty where it does not."""
    return _first_of("flags", "Features")


def _first_of(*keys: str) -> str:
    lines = (line.partition(":") for line in _read(_CPUS).splitlines())
    names = {key.strip(): value.strip() for key, _, value in lines}
    return next((names[key] for key in keys if names.get(key)), "")


def is_jetson() -> bool:
    """Return True if this board has a Jetson's media hardware, and the release of its software that drives it."""
    return bool(_read(_RELEASE))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
