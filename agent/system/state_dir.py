"""What a killed process left in the state directory; whoever sweeps holds the directory's lock."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_GONE_S = 5.0  # within which a process that was killed is gone, unless its disk hangs
# What is written under such a name, with the process id but for links, is then renamed.
_UNFINISHED = re.compile(r"\.(.+\.\d+|current|previous)\.new")


def sweep(state_dir: Path) -> None:
    """End children that outlived their daemon, and remove what was half written, and the frames of their jobs.

    Of any process, by whatever id: ids are used again, and nobody else writes here.
    """
    jobs = state_dir / "jobs"
    for child in _orphans(jobs):
        log.warning("orphan=%d state=ended", child.pid)
    references = state_dir / "cache" / "references"
    folders = [state_dir, state_dir / "artefacts", references.parent, references, references / "artefacts"]
    unfinished = [path for folder in folders for path in folder.glob(".*.new") if _UNFINISHED.fullmatch(path.name)]
    _remove([*jobs.glob("*"), *unfinished])


def sweep_builds(state_dir: Path) -> None:
    """Remove what a child that was killed left in the store; no other may be at work."""
    _remove((state_dir / "artefacts").glob(".*.new"))


def _remove(paths: Iterable[Path]) -> None:
    """What cannot be removed does no harm: it is never read."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _orphans(jobs: Path) -> list[psutil.Process]:
    """The processes that work on a job in this folder, and theirs; killed, and gone.

    They are known by their command line, which names the job's directory: a note of their ids could be missing where
    the daemon was killed between two lines.
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
