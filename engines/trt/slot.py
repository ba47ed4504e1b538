"""What one batch under way needs: memory for inputs and outputs, its end as an event, perhaps a captured graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engines.cuda import Gpu
from engines.cuda_graph import CudaGraph
from engines.memory import DeviceMemory, HostMemory

Shape = tuple[int, ...]


class Slot:
    """The memory of one batch under way, and the event that ends it.

    sizes: bytes of each input and output. inputs: read more than once, so not mapped. hidden: only the GPU's.
    """

    def __init__(self, gpu: Gpu, sizes: Mapping[str, int], inputs: Collection[str], hidden: Collection[str]) -> None:
        shown = {name: nbytes for name, nbytes in sizes.items() if name not in hidden}
        self.memory = {name: HostMemory(gpu, nbytes, mapped=name not in inputs) for name, nbytes in shown.items()}
        self._hidden = {name: DeviceMemory(gpu, sizes[name]) for name in hidden}
        self.event: Any = gpu.driver.Event()
        self.shapes: dict[str, Shape] = {}
        self.pending = False
        self.graph: CudaGraph | None = None

    def drop_graph(self) -> None:
        """The engine is queued kernel by kernel again. The context must be current."""
        if self.graph is not None:
            self.graph.close()
            self.graph = None

    def close(self) -> None:
        """Give everything back now: an error under way may still hold this. The context must be current."""
        self.memory.clear()
        self._hidden.clear()
        self.event = None

    def address(self, name: str) -> int:
        """Where the GPU finds an input or output."""
        return (self._hidden[name] if name in self._hidden else self.memory[name]).address

    def finish_on(self, stream: Any) -> None:
        """The batch is done when the stream is past this point."""
        self.event.record(stream)
        self.pending = True
