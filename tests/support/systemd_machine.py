"""systemd itself as process 1 of namespaces of its own, where nothing of this machine's services is seen or touched.

It takes root, unshare(1) and a cgroup2 hierarchy; `why_not` says what is missing. Mounts, process ids and cgroups are
its own; the network is this machine's, so that a broker on loopback is reached.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_SYSTEMD = Path("/usr/lib/systemd/systemd")
_LIMIT_S = 60.0

# In the new namespaces, before systemd: its own units, state and journal; no generator, and no service of this machine.
_ENTER = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir -p /run/lock /run/systemd
for folder in /etc/systemd/system /usr/lib/systemd/system /usr/lib/systemd/system-generators /var/lib /var/cache
do
  mkdir -p "$folder"
  mount -t tmpfs -o mode=0755 tmpfs "$folder"
done
for name in sysinit basic shutdown multi-user network final umount; do
  printf '[Unit]\\nDefaultDependencies=no\\n' > "/usr/lib/systemd/system/$name.target"
done
cat > /etc/systemd/system/systemd-journald.socket <<'END'
[Unit]
DefaultDependencies=no
[Socket]
ListenStream=/run/systemd/journal/stdout
ListenDatagram=/run/systemd/journal/socket
PassCredentials=yes
END
cat > /etc/systemd/system/systemd-journald.service <<'END'
[Unit]
DefaultDependencies=no
[Service]
Type=notify
ExecStart=/usr/lib/systemd/systemd-journald
StandardOutput=null
END
mkdir /etc/systemd/system/basic.target.wants
ln -s ../systemd-journald.socket /etc/systemd/system/basic.target.wants
cp -r "$1"/. /etc/systemd/system
mount --make-rshared /  # as nspawn leaves it: credentials are mounted in a child's namespace, and have to come through
exec env -i "PATH=$PATH" container=test /usr/lib/systemd/systemd --system --unit=basic.target --log-target=console
"""


def why_not() -> str:
    """The reason why systemd cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return "namespaces and mounts take root"
    for program in ("unshare", "nsenter", "systemctl"):
        if shutil.which(program) is None:
            return f"no {program}"
    if not _SYSTEMD.exists():
        return "systemd is not installed: apt-get install systemd"
    if _cgroup() is None:
        return "no cgroup2 hierarchy is mounted"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--cgroup", "mount", "-t", "tmpfs", "tmpfs", "/run"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """A booted systemd whose units are the files of a folder; a context manager that ends it and all it started."""

    def __init__(self, units: Path, log: Path) -> None:
        self._units = units
        self._log = log
        cgroup = _cgroup()
        assert cgroup is not None
        self._cgroup = cgroup / f"tared-test-{os.getpid()}"

    def __enter__(self) -> Machine:
        self._cgroup.mkdir()
        enter = f"echo $$ > {self._cgroup}/cgroup.procs; exec unshare --mount --pid --fork --cgroup --ipc --kill-child"
        with self._log.open("ab") as log:
            self._outer = subprocess.Popen(
                ["sh", "-c", f'{enter} sh -c "$1" sh "$2"', "sh", _ENTER, str(self._units)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            self.eventually(lambda: self._init() and self.systemctl("is-active", "basic.target").stdout == "active\n")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """With process 1 of a namespace the kernel ends all others in it."""
        self._outer.kill()
        self._outer.wait()
        deadline_s = time.monotonic() + _LIMIT_S
        while self._cgroup.exists():  # it can be removed once the last process has gone
            for folder in sorted(self._cgroup.rglob("*"), reverse=True):
                if folder.is_dir():
                    _remove(folder)
            _remove(self._cgroup)
            assert time.monotonic() < deadline_s, f"{self._cgroup} is still in use"

    def systemctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", *arguments)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command in there."""
        entering = ["nsenter", "--target", str(self._init()), "--mount", "--pid", "--cgroup"]
        return subprocess.run([*entering, *command], capture_output=True, text=True, timeout=_LIMIT_S, check=False)

    def property(self, unit: str, name: str) -> str:
        return self.systemctl("show", "--value", "--property", name, unit).stdout.strip()

    def eventually(self, holds: Callable[[], object], limit_s: float = _LIMIT_S, tell: Path | None = None) -> None:
        """Wait for something. Fails when it does not come, or systemd ends, with what it said."""
        give_up_s = time.monotonic() + limit_s
        while not holds():
            said = self._log.read_text() + (tell.read_text() if tell is not None and tell.exists() else "")
            assert self._outer.poll() is None, said
            assert time.monotonic() < give_up_s, said
            time.sleep(0.05)

    def _init(self) -> int:
        """The process id, out here, of its process 1; 0 while there is none."""
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        return int(children[0]) if children else 0


def process_status(process: psutil.Process, key: str) -> str:
    """A value of its /proc/PID/status."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return str(re.findall(rf"^{key}:\s*(\S+)$", text, re.MULTILINE)[0])


def sandbox_of_this_interpreter() -> str:
    """The lines of a unit that show it the Python of the tests under ProtectHome and PrivateTmp.

    It may lie in a home or in /tmp.
    """
    places = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()}
    at_home = {place for place in places if place.is_relative_to("/root") or place.is_relative_to("/home")}
    hidden = at_home | {place for place in places if place.is_relative_to("/tmp")}
    lines = ["ProtectHome=tmpfs\n"] if at_home else []
    return "".join([*lines, *(f"BindReadOnlyPaths={place}\n" for place in sorted(hidden))])


def _cgroup() -> Path | None:
    """Where this process is in the cgroup2 hierarchy."""
    mounts = Path("/proc/self/mountinfo").read_text()
    mounted = re.search(r"^\S+ \S+ \S+ / (\S+) .*? - cgroup2 ", mounts, re.MULTILINE)
    place = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    return Path(mounted[1], place[1]) if mounted and place else None


def _remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # not empty yet
        time.sleep(0.02)
