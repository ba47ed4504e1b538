"""Lock the state directory, and remove what processes that were killed have left in it.

One process at a time changes a state directory: the daemon, or a command that tidies while no daemon runs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TextIO

import psutil

from agent.common.console import say
from agent.common.errors import AgentError
from engines.store.files import remove

log = logging.getLogger(__package__)

_GONE_S = 5.0  # a killed process is gone within this time, unless its disk hangs
# Files are written under such a name, with the process id except for links, and then renamed.
_UNFINISHED = re.compile(r"\.(.+\.\d+|current|previous)\.new")


@contextmanager
def lock_state_dir(state_dir: Path) -> Iterator[None]:
    """Hold the lock of the state directory; it goes with the process, however that ends.

    A disk that has become read-only does not keep a daemon from serving the engine that lies on it.

    Raises AgentError:
        state.write  the directory cannot be written, and has no lock file from earlier
        state.locked      another process holds it
    """
    with _open_lock(state_dir) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AgentError(
                "state.locked",
                f"another daemon on {state_dir}",
                "one daemon at a time",
                "stop it, or choose another state_dir",
            ) from None
        yield


def _open_lock(state_dir: Path) -> TextIO:
    file = state_dir / "lock"
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
            remove(file)  # no daemon has made it so, and none could be locked out by it
        return _open_own(file, "a")
    except OSError as error:
        found = f"{state_dir}: {error.strerror}"
    try:
        lock = _open_own(file, "r")
    except OSError:
        raise AgentError("state.write", found, "a writable folder", "correct state_dir") from None
    say(f"warning: {found}; the engine in service keeps serving, and nothing new can be kept")
    return lock


def _open_own(file: Path, mode: Literal["a", "r"]) -> TextIO:
    """Open a file that is no link, which could lead to a file of somebody else's. Raises OSError."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(file, mode, encoding="utf-8", opener=lambda name, usual: os.open(name, usual | flags, 0o600))


def remove_leftovers(state_dir: Path) -> None:
    """End children that outlived their daemon; remove their jobs' frames, and files that are half written.

    The process ids in file names do not matter: ids are used again, and no other process writes here.
    """
    jobs = state_dir / "jobs"
    for child in _kill_orphans(jobs):
        log.warning("orphan=%d state=ended", child.pid)
    _remove([*jobs.glob("*"), *_unfinished([state_dir, *_built_in(state_dir)])])


def remove_unfinished_builds(state_dir: Path) -> None:
    """Remove what a killed child left in the store and in the cache; no other child may be at work.

    A folder that cannot be listed is left alone until the next time.
    """
    own = f".{os.getpid()}.new"
    with suppress(OSError):
        _remove([path for path in _unfinished(_built_in(state_dir)) if not path.name.endswith(own)])


def _built_in(state_dir: Path) -> list[Path]:
    """The folders into which a job's child writes."""
    cache = state_dir / "cache"
    return [state_dir / "artefacts", cache, cache / "references", cache / "references" / "artefacts"]


def _unfinished(folders: Iterable[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.glob(".*.new") if _UNFINISHED.fullmatch(path.name)]


def _remove(paths: Iterable[Path]) -> None:
    """Remove files and folders; those that cannot be removed do no harm, since they are never read."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _kill_orphans(jobs: Path) -> list[psutil.Process]:
    """Kill the processes that work on a job in this folder, and their children; return them once they are gone.

    They are recognised by their command line, which names the job's directory. A file with their ids could be missing,
    if the daemon was killed before it wrote it.
    """
    family: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words and "-m" in words and Path(words[-1]).parent == jobs:
            with suppress(psutil.Error):
                family.update({each.pid: each for each in [process, *process.children(recursive=True)]})
    for process in family.values():
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(family.values()), _GONE_S)
    return list(family.values())
