"""A process whose wall clock is wrong, and jumps while it runs: a library that is loaded before libc."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

DAY_S = 86_400
_SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True)
class WrongClock:
    """environment: of processes that shall have it."""

    file: Path
    library: Path

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "LD_PRELOAD": str(self.library), "TARED_CLOCK": str(self.file)}

    def set(self, days: float) -> None:
        """Let the clock be so many days ahead from now on; negative: behind."""
        with self.file.open("r+b") as file:
            file.write(struct.pack("q", round(days * DAY_S)))


@pytest.fixture
def wrong_clock(tmp_path: Path) -> WrongClock:
    """One that is right so far. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    clock = WrongClock(tmp_path / "clock", tmp_path / "wrong_clock.so")
    clock.file.write_bytes(bytes(8))
    build: list[str | Path] = [compiler, "-x", "c", "-O1", "-shared", "-fPIC", "-o", clock.library, _SOURCE, "-ldl"]
    subprocess.run(build, check=True, timeout=60.0)
    return clock
