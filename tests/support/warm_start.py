"""Start `tared` from a process that has imported it already: in a short run the imports are most of the work.

A template imports the daemon and the command line once, and forks for each start. A fork is a process as any
other: its environment, folder, signals and files are its own. Its interpreter ends as the exit code says. Where the
start itself is the subject, as with a unit or an installed wheel, tests start `python -m fleet.cli`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TextIO

TARED = "from fleet.cli.main import main; raise SystemExit(main())"
_MOST_BYTES = 1 << 17  # of a request: mostly the environment


class _Start(NamedTuple):
    """A request to the template. file_bytes: no file may grow beyond, as on a disk that is full."""

    source: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    file_bytes: int | None


class WarmProcess:
    """`python -c SOURCE ARGUMENTS`, used as a subprocess.Popen is; stdout, stderr: open files' descriptors."""

    def __init__(
        self,
        arguments: Sequence[str],
        stdout: int | None = None,
        stderr: int | None = None,
        source: str = TARED,
        file_bytes: int | None = None,
    ) -> None:
        start = _Start(source, [*arguments], dict(os.environ), os.getcwd(), file_bytes)
        self._told, told = _pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        descriptors = [nowhere if each is None else each for each in (stdout, stderr)]
        socket.send_fds(_template(), [json.dumps(start).encode()], [*descriptors, told])
        os.close(nowhere)
        os.close(told)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self.wait() if self.returncode is not None or select.select([self._told], [], [], 0.0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("tared", timeout or 0.0)
            with self._told:
                self.returncode = int(self._told.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and that is about to be told
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class TalkingProcess(WarmProcess):
    """One whose stdout and stderr are pipes of text."""

    def __init__(self, arguments: Sequence[str], source: str = TARED, file_bytes: int | None = None) -> None:
        (self.stdout, stdout), (self.stderr, stderr) = _pipe(), _pipe()
        super().__init__(arguments, stdout, stderr, source, file_bytes)
        os.close(stdout)
        os.close(stderr)

    def __enter__(self) -> TalkingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it still says until it ends. Kills it if that lasts longer, and raises TimeoutError."""
        with ThreadPoolExecutor(2) as pool, self:
            reading = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                output, errors = (each.result(timeout) for each in reading)
            except BaseException:
                self.kill()
                raise
        return output, errors


def tared(*arguments: object, file_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run `tared` to its end, as a process of its own."""
    words = [*map(str, arguments)]
    process = TalkingProcess(words, file_bytes=file_bytes)
    output, errors = process.communicate(timeout=60.0)
    return subprocess.CompletedProcess(words, process.wait(), output, errors)


def _pipe() -> tuple[TextIO, int]:
    read, write = os.pipe()
    return os.fdopen(read, encoding="utf-8"), write


@functools.cache
def _template() -> socket.socket:
    """The way to this process's template, which ends when it is closed."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with there:
        command = [sys.executable, "-m", "warm_start", str(there.fileno())]
        template = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[there.fileno()])
    atexit.register(template.wait)
    atexit.register(here.close)
    return here


# ---- in the template


def _wait_to_be_forked(starts: socket.socket) -> str:
    """Return in each process that was asked for, with its source."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever asked for a start ends it
    reporters: list[int] = []
    while True:
        request, descriptors, *_ = socket.recv_fds(starts, _MOST_BYTES, 3)
        reporters = [pid for pid in reporters if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        if not request:
            raise SystemExit
        if (pid := os.fork()) == 0:
            break
        reporters.append(pid)
        for descriptor in descriptors:
            os.close(descriptor)
    starts.close()
    stdout, stderr, told = descriptors
    if pid := os.fork():
        _report(pid, told, stdout, stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in descriptors:
        os.close(descriptor)
    start = _Start(*json.loads(request))
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.folder)
    sys.path[:1] = [start.folder, *filter(None, start.environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["-c", *start.arguments]
    if start.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (start.file_bytes, start.file_bytes))
    return start.source


def _report(pid: int, told: int, *others: int) -> None:
    """Report the process's id, and its exit code when it has ended."""
    for descriptor in others:  # they end with the process
        os.close(descriptor)
    os.write(told, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    import agent.daemon.run  # noqa: F401  # what all need, so that none imports it again
    import engines.onnxruntime_backend  # noqa: F401  # as above
    import fleet.cli.main  # noqa: F401  # as above

    gc.freeze()  # what all share is copied by none
    exec(_wait_to_be_forked(socket.socket(fileno=int(sys.argv[1]))), {"__name__": "__main__"})
