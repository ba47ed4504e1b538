"""A board whose disk or files are in trouble, with a live camera, and the daemon on it as a process."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from brokers import RealBroker
from daemon_life import LIMIT_S, TOPICS, Life, living
from worlds import SPEC, World, make_world, write_clip

from agent.contract.commands import CommandResult
from calibrate.plan import PrecisionPlan
from engines.store.artefact import Store
from fleet.operator import new_command, send

_CLEAR = 0.3  # a light in which no frame lies near a border between classes: no candidate is refused by chance
_DARK = 0.04  # in which the reference sees another class than an engine whose scales are far too coarse
# Linux: include/uapi/linux/capability.h; prctl(2), capset(2). The first is for what the process starts.
BOUND_BY_PERMISSIONS = """
import ctypes

libc = ctypes.CDLL(None)
DAC_OVERRIDE, DAC_READ_SEARCH, PR_CAPBSET_DROP, VERSION_3 = 1, 2, 24, 0x20080522
for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):
    libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused to a user who has none of them anyway
header, sets = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for number in range(3):  # effective, permitted, inheritable
    sets[number] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
assert libc.capset(header, sets) == 0
"""


@dataclass
class Board:
    """A world that a camera sees without end."""

    world: World
    broker: RealBroker

    @property
    def state(self) -> Path:
        return self.world.state_dir

    @property
    def scene(self) -> Path:
        """A file with the path of the clip that the camera sees; while it is empty no frame comes."""
        return self.world.folder / "scene"

    @property
    def current(self) -> str:
        return Store(self.state).target("current")

    @contextmanager
    def living(self, name: str) -> Iterator[Life]:
        """The daemon, without the right to pass over file permissions; killed where it still lives at the end."""
        with living(self.world, self.scene, self.broker, name, BOUND_BY_PERMISSIONS) as life:
            yield life

    def follow(self, op: str, **arguments: str) -> Iterator[CommandResult]:
        """The answers to a command, as they come."""
        yield from send(self.broker.endpoint, TOPICS, new_command(op, arguments, time.time()), silence_s=LIMIT_S)

    def order(self, op: str, **arguments: str) -> CommandResult:
        """The final result of a command."""
        return list(self.follow(op, **arguments))[-1]

    def verify(self) -> subprocess.CompletedProcess[str]:
        """`tared store verify`."""
        command = [sys.executable, "-m", "fleet.cli", "store", "verify", "-c", str(self.world.folder / "config.yaml")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)

    def unfinished(self) -> list[Path]:
        """Files that a process which ends well never leaves, and that each start removes."""
        folders = [self.state, *(self.state / name for name in ("artefacts", "cache", "refused"))]
        hidden = [path for folder in folders for path in folder.glob(".*") if path.suffix in (".new", ".gone")]
        return [*hidden, *(self.state / "jobs").glob("*"), *self.state.glob("*-journal")]


def serves_on(life: Life) -> None:
    """Frames are answered."""
    served = life.status()["frames"]
    life.wait(lambda: life.status()["frames"] > served)


def stop(life: Life) -> None:
    """End a daemon as systemd does: it ends well."""
    life.process.terminate()
    assert life.process.wait(LIMIT_S) == 0, life.log.read_text()
    assert "Traceback" not in life.log.read_text()


def codes(life: Life) -> set[str]:
    """The codes of all reported errors."""
    return set(life.said(r"event=error code=([\w.-]+)"))


def calibrated_board(folder: Path, broker: RealBroker, plain: bool = False) -> Board:
    """Where an engine is current and another one previous, and no daemon is.

    plain: all has to be INT8 as it is calibrated, so that a bad calibration is refused, and no plan saves it.
    """
    board = Board(make_world(folder, lambda _: _CLEAR, 20.0), broker)
    if plain:
        (folder / "plan.json").write_text(PrecisionPlan(evidence={"by": "the owner"}).to_json())
        (folder / "model.yaml").write_text(yaml.safe_dump({**SPEC, "precision": {"force_int8": ["*"]}}))
        board.world.config["plan"] = "plan.json"
    board.world.change(
        camera={"source": "rtsp://camera"},
        observe={"period_s": 0.05, "alert_period_s": 0.05},
        recalibration={"cooldown_s": 0.0, "automatic": False, "max_loss": 1.0},
        store={"keep": 1},
        mqtt={"host": broker.host, "port": broker.port},
    )
    write_clip(board.world.folder / "dark.avi", lambda _: _DARK, 200)
    show(board)
    with board.living("calibrating") as life:
        life.wait(lambda: life.said("event=swap .*trigger=first-start"))
        life.wait(lambda: life.status()["job"] is None)
        assert board.order("recalibrate", frames="8", method="max").status == "SUCCEEDED"
        stop(life)
    return board


def show(board: Board, clip: str = "clip.avi") -> None:
    """Let the camera see."""
    board.scene.write_text(str(board.world.folder / clip))


def copied(board: Board, folder: Path, broker: RealBroker) -> Board:
    """A board of its own; its state directory may be there already, and empty."""
    shutil.copytree(board.world.folder, folder, symlinks=True, dirs_exist_ok=True)
    config = yaml.safe_load(yaml.safe_dump(board.world.config))
    config["mqtt"].update(host=broker.host, port=broker.port)
    copy = Board(World(folder, config), broker)
    show(copy)
    return copy


def check_artefacts(board: Board) -> None:
    """Each artefact of the store is whole, and lies under its own name."""
    done = board.verify()
    assert done.returncode == 0, done.stdout + done.stderr


def squeeze(disk: Path, free_bytes: int | None = None, free_files: int | None = None) -> None:
    """Leave so many bytes on a small disk, or so many files."""
    ballast = disk / "ballast"
    release(disk)
    ballast.mkdir()
    seen = os.statvfs(disk)
    try:
        if free_files is not None:
            for number in range(seen.f_ffree - free_files):
                (ballast / f"file-{number}").touch()
        if free_bytes is not None:
            (ballast / "bytes").write_bytes(bytes(max(0, seen.f_bavail * seen.f_frsize - free_bytes)))
    except OSError as error:
        if error.errno != errno.ENOSPC:  # a daemon that runs on it has taken some meanwhile: it is as full as was asked
            raise


def release(disk: Path) -> None:
    """Take back what `squeeze` has put there."""
    shutil.rmtree(disk / "ballast", ignore_errors=True)  # there may be none yet
