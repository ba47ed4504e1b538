"""A folder on a mount that hangs on demand, as a network's does: FUSE, served by the system's Python.

`mounted(SOURCE, PLACE)` shows one folder at another place. From `hang()` on every request waits. Needs fusermount3,
/dev/fuse and Debian's python3-fuse; what lacks them is skipped, and fails under TARED_REQUIRE_FUSE=1.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_PYTHON = "/usr/bin/python3"
_SERVER = Path(__file__).with_name("hanging_server.py")
_CONTROL = Path("/sys/fs/fuse/connections")
_LIMIT_S = 20.0


@dataclass(frozen=True)
class HangingMount:
    """A request that no server takes waits for ever, but does not survive SIGKILL, as with NFS.

    One that a server has taken does survive it: `hang` stops the server between two requests.
    """

    server: subprocess.Popen[bytes]
    requests: Path  # how many are under way, as the kernel says

    def hang(self) -> None:
        """Let every request wait from now on."""
        deadline_s = time.monotonic() + _LIMIT_S
        while True:
            self.server.send_signal(signal.SIGSTOP)
            if self.requests.read_text().strip() == "0":
                return
            self.go_on()
            assert time.monotonic() < deadline_s, "it is never idle"
            time.sleep(random.uniform(0.0, 0.05))

    def go_on(self) -> None:
        """Answer them, and all that wait."""
        self.server.send_signal(signal.SIGCONT)


@contextmanager
def mounted(source: Path, place: Path) -> Iterator[HangingMount]:
    """The source at another place, until the end of the block. Skips where nothing can be mounted."""
    _require_fuse()
    source.mkdir(parents=True, exist_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen([_PYTHON, "-I", _SERVER, source, "-f", "-o", "nonempty", place])
    try:
        deadline_s = time.monotonic() + _LIMIT_S
        while not os.path.ismount(place):
            assert server.poll() is None, "the mount's server has ended"
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        yield HangingMount(server, _CONTROL / str(os.minor(os.stat(place).st_dev)) / "waiting")
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["fusermount3", "-u", "-z", place], check=False)
        with suppress(subprocess.TimeoutExpired):
            server.wait(2.0)
        server.kill()
        server.wait()


def _require_fuse() -> None:
    asked = [_PYTHON, "-I", "-c", "import fuse"]
    missing = not Path("/dev/fuse").exists() or subprocess.run(asked, capture_output=True, check=False).returncode
    if not missing and not os.path.ismount(_CONTROL):
        mounting: list[str | Path] = ["mount", "-t", "fusectl", "none", _CONTROL]
        missing = subprocess.run(mounting, capture_output=True, check=False).returncode
    if missing:
        why = "FUSE is not to be had: apt-get install fuse3 python3-fuse, and /dev/fuse"
        if os.environ.get("TARED_REQUIRE_FUSE") == "1":
            pytest.fail(why)
        pytest.skip(why)
