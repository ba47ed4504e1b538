"""A service manager that treats a Type=notify service as systemd does, for tests that have no systemd to ask.

By systemd.service(5) and sd_notify(3): NotifyAccess=main; a start that takes longer than TimeoutStartSec, extended by
EXTEND_TIMEOUT_USEC, is terminated; a missed watchdog is SIGABRT, and after TimeoutAbortSec SIGKILL; Restart=on-failure
after RestartSec. Everything happens in the thread that calls `wait`.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TICK_S = 0.05
_LIMIT_S = 240.0  # time limit of each wait: two cores may serve six workers
# systemd sets it; the process cannot know it beforehand.
_WITH_OWN_PID = 'import os, sys; os.environ["WATCHDOG_PID"] = str(os.getpid()); os.execv(sys.argv[1], sys.argv[1:])'


@dataclass(frozen=True)
class Timeouts:
    """The unit's, in seconds."""

    watchdog_s: float
    start_s: float = 60.0
    stop_s: float = 20.0
    abort_s: float = 5.0
    restart_s: float = 0.2


@dataclass
class Life:
    """One process of the service; times are on time.monotonic(). reason: why it was ended, if it was."""

    started_s: float
    ready_s: float | None = None
    ended_s: float | None = None
    reason: str = ""
    signals: list[signal.Signals] = field(default_factory=list)
    returncode: int | None = None
    pings: int = 0
    said: list[str] = field(default_factory=list)


class ServiceManager:
    """Keeps one service; a context manager that stops it at the end."""

    def __init__(self, command: Sequence[str], folder: Path, timeouts: Timeouts) -> None:
        self._command = command
        self._folder = folder
        self._timeouts = timeouts
        self.lives: list[Life] = []
        self.refused = 0  # datagrams of others than the main process
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline_s = math.inf
        self._stopping = False

    @property
    def journal(self) -> str:
        """Stderr of the service, all lives together."""
        return (self._folder / "journal").read_text(errors="replace")

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> ServiceManager:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(self._folder / "notify"))
        self._socket.settimeout(_TICK_S)
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def wait(self, until: Callable[[], object], limit_s: float = _LIMIT_S) -> None:
        """Keep the service until something holds. Fails when it does not within the limit."""
        give_up_s = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < give_up_s, f"it did not happen in time: {self.lives}\n{self.journal}"
            self._turn()

    def stop(self) -> int:
        """As `systemctl stop`; the exit code."""
        assert self._process is not None
        self._stopping = True
        self._process.terminate()
        return self._process.wait(_LIMIT_S)

    def _start(self) -> None:
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self._folder / "notify"),
            "WATCHDOG_USEC": str(round(self._timeouts.watchdog_s * 1e6)),
        }
        with (self._folder / "journal").open("ab") as journal:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WITH_OWN_PID, *self._command],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=journal,
            )
        now_s = time.monotonic()
        self.lives.append(Life(now_s))
        self._deadline_s = now_s + self._timeouts.start_s

    def _turn(self) -> None:
        for sender, text in self._received():
            if sender == self.pid:
                for line in text.splitlines():
                    self._take(line)
            else:
                self.refused += 1
        assert self._process is not None
        if self._process.poll() is not None:
            self._ended(self._process.returncode)
        elif time.monotonic() > self._deadline_s:
            self._overdue(self._process)

    def _received(self) -> Iterator[tuple[int, str]]:
        with contextlib.suppress(TimeoutError):
            while True:
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(struct.calcsize("3i")))
                (credentials,) = [array.array("i", content[:12]) for _, _, content in ancillary]
                yield credentials[0], data.decode()
                self._socket.settimeout(0.001)
        self._socket.settimeout(_TICK_S)

    def _take(self, line: str) -> None:
        life, now_s = self.life, time.monotonic()
        life.said.append(line)
        if life.reason:
            return
        name, _, value = line.partition("=")
        if name == "EXTEND_TIMEOUT_USEC" and life.ready_s is None:
            self._deadline_s = max(self._deadline_s, now_s + int(value) / 1e6)
        elif line == "READY=1":
            life.ready_s = now_s
            self._deadline_s = now_s + self._timeouts.watchdog_s
        elif line == "WATCHDOG=1" and life.ready_s is not None:
            life.pings += 1
            self._deadline_s = now_s + self._timeouts.watchdog_s
        elif line == "STOPPING=1":
            self._deadline_s = now_s + self._timeouts.stop_s

    def _overdue(self, process: subprocess.Popen[bytes]) -> None:
        life = self.life
        if not life.reason:
            life.reason = "watchdog" if life.ready_s is not None else "start"
            life.signals.append(signal.SIGABRT if life.reason == "watchdog" else signal.SIGTERM)
            patience_s = self._timeouts.abort_s if life.reason == "watchdog" else self._timeouts.stop_s
        else:
            life.signals.append(signal.SIGKILL)
            patience_s = math.inf
        process.send_signal(life.signals[-1])
        self._deadline_s = time.monotonic() + patience_s

    def _ended(self, returncode: int) -> None:
        life = self.life
        if life.ended_s is None:
            life.ended_s, life.returncode = time.monotonic(), returncode
        failed = returncode not in (0, -signal.SIGTERM) or life.reason
        if failed and not self._stopping and time.monotonic() >= life.ended_s + self._timeouts.restart_s:
            self._start()
