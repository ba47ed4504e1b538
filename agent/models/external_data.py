"""List the files of external tensors that an ONNX file names.

A file that was delivered, or that somebody put in the place of the model, may be anything: the daemon has it read by a
process of its own, `python -m agent.models.external_data FILE`, which has little memory and little time.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
from onnx import TensorProto

from engines.errors import EngineError
from engines.graph.load import parse_model
from engines.trial import START_FOLDER

_LEAST_BYTES, _TIMES = 64 << 20, 4  # a file that holds all of its tensors is parsed in some three times its size
_MOST_S = 60.0

ExternalNames = Callable[[Path], list[str]]


def external_names(path: Path) -> list[str]:
    """Return the names of the files that the model names, sorted; none for a file that is no model. Raises OSError."""
    try:
        model = parse_model(path)
    except (EngineError, MemoryError) as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return []
    names = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return sorted(names)


def external_names_apart(path: Path) -> list[str]:
    """Return the same, as another process finds them; none where it does not end well. Raises OSError."""
    most_bytes = _LEAST_BYTES + _TIMES * path.stat().st_size
    command = [sys.executable, "-m", __name__, str(path.resolve()), str(most_bytes)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_MOST_S, cwd=START_FOLDER, check=True
        )
        names = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        return []
    return [str(name) for name in names]


def main() -> int:
    path, most_bytes = Path(sys.argv[1]), int(sys.argv[2])
    most_bytes += psutil.Process().memory_info().vms  # the libraries' own
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    print(json.dumps(external_names(path)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
