"""An INT8 engine under a plan, on a runtime that may have no INT8 kernel for some of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

from agent.model import Model
from calibrate.plan import PrecisionPlan
from engines.backend import Backend, Built, EngineError, Progress
from engines.calibration import Calibration
from engines.placement import Placement
from engines.planned import quantised_graph

_ROUND_SHARE = 0.8  # of what is left of the progress: nobody knows how many builds follow, and mostly none does


@dataclass(frozen=True)
class Int8Build:
    """What came of it: the engine, what was quantised for it, the layers without a kernel, and how many builds."""

    built: Built
    placement: Placement
    without_int8: Mapping[str, str]
    builds: int


def build_int8(
    model: Model,
    backend: Backend,
    plan: PrecisionPlan,
    calibration: Calibration | None,
    without_int8: Mapping[str, str],
    progress: Progress,
) -> Int8Build:
    """Build under a plan; where the runtime has no INT8 kernel for a node, leave that float and build again.

    without_int8: nodes that are known to lack one, with the reason: left float at once. They stay float, although among
    other neighbours they might have one: to find out would take a build a node. calibration: as `quantised_graph`.
    Raises EngineError as that and the backend do, and `engine.int8` where leaving nodes float does not help.
    """
    lacking = dict(without_int8)
    for number in count():
        graph = quantised_graph(model.master, replace(plan, floats={**plan.floats, **lacking}), calibration)
        ranges = calibration.seen if calibration is not None else {}
        built = backend.build(model.request(graph.graph, "int8", ranges), _round(progress, number))
        own = graph.placement.own  # what the model itself has in INT8 may run in float: it cannot be left out
        found = {name: reason for name, reason in built.without_int8.items() if name not in own}
        if not found and built.engine:
            progress(1.0, "built")
            return Int8Build(built, graph.placement, lacking, number + 1)
        if not found.keys() - lacking.keys():
            break
        lacking |= found
    raise EngineError(
        "engine.int8",
        f"no INT8 kernel for {', '.join(built.without_int8)}, though they were left float",
        "an engine after the nodes without INT8 kernels were left float",
        "leave their neighbours float too, with precision.keep_float, or build with --precision fp16",
    )


def _round(progress: Progress, number: int) -> Progress:
    """The progress of one build of several, never less than that of those before."""
    left = (1.0 - _ROUND_SHARE) ** number
    return lambda fraction, doing: progress(1.0 - left + left * _ROUND_SHARE * fraction, doing)
