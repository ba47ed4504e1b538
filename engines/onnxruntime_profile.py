"""Reading what ONNX Runtime tells of a session: its profile, and the graph that its optimiser made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from statistics import median

from onnx import ModelProto, NodeProto

from engines.topology import Topology

_KERNEL = "_kernel_time"
_BLOCKED = re.compile(r"_nchwc(_token_\d+)?$")  # a kernel on blocked channels is named after the tensor it makes


def kernel_times_ms(profile: str, warm_up: int) -> dict[str, float]:
    """Median time of every node in ms, by its name, from the text of a profile; its first runs are not counted."""
    times: dict[str, list[float]] = {}
    for event in json.loads(profile):
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            times.setdefault(event["name"].removesuffix(_KERNEL), []).append(event["dur"] / 1000.0)
    return {name: median(values[warm_up:]) for name, values in times.items() if len(values) > warm_up}


def nodes_by_kernel(graph: ModelProto, optimised: ModelProto) -> dict[str, tuple[str, ...]]:
    """Per node of the optimised graph, by name: names of the nodes of `graph` that it computes, in graph order.

    Fused nodes, and constants folded into them, are found from the tensor it makes. A node that only changes the layout
    computes none: it gets those that read its result, for whose sake it is there, or else those that made its input.
    """
    nodes = _claimed(graph, optimised)
    topology = Topology(optimised)
    for node in reversed(topology.nodes):
        if not nodes[node.name]:
            readers = (reader.name for name in node.output for reader, _ in topology.readers(name))
            nodes[node.name] = _union(nodes, readers)
    for node in topology.nodes:
        if not nodes[node.name]:
            makers = (topology.producers[name].name for name in node.input if name in topology.producers)
            nodes[node.name] = _union(nodes, makers)
    return nodes


def _claimed(graph: ModelProto, optimised: ModelProto) -> dict[str, tuple[str, ...]]:
    """Each node of the graph goes to the first that computes it; both graphs are topologically sorted."""
    topology = Topology(graph)
    named = {node.name: node for node in topology.nodes}
    position = {node.name: index for index, node in enumerate(topology.nodes)}
    taken: set[str] = set()
    claimed = {}
    for kernel in optimised.graph.node:
        own: set[str] = set()
        waiting = _last_nodes(kernel, topology, named)
        while waiting:
            node = waiting.pop()
            if node.name not in taken:
                taken.add(node.name)
                own.add(node.name)
                waiting.extend(topology.producers[name] for name in node.input if name in topology.producers)
        claimed[kernel.name] = tuple(sorted(own, key=position.__getitem__))
    return claimed


def _last_nodes(kernel: NodeProto, topology: Topology, named: Mapping[str, NodeProto]) -> list[NodeProto]:
    """The nodes whose results a kernel makes: by the tensors' names or, where they are new, by its own."""
    blocked = _BLOCKED.search(kernel.name)
    tensors = [*kernel.output, *([kernel.name[: blocked.start()]] if blocked else [])]
    found = [topology.producers[name] for name in tensors if name in topology.producers]
    name = kernel.name
    while name and not found:  # "Mul_43/QuickGeluFusion/"
        found = [named[name]] if name in named else []
        name = name.rpartition("/")[0]
    return found


def _union(nodes: Mapping[str, tuple[str, ...]], kernels: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node for kernel in kernels for node in nodes[kernel]))
