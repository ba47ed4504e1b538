"""Capture queued work as a CUDA graph, which saves the host the cost of each kernel's launch.

PyCUDA has no API for graphs: this uses NVIDIA's cuda-bindings, in the extras `jetson` and `rtx`. Without it engines run
kernel by kernel. Whether a graph is faster depends on the engine and the board, so it is measured on the spot and kept
only if it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from calibrate.errors import TaredError

log = logging.getLogger(__package__)

_ROUNDS = 15  # measurements of each way, in turns
_WORTH = 0.98  # a graph is kept below this share of the time without it. Larger: a gain may be noise.


class CudaGraph:
    """The work that a function queues on a stream, captured. The context must be current in every call.

    stream: PyCUDA's. Raises RuntimeError if the work cannot be captured, because it waits or allocates.
    """

    def __init__(self, stream: Any, work: Callable[[], object]) -> None:
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._stream = self._driver.CUstream(stream.handle)
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL  # others go on with their work
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            work()
        finally:
            graph = self._call("cuStreamEndCapture", self._stream)
        try:
            self._executable = self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)

    def launch(self) -> None:
        """Queue the work again, on the same memory."""
        self._call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Free the graph."""
        self._call("cuGraphExecDestroy", self._executable)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{name}: {status}")
        return results[0] if results else None


def faster_graph(stream: Any, work: Callable[[], object]) -> CudaGraph | None:
    """Return a graph of the work, if it can be captured and is faster; measured on `stream`, which must be idle.

    work: queues the same kernels every time, and has run before.
    """
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return None
    try:
        graph = CudaGraph(stream, work)
    except (RuntimeError, TaredError) as error:  # the driver's, or that of work that cannot be captured
        log.info("event=cuda_graph kept=False reason=%r", str(error))
        return None
    plain_s, graph_s = [], []
    for _ in range(_ROUNDS):
        plain_s.append(_timed(stream, work))
        graph_s.append(_timed(stream, graph.launch))
    ratio = median(graph_s) / median(plain_s)
    log.info("event=cuda_graph kept=%s ratio=%.3f", ratio < _WORTH, ratio)
    if ratio < _WORTH:
        return graph
    graph.close()
    return None


def _timed(stream: Any, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    stream.synchronize()
    return time.perf_counter() - started
