"""A PostgreSQL server for tests and benchmarks: a private cluster in a temporary folder, on a Unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from itertools import count
from pathlib import Path
from types import TracebackType

_FOLDERS = (str(folder) for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))  # Debian's
_PATH = os.pathsep.join([os.environ.get("PATH", ""), *_FOLDERS])
_USERS = ("postgres", "nobody")  # it refuses to be run by root
_CONFIG = "listen_addresses = ''\nunix_socket_directories = '{folder}'\nmax_connections = 30\n"


class Postgres:
    """A context manager: running inside, gone after. durable: whether a commit waits for the disk, as in service."""

    def __init__(self, durable: bool = False) -> None:
        self._durable = durable
        self._folder = Path()
        self._numbers = count(1)

    @staticmethod
    def missing() -> str | None:
        """What there has to be and is not; None where all is."""
        if shutil.which("initdb", path=_PATH) is None:
            return "PostgreSQL is not installed: apt-get install postgresql"
        if os.geteuid() == 0 and _user() is None:
            return f"PostgreSQL refuses root, and there is no user {' or '.join(_USERS)}"
        return None

    def __enter__(self) -> Postgres:
        self._folder = Path(tempfile.mkdtemp(prefix="tared-pg-"))  # a socket's path has to be short
        user = _user()
        if user is not None:
            os.chown(self._folder, user.pw_uid, user.pw_gid)
        try:
            self._run("initdb", "--auth=trust", "--username=tared", "--encoding=UTF8", "--locale=C", "--no-sync")
            config = _CONFIG.format(folder=self._folder)
            if not self._durable:
                config += "fsync = off\nfull_page_writes = off\n"
            with (self._folder / "data" / "postgresql.conf").open("a") as file:
                file.write(config)
            self.start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Of the process whose children do the work."""
        return int((self._folder / "data" / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        self._run("pg_ctl", "start", "--wait", f"--log={self._folder / 'log'}")

    def stop(self) -> None:
        """At once, as by a crash."""
        self._call("pg_ctl", "stop", "--mode=immediate", "--wait")

    def new_database(self) -> str:
        """The URL of one that is empty."""
        name = f"fleet{next(self._numbers)}"
        self._run("createdb", f"--host={self._folder}", "--username=tared", name)
        return f"postgresql:///{name}?host={self._folder}&user=tared"

    def _run(self, name: str, *arguments: str) -> None:
        if self._call(name, *arguments):
            raise RuntimeError(f"{name}: {(self._folder / 'out').read_text()}")

    def _call(self, name: str, *arguments: str) -> int:
        """Its server goes on after the command, so the output goes to a file: nobody waits for a pipe's end."""
        found = shutil.which(name, path=_PATH)
        assert found is not None, name
        user = _user()
        with (self._folder / "out").open("ab") as output:
            return subprocess.run(
                [found, *arguments],
                check=False,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                env={"PGDATA": str(self._folder / "data"), "PATH": _PATH, "LC_ALL": "C"},
                user=user.pw_uid if user else None,
                group=user.pw_gid if user else None,
                extra_groups=[] if user else None,
            ).returncode


def _user() -> pwd.struct_passwd | None:
    """Who runs it instead of root; None for whoever runs us, or where there is nobody."""
    if os.geteuid() != 0:
        return None
    known = {each.pw_name: each for each in pwd.getpwall()}
    return next((known[name] for name in _USERS if name in known), None)
