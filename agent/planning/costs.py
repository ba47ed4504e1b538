"""Measure what each fusion group costs in INT8 and in float, or estimate it and say why.

`PlanBuilder` builds the engines of a search. `find_costs` profiles some of them, or counts multiply-accumulates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.models.build import build_int8
from agent.models.model import Model
from agent.planning.what_if import Remember
from calibrate.partition import FLOAT, FREE, INT8, Problem, fastest
from calibrate.plan import PrecisionPlan, Repairs
from engines.calibration import Calibration
from engines.errors import EngineError
from engines.interface import Array, Backend, Engine, ProfiledEngine, Progress, silent
from engines.quantise.costs import Costs, HasTime, OutOfTimeError, macs_costs, measure_costs
from engines.quantise.fusion import Grouping

_WORTH_IT = 0.99  # times the float engine's time: a plan that saves less saves nothing


class PlanBuilder:
    """Build engines of one model under plans, and count them. The all-float one and the last are built once.

    repairs: of every plan. without_int8: layers for which the runtime has no INT8 kernel, as far as is known, each with
    the reason; they stay float from then on.
    """

    def __init__(
        self, model: Model, calibration: Calibration, backend: Backend, without_int8: Mapping[str, str] | None = None
    ) -> None:
        self.model = model
        self.calibration = calibration
        self.repairs = Repairs()
        self.builds = 0
        self.without_int8 = dict(without_int8 or {})
        self.backend = backend
        self._float: bytes | None = None
        self._last: tuple[tuple[frozenset[str], Repairs], bytes] | None = None

    @property
    def runtime(self) -> Mapping[str, str]:
        """All of the backend that times and kernels depend on."""
        return {**self.backend.describe(), **self.backend.flags()}

    def plan(self, floats: Mapping[str, str]) -> PrecisionPlan:
        """Return the plan with these float layers and those without an INT8 kernel, with the repairs."""
        return PrecisionPlan({**floats, **self.without_int8}, self.repairs)

    def load(self, floats: Mapping[str, str], progress: Progress = silent) -> Engine:
        """Return a loaded engine in which all layers but these are INT8, as far as the runtime has kernels.

        Raises EngineError as `build_int8`.
        """
        if self._last is None or self._last[0] != self._key(floats):
            done = build_int8(
                self.model, self.backend, self.plan(floats), self.calibration, self.without_int8, progress
            )
            self.builds += done.builds
            self.without_int8 |= done.without_int8
            self._last = self._key(floats), done.built.engine
        return self.backend.load(self._last[1])

    def _key(self, floats: Mapping[str, str]) -> tuple[frozenset[str], Repairs]:
        """Return the facts that identify an engine; the reasons do not count."""
        return frozenset({*floats, *self.without_int8}), self.repairs

    def load_float(self, progress: Progress = silent) -> Engine:
        """Return the engine that INT8 has to be faster than: the runtime's fastest float."""
        if self._float is None:
            request = self.model.build_request(self.model.master, self.backend.precisions[-1], self.calibration.seen)
            self._float = self.backend.build(request, progress).engine
            self.builds += 1
        return self.backend.load(self._float)


@dataclass(frozen=True)
class GroupCosts:
    """The costs that the search uses.

    why: The reason for which they are not measured; empty if they are.
    on: The runtime that was measured. kept: True if an earlier job measured them.
    without_int8: Layers without an INT8 kernel there, each with the reason, as far as measuring has shown.
    """

    costs: Costs
    why: str
    on: str = ""
    kept: bool = False
    without_int8: Mapping[str, str] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """The relative difference below which times count as equal: their noise; more for estimates."""
        return min(max(self.costs.noise, 0.01), 0.05) if not self.why else 0.05


def find_costs(
    grouping: Grouping,
    floats: Mapping[str, str],
    builder: PlanBuilder,
    batch: Array,
    remember: Remember,
    progress: Progress,
    source: str = "measured",
    has_time: HasTime = lambda _seconds: True,
) -> GroupCosts:
    """Measure the groups on designed engines; use multiply-accumulates if INT8 saves no time, or none can be measured.

    floats: layers that stay float in every design. source: "macs" measures nothing. has_time: as for `measure_costs`.
    """
    if source == "macs":
        return GroupCosts(macs_costs(grouping), "asked for")
    costs = _measured(grouping, floats, builder, batch, remember, progress, has_time)
    found = GroupCosts(costs, "", " ".join(builder.runtime.values()), without_int8=dict(builder.without_int8))
    if costs.source != "measured":
        return replace(found, why=costs.doubt)
    fixed = labels(grouping, {**floats, **builder.without_int8}, {})
    best = fastest(as_problem(grouping, costs, np.zeros(len(fixed)), fixed), np.inf).time + costs.fixed_ms
    all_float = float(costs.float_ms.sum()) + costs.fixed_ms
    if best <= _WORTH_IT * all_float:
        return found
    all_int8 = costs.total_ms(grouping, fixed != FLOAT)
    times = f"{all_int8:.3g} ms all INT8, {all_float:.3g} ms all float"
    why = f"INT8 is not faster on this machine: {times}; so the plan is for one where it is"
    counted = replace(macs_costs(grouping), noise=costs.noise, builds=costs.builds, passes=costs.passes)
    return replace(found, costs=counted, why=why)


def _measured(
    grouping: Grouping,
    floats: Mapping[str, str],
    builder: PlanBuilder,
    batch: Array,
    remember: Remember,
    progress: Progress,
    has_time: HasTime,
) -> Costs:
    """Return the measured costs, which `remember` may know; note the layers without INT8 kernels."""
    layers = {layer for group in grouping.groups for layer in group.layers}
    shown = 0.0

    def show(fraction: float, doing: str) -> None:
        nonlocal shown
        shown = fraction
        progress(fraction, doing)

    def show_build(_: float, doing: str) -> None:
        progress(shown, doing)
        if not has_time(0.0):  # on a board one build takes minutes
            raise OutOfTimeError

    def build(plan: PrecisionPlan) -> ProfiledEngine:
        all_floats = {**floats, **plan.floats}
        is_float = layers <= all_floats.keys()
        engine = builder.load_float(show_build) if is_float else builder.load(all_floats, show_build)
        if not isinstance(engine, ProfiledEngine):
            engine.close()
            found = "an engine without layer times"
            raise EngineError("engine.profile", found, "a runtime that times its kernels", "use --costs macs")
        return engine

    def measured() -> dict[str, Any]:
        free = labels(grouping, {**floats, **builder.without_int8}, {}) != FLOAT
        costs = measure_costs(grouping, build, batch, show, free=free, has_time=has_time)
        values = {name: np.asarray(value).tolist() for name, value in asdict(costs).items()}
        return {**values, "without_int8": dict(builder.without_int8)}

    costs, without_int8 = parse_costs(remember("group costs", measured), grouping)
    builder.without_int8 |= without_int8
    return costs


def parse_costs(document: Mapping[str, Any], grouping: Grouping) -> tuple[Costs, dict[str, str]]:
    """Return remembered costs of these groups, and the layers without INT8 kernels.

    Raises KeyError, TypeError or ValueError for anything else.
    """
    known = dict(document)
    without_int8 = dict(known.pop("without_int8"))
    sizes = {"int8_ms": len(grouping.groups), "float_ms": len(grouping.groups), "boundary_ms": len(grouping.edges)}
    arrays = {name: np.array(known[name], np.float64) for name in sizes}
    for name, size in sizes.items():
        if arrays[name].shape != (size,) or not (np.isfinite(arrays[name]) & (arrays[name] >= 0.0)).all():
            raise ValueError(f"{name} of other groups, or that are no times")
    return Costs(**{**known, **arrays, "by_macs": np.array(known["by_macs"], np.bool_)}), without_int8


def labels(grouping: Grouping, floats: Mapping[str, str], forced: Mapping[str, str]) -> NDArray[np.int8]:
    """Return per group FREE, or its precision by nature, kernel or rule. A group whose rules differ stays float."""
    labels = []
    for group in grouping.groups:
        if group.fixed or any(layer in floats for layer in group.layers):
            labels.append(FLOAT)
        else:
            labels.append(INT8 if any(layer in forced for layer in group.layers) else FREE)
    return np.array(labels, np.int8)


def as_problem(
    grouping: Grouping, costs: Costs, noise: NDArray[np.float64], fixed: NDArray[np.int8] | Sequence[int]
) -> Problem:
    """Return a grouping and its measurements as a partition problem."""
    edges = np.array([edge[:2] for edge in grouping.edges], np.int64).reshape(-1, 2)
    return Problem(costs.int8_ms, costs.float_ms, noise, edges, costs.boundary_ms, np.asarray(fixed, np.int8))
