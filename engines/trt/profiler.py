"""What each layer of an engine takes: TensorRT's profiler, over some inferences."""

from __future__ import annotations

from statistics import median
from typing import Any

from engines.backend import Array
from engines.trt.dialect import Dialect
from engines.trt.session import Session

_WARM_UP = 3  # runs that nobody counts: clocks rise, kernels are loaded


def layer_times_ms(dialect: Dialect, session: Session, batch: Array, runs: int = 20) -> dict[str, float]:
    """Median time in ms of every layer, by its name, over `runs` inferences of one batch.

    TensorRT waits for every layer meanwhile: their sum is more than an inference takes that nobody watches.
    """
    times: dict[str, list[float]] = {}
    profiler = _profiler(dialect, times)
    session.drop_graphs()
    session.context.profiler = profiler
    for _ in range(_WARM_UP + runs):
        session.finish(session.start(batch))
    session.context.profiler = None
    return {layer: median(values[_WARM_UP:]) for layer, values in times.items() if len(values) > _WARM_UP}


def _profiler(dialect: Dialect, times: dict[str, list[float]]) -> Any:
    base = dialect.trt.IProfiler

    class Profiler(base):  # type: ignore[misc, valid-type]  # the class is known only when the module is there
        def report_layer_time(self, layer: str, milliseconds: float) -> None:
            times.setdefault(layer, []).append(milliseconds)

    return Profiler()
