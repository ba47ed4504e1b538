"""The board and its system: release, clock, power mode, headroom, memory, disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import psutil

from agent.config import Config, HeadroomConfig, StoreConfig
from agent.doctor.finding import Finding, gib, read
from agent.jobs.headroom import Headroom
from agent.system.board import BoardState
from agent.system.clock import is_synchronised
from engines.board import board

_MIN_FREE_BYTES = 1 << 30
_OLDEST_L4T = 36  # JetPack 6; the one before has TensorRT 8


def examine_machine(root: Path, config: Config | None, service: bool = False) -> list[Finding]:
    """Look at the machine under `root`; config: where the state is to lie, and what a job must find to spare. service:
    whether it is that of the installed one, for which systemd makes the state directory."""
    state = BoardState(root)
    jetson = state.read().jetson
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
    named = re.search(r'^PRETTY_NAME="?([^"\n]+)', read(root / "etc/os-release"), re.MULTILINE)
    return Finding("system", named[1] if named else "unknown", True, False)


def _jetpack(root: Path) -> Finding:
    """By the release of Jetson Linux, which every image has, and the package that brings CUDA and TensorRT."""
    release = re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", read(root / "etc/nv_tegra_release"))
    package = re.search(
        r"^Package: nvidia-jetpack\nStatus: install ok installed\n(?:.+\n)*?Version: (\S+)",
        read(root / "var/lib/dpkg/status"),
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
    """jetson_clocks shows its settings to root alone; what it does is that no clock has room to move."""
    mode = state.read().power_mode
    if mode is None:
        return Finding("power mode", "unknown", False, False, "sudo nvpmodel -q")
    policies = sorted(root.glob("sys/devices/system/cpu/cpufreq/policy*"))
    ranges = [(read(policy / "scaling_min_freq"), read(policy / "scaling_max_freq")) for policy in policies]
    fixed = bool(ranges) and all(low == high != "" for low, high in ranges)
    return Finding("power mode", f"{mode}, clocks {'fixed (jetson_clocks)' if fixed else 'by load'}", True, False)


def _clock() -> Finding:
    """By the kernel's word, which every time service tells it; asking takes no right."""
    synchronised = is_synchronised()
    remedy = (
        "sudo timedatectl set-ntp true; until then capture times are wrong, and commands from elsewhere are refused"
    )
    found = "synchronised" if synchronised else "not synchronised"
    return Finding("clock", found, synchronised, False, "" if synchronised else remedy)


def _headroom(state: BoardState, limits: HeadroomConfig) -> Finding:
    reason = Headroom(limits, state).may_start()
    remedy = "cool the board, end other work on it, or change recalibration.headroom; jobs wait meanwhile"
    return Finding("headroom", reason or "enough for a job", not reason, False, remedy if reason else "")


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    remedy = "end other programs, or add swap: building an engine needs room"
    return Finding("memory available", gib(available), available >= _MIN_FREE_BYTES, True, remedy)


def _disk(config: Config | None, service: bool) -> list[Finding]:
    """The file system that state_dir is on, or is going to be."""
    folder = config.state_dir if config else Path()
    while not _is_seen(folder):
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
        remedy = "mount it writable, correct state_dir, or ask as the user that the daemon runs as"
        findings.append(Finding("state directory", found, writable, True, "" if writable else remedy))
    return findings


def _is_seen(folder: Path) -> bool:
    """Whether it is there, and this user may know."""
    try:
        return folder.exists()
    except PermissionError:  # the service's own lies where root alone looks
        return False
