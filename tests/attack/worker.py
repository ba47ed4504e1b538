"""`python -m attack.worker KIND FOLDER`: puts the cases of each seed on stdin before the product, within limits."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import psutil

from agent.inspection import graph_run
from attack.case import judge
from attack.kinds import KINDS

_MOST_BYTES = 4 << 30  # of address space, beyond the libraries' own; the product's children set limits of their own
_MOST_RUN_S = 5.0  # of a graph that somebody made endless: a minute each would be all that a campaign sees


def main() -> int:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    logging.disable()
    graph_run._MOST_S = _MOST_RUN_S
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _MOST_BYTES, most))
    for seed in map(str.strip, sys.stdin):
        with TemporaryDirectory(dir=folder) as own:
            for case in KINDS[kind](Random(f"{kind} {seed}"), Path(own)):
                print(json.dumps({"begins": case.name}), file=channel)
                verdict, why = judge(case)
                print(json.dumps({"verdict": verdict, "why": why}), file=channel)
        print(json.dumps({"done": seed}), file=channel)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
