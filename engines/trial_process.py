"""`python -m engines.trial_process`: the process in which engines/trial.py tries a runtime.

It reads from stdin the name of the runtime, how many threads it has, and the request of a graph to build, if there is
one. It prints the reason for which the runtime does not work, if it raises one.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace

from calibrate.errors import TaredError
from engines.interface import BackendOptions
from engines.registry import open_backend
from engines.trial import REFUSED


def main() -> int:
    """Try what stdin says."""
    name, threads, request = pickle.load(sys.stdin.buffer)
    try:
        backend = open_backend(name, BackendOptions(threads))
        backend.describe()
        if request is not None:
            backend.build(replace(request, precision=backend.precisions[0]))
    except TaredError as error:
        print(error.found)
        return REFUSED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
