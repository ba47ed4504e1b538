"""`python -m engines.trial_process`: the process in which engines/trial.py tries a runtime.

It reads one line of JSON from stdin, and after it the graph, if there is one, which it builds. It prints the reason for
which the runtime does not work, if it raises one.
"""

from __future__ import annotations

import json
import sys

from onnx import ModelProto

from calibrate.errors import TaredError
from engines.interface import BackendOptions, BuildRequest, ShapeRange
from engines.registry import open_backend
from engines.trial import REFUSED


def main() -> int:
    """Try what stdin says."""
    task = json.loads(sys.stdin.buffer.readline())
    graph = sys.stdin.buffer.read()
    try:
        backend = open_backend(task["name"], BackendOptions(task["threads"]))
        backend.describe()
        if graph:
            shape = tuple(task["shape"]) if task["shape"] is not None else None
            profiles = tuple(
                {name: ShapeRange(*map(tuple, shapes)) for name, shapes in profile.items()}
                for profile in task["profiles"]
            )
            request = BuildRequest(ModelProto.FromString(graph), backend.precisions[0], shape, profiles)
            backend.build(request)
    except TaredError as error:
        print(error.found)
        return REFUSED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
