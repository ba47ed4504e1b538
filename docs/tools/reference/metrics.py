"""The page of metrics: every family that a collector for Prometheus makes, from the calls that make it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from docs.tools.reference.markdown import anchored, heading, page, prose, table
from docs.tools.reference.source import Module, source
from docs.tools.reference.texts import HOLE, Texts, combined

_INTRODUCTION = """\
The metrics that tared serves to Prometheus at `http://HOST:PORT/metrics`. Of a board `metrics.port` in
[config.yaml](configuration.md#metrics) switches them on, of a process of the control room its option `--metrics`.

Every process also has the usual metrics of a process: `process_cpu_seconds_total`, `process_open_fds`,
`process_resident_memory_bytes` and the like. A counter begins at 0 with the process."""
_PLACES = {
    "agent.daemon.prometheus": "The daemon",
    "agent.common.metrics": "Every process",
    "fleet.metrics.processes.collector_metrics": "tared fleet collect",
    "fleet.metrics.processes.controller_metrics": "tared fleet rollout run",
    "fleet.metrics.processes.web_metrics": "tared web",
    "fleet.metrics.store.StoreMetrics": "Both that read the fleet's store",
    "fleet.metrics.store.device_metrics": "tared fleet collect",
    "fleet.metrics.store.rollout_metrics": "tared fleet rollout run",
}
_TYPES = {
    "CounterMetricFamily": ("counter", "_total"),
    "GaugeMetricFamily": ("gauge", ""),
    "HistogramMetricFamily": ("histogram", ""),
    "Info": ("info", "_info"),
    "InfoMetricFamily": ("info", "_info"),
    "StateSetMetricFamily": ("state set", ""),
    "counters": ("counter", "_total"),
    "gauges": ("gauge", ""),
}
_MAKERS = "agent.common.metrics"  # its `counters` and `gauges` make families for their callers, which are read instead


@dataclass(frozen=True)
class MetricFacts:
    """A metric by its name in a scrape; of a histogram without `_bucket`, `_sum` and `_count`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    place: str


def metrics_page() -> str:
    """Return the page."""
    parts = []
    found = metrics()
    for place in dict.fromkeys(_PLACES.values()):
        members = sorted((each for each in found if each.place == place), key=lambda each: each.name)
        rows = [
            (anchored(each.name), each.kind, ", ".join(f"`{label}`" for label in each.labels), prose(each.text))
            for each in members
        ]
        parts += [heading(2, f"of {place}", place), table(("Metric", "Type", "Labels", "Meaning"), rows)]
    return page("Metrics", _INTRODUCTION, parts)


def metrics() -> list[MetricFacts]:
    """Return every metric. Raises ValueError for one whose name cannot be found out, or that has no known place."""
    texts, found = Texts(source(), follows_parts=True), dict[MetricFacts, None]()
    for family in _TYPES:
        for module, call in source().calls.get(family, ()):
            if module.name != _MAKERS or family == "Info":
                found.update(dict.fromkeys(_read(texts, module, call, family)))
    return list(found)


def _read(texts: Texts, module: Module, call: ast.Call, family: str) -> Iterator[MetricFacts]:
    kind, ending = _TYPES[family]
    names, meanings = (texts.of(module, each) for each in call.args[:2])
    for (name, meaning), _ in combined([names, meanings]):
        if HOLE.search(name):
            raise ValueError(f"{module.path}:{call.lineno}: the name of a metric cannot be found out")
        labels = _labels(module, call, family)
        labels += {"state set": (name,), "info": _info_labels(module, call)}.get(kind, ())
        text = HOLE.sub(lambda part: f"{{{part[1]}}}", meaning)
        yield MetricFacts(f"{name}{ending}", kind, labels, text, _place(module, call))


def _place(module: Module, call: ast.Call) -> str:
    names = [each.name for each in module.around(call) if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    for name in (f"{module.name}.{names[-1]}" if names else "", module.name):
        if name in _PLACES:
            return _PLACES[name]
    raise ValueError(f"{module.path}:{call.lineno}: a metric of a place that has no section on the page")


def _labels(module: Module, call: ast.Call, family: str) -> tuple[str, ...]:
    """Return the names of the labels, which a local variable may hold."""
    node = next((each.value for each in call.keywords if each.arg == "labels"), None)
    if family in ("counters", "gauges"):
        node = call.args[2]
    if isinstance(node, ast.Name):
        function = module.function(call)
        assert function is not None
        (node,) = [
            each.value
            for each in ast.walk(function)
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id == node.id
        ]
    return tuple(ast.literal_eval(node)) if node is not None else ()


def _info_labels(module: Module, call: ast.Call) -> tuple[str, ...]:
    """Return the labels of an info, which are the keys of the dict that is added to it; `tared_build` has its own."""
    if module.name == _MAKERS:
        return ("version", "program")
    function = module.function(call)
    target = module.parents[call]
    if function is None or not isinstance(target, ast.Assign) or not isinstance(target.targets[0], ast.Name):
        return ()
    name = target.targets[0].id
    for each in ast.walk(function):
        if (
            isinstance(each, ast.Call)
            and ast.unparse(each.func) == f"{name}.add_metric"
            and isinstance(each.args[1], ast.Dict)
        ):
            return tuple(str(key.value) for key in each.args[1].keys if isinstance(key, ast.Constant))
    return ()
