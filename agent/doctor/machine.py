"""Examine the board and its system: release, power mode, clock, headroom, memory, disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import psutil

from agent.config import Config, HeadroomConfig, StoreConfig
from agent.doctor.finding import Finding, gib
from agent.jobs.headroom import Headroom
from agent.system.board import BoardState, is_synchronised, read_text
from engines.board import board

_MIN_FREE_BYTES = 1 << 30
_OLDEST_L4T = 36  # JetPack 6; the one before has TensorRT 8


def examine_machine(root: Path, config: Config | None, service: bool = False) -> list[Finding]:
    """Examine the machine under `root`.

    Args:
        config: Names the state directory, and what a job needs to spare.
        service: The configuration is the installed service's, whose state directory systemd makes.
    """
    state = BoardState(root)
    jetson = state.read().is_jetson
    return [
        _board(),
        _system(root),
        *([_jetpack(root), _power_mode(root, state)] if jetson else []),
        _clock(),
        _headroom(state, config.recalibration.headroom if config else HeadroomConfig()),
        _memory(),
        *_disk(config, service),
    ]


def _board() -> Finding:
    facts = board()
    return Finding("board", facts.get("model", f"{facts['machine']}, no Jetson"), True, True)


def _system(root: Path) -> Finding:
    named = re.search(r'^PRETTY_NAME="?([^"\n]+)', read_text(root / "etc/os-release"), re.MULTILINE)
    return Finding("system", named[1] if named else "unknown", True, False)


def _jetpack(root: Path) -> Finding:
    """Examine the release of Jetson Linux, which every image has, and the package with CUDA and TensorRT."""
    release = re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", read_text(root / "etc/nv_tegra_release"))
    package = re.search(
        r"^Package: nvidia-jetpack\nStatus: install ok installed\n(?:.+\n)*?Version: (\S+)",
        read_text(root / "var/lib/dpkg/status"),
        re.MULTILINE,
    )
    found = f"L4T {release[1]}.{release[2]}" if release else "an unknown release of Jetson Linux"
    if release is not None and int(release[1]) < _OLDEST_L4T:
        remedy = "flash JetPack 6 or later: tared cannot use TensorRT 8; backend onnxruntime works"
        return Finding("jetpack", found, False, False, remedy)
    if package is None:
        remedy = "sudo apt install nvidia-jetpack, for CUDA and TensorRT"
        return Finding("jetpack", f"{found}, without nvidia-jetpack", False, False, remedy)
    return Finding("jetpack", f"{package[1]}, {found}", True, False)


def _power_mode(root: Path, state: BoardState) -> Finding:
    """Examine power mode and clocks.

    Only root can ask jetson_clocks; but it fixes every clock, and any user can see that.
    """
    mode = state.read().power_mode
    if mode is None:
        return Finding("power mode", "unknown", False, False, "sudo nvpmodel -q")
    policies = sorted(root.glob("sys/devices/system/cpu/cpufreq/policy*"))
    ranges = [(read_text(policy / "scaling_min_freq"), read_text(policy / "scaling_max_freq")) for policy in policies]
    fixed = bool(ranges) and all(low == high != "" for low, high in ranges)
    return Finding("power mode", f"{mode}, clocks {'fixed (jetson_clocks)' if fixed else 'by load'}", True, False)


def _clock() -> Finding:
    """Ask the kernel, which every time service informs, and any user may ask."""
    synchronised = is_synchronised()
    remedy = (
        "sudo timedatectl set-ntp true; until then capture times are wrong, and commands from elsewhere are refused"
    )
    found = "synchronised" if synchronised else "not synchronised"
    return Finding("clock", found, synchronised, False, "" if synchronised else remedy)


def _headroom(state: BoardState, limits: HeadroomConfig) -> Finding:
    reason = Headroom(limits, state).reason_to_wait()
    remedy = "cool the board, end other work on it, or change recalibration.headroom; jobs wait meanwhile"
    return Finding("headroom", reason or "enough for a job", not reason, False, remedy if reason else "")


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    remedy = "end other programs, or add swap: building an engine needs room"
    return Finding("memory available", gib(available), available >= _MIN_FREE_BYTES, True, remedy)


def _disk(config: Config | None, service: bool) -> list[Finding]:
    """Examine the file system of state_dir, which need not exist yet."""
    folder = config.state_dir if config else Path()
    while not _exists(folder):
        folder = folder.absolute().parent
    free = shutil.disk_usage(folder).free
    reserve = (config.store if config else StoreConfig()).reserve_bytes
    least = max(_MIN_FREE_BYTES, 2 * reserve)
    remedy = f"free at least {gib(least)} for artefacts: tared store gc"
    findings = [Finding("disk free", gib(free), free >= least, True, "" if free >= least else remedy)]
    if config is not None:
        read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
        writable = not read_only and (service or os.access(folder, os.W_OK))
        found = f"{folder}: {'writable' if writable else 'read-only' if read_only else 'not writable by this user'}"
        remedy = "mount it writable, correct state_dir, or run 'tared doctor' as the user of the daemon"
        findings.append(Finding("state directory", found, writable, True, "" if writable else remedy))
    return findings


def _exists(folder: Path) -> bool:
    """Return True if the folder exists, and this user may know."""
    try:
        return folder.exists()
    except PermissionError:  # the service's own folder lies where only root can look
        return False
