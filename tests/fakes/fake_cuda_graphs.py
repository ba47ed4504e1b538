"""NVIDIA's cuda.bindings.driver on fake_pycuda's streams, as far as capturing a stream as a graph goes."""

from __future__ import annotations

import enum
import importlib.machinery
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_pycuda import FakePycuda


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901


@dataclass(frozen=True)
class CUstream:
    handle: int


class Graph:
    """The captured work; `users` counts the graph and its instances until each is destroyed."""

    def __init__(self, work: list[Callable[[], object]]) -> None:
        self.work = work
        self.users = 1


class FakeCudaGraphs:
    """The functions, each answering (status, result). launches: of all graphs; graphs: every one that was captured."""

    def __init__(self, pycuda: FakePycuda) -> None:
        self._pycuda = pycuda
        self.launches = 0
        self.graphs: list[Graph] = []
        self.driver = ModuleType("cuda.bindings.driver")
        self.driver.__dict__.update(
            CUstream=CUstream,
            CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1),
            cuStreamBeginCapture=self._begin,
            cuStreamEndCapture=self._end,
            cuGraphInstantiate=self._instantiate,
            cuGraphLaunch=self._launch,
            cuGraphDestroy=self._destroy,
            cuGraphExecDestroy=self._destroy,
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `import cuda.bindings.driver` find this."""
        for name, module in (
            ("cuda", ModuleType("cuda")),
            ("cuda.bindings", ModuleType("cuda.bindings")),
            ("cuda.bindings.driver", self.driver),
        ):
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=module is not self.driver)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)

    def _begin(self, stream: CUstream, _mode: int) -> tuple[CUresult]:
        queue = self._pycuda.queue(stream.handle)
        if queue.captured is not None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        queue.captured = []
        return (CUresult.CUDA_SUCCESS,)

    def _end(self, stream: CUstream) -> tuple[Any, ...]:
        """No graph when something happened meanwhile that cannot be captured."""
        queue = self._pycuda.queue(stream.handle)
        work, queue.captured = queue.captured, None
        if work is None or queue in self._pycuda.spoiled_captures:
            self._pycuda.spoiled_captures = [
                spoiled for spoiled in self._pycuda.spoiled_captures if spoiled is not queue
            ]
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None
        self.graphs.append(Graph(work))
        return CUresult.CUDA_SUCCESS, self.graphs[-1]

    def _instantiate(self, graph: Graph, _flags: int) -> tuple[CUresult, Graph]:
        graph.users += 1
        return CUresult.CUDA_SUCCESS, graph

    def _launch(self, graph: Graph, stream: CUstream) -> tuple[CUresult]:
        assert self._pycuda.depth > 0, "cuGraphLaunch without a current context"
        assert graph.users > 0, "launch of a graph that was destroyed"
        self.launches += 1
        for work in graph.work:
            self._pycuda.queue(stream.handle).put(work)
        return (CUresult.CUDA_SUCCESS,)

    def _destroy(self, graph: Graph) -> tuple[CUresult]:
        assert self._pycuda.depth > 0, "a graph destroyed without a current context"
        graph.users -= 1
        assert graph.users >= 0, "a graph destroyed twice"
        return (CUresult.CUDA_SUCCESS,)
