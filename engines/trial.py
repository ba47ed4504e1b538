"""Try a runtime in a process of its own: one that crashes ends that process alone, and the caller has the reason."""

from __future__ import annotations

import pickle
import subprocess
import sys
from signal import Signals

from engines.interface import BuildRequest

REFUSED = 3  # exit status of the process: the reason is on stdout
_PROCESS = "engines.trial_process"
# Where processes of ours are started: `python -m` puts the working directory at the head of the import path, and a file
# there, of whoever may write it, would be imported in the place of a package.
START_FOLDER = "/"
_MOST_S = 300.0


def why_not(name: str, threads: int, request: BuildRequest | None) -> str:
    """Return the reason for which a runtime does not work here, or does not build this graph; empty if it does both."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", _PROCESS],
            input=pickle.dumps((name, threads, request)),
            capture_output=True,
            timeout=_MOST_S,
            cwd=START_FOLDER,
        )
    except subprocess.TimeoutExpired:
        return f"a process that tried it had not ended after {_MOST_S:g} s"
    except OSError as error:
        return f"no process could try it: {error.strerror}"
    if done.returncode == REFUSED:
        return done.stdout.decode(errors="replace").strip()
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["without a word"])[-1]
        ended = Signals(-done.returncode).name if done.returncode < 0 else f"exit status {done.returncode}"
        return f"a process that tried it ended with {ended}: {last}"
    return ""
