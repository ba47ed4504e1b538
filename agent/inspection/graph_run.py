"""Run a graph once, for the facts that it does not state: the shapes of its outputs, and whether they hold boxes.

The graph may be anybody's, with a loop that never ends or a tensor of a terabyte. So a process of its own runs it,
`python -m agent.inspection.graph_run`, with little memory and little time.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import psutil
from onnx import ModelProto

from engines.errors import EngineError
from engines.interface import Array
from engines.registry import open_backend
from engines.trial import START_FOLDER

_MOST_BYTES, _TIMES = 4 << 30, 8  # memory beyond the libraries' own, and times the bytes of the graph
_MOST_S = 60.0
_FEWEST_ROWS = 16  # with fewer, chance orders the corners of too many
_SHARE = 0.95  # share of the rows; a network that sees noise may turn some boxes round
_WIDEST = 2.0  # half of the coordinates are within it, where they are fractions of the input


class RunOutput(NamedTuple):
    """An output of a run.

    Args:
        are_boxes: True where its rows are x1 y1 x2 y2, as fractions of the input; False where they are not; None where
            it has no rows of four values, or too few.
    """

    shape: tuple[int, ...]
    are_boxes: bool | None


def run_apart(model: ModelProto, shape: Sequence[int], dtype: str) -> dict[str, RunOutput]:
    """Run a graph on one random image; return its outputs by name, none where it cannot be run within the limits."""
    graph = model.SerializeToString()
    task = json.dumps({"shape": list(shape), "dtype": dtype, "most_bytes": _MOST_BYTES + _TIMES * len(graph)})
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command,
            input=task.encode() + b"\n" + graph,
            capture_output=True,
            timeout=_MOST_S,
            cwd=START_FOLDER,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {name: RunOutput(tuple(shape), are_boxes) for name, (shape, are_boxes) in found.items()}


def _are_boxes(output: Array) -> bool | None:
    if output.ndim != 3 or output.shape[2] != 4 or output.shape[1] < _FEWEST_ROWS:
        return None
    rows = output[0].astype(np.float64)
    with np.errstate(all="ignore"):  # a graph may put out anything
        ordered = np.isfinite(rows).all(axis=1) & (rows[:, :2] <= rows[:, 2:]).all(axis=1)
        return bool(ordered.mean() >= _SHARE and np.median(np.abs(rows)) <= _WIDEST)


def main() -> int:
    task = json.loads(sys.stdin.buffer.readline())
    graph = sys.stdin.buffer.read()
    most_bytes = task["most_bytes"] + psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    noise = np.random.default_rng(0).integers(0, 256, task["shape"], np.uint8)
    dtype = np.dtype(task["dtype"])
    image = noise if dtype == np.uint8 else (noise / 255.0).astype(dtype)
    try:
        with closing(open_backend("onnxruntime").load(graph)) as engine:
            outputs = engine.infer(image)
    except EngineError:
        return 1
    print(json.dumps({name: [output.shape, _are_boxes(output)] for name, output in outputs.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
