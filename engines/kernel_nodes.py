"""Assign the nodes of a graph to the kernels that a runtime made of them, for times by kernel to become times by node.

A runtime fuses nodes, and adds kernels that only change how a tensor lies in memory. Which nodes a kernel computes only
the runtime knows; `assign_others` gives their share to the kernels that compute none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Nodes = tuple[str, ...]


def assign_others(computed: Mapping[str, Nodes], readers: Mapping[str, Sequence[str]]) -> dict[str, Nodes]:
    """Return the nodes of every kernel; those that compute none get the nodes for which they are there.

    1. A kernel that only changes the layout gets the nodes of the kernels that read its result.
    2. If nothing reads it, it gets those of the kernels that made its input.

    Args:
        computed: By kernel, in the order of execution, the names of the nodes that it computes.
        readers: By kernel the kernels that read a result of it.
    """
    nodes = dict(computed)
    for kernel in reversed(nodes):
        if not nodes[kernel]:
            nodes[kernel] = _union(nodes, readers[kernel])
    makers: dict[str, list[str]] = {kernel: [] for kernel in nodes}
    for kernel in nodes:
        for reader in readers[kernel]:
            makers[reader].append(kernel)
    for kernel in nodes:
        if not nodes[kernel]:
            nodes[kernel] = _union(nodes, makers[kernel])
    return nodes


def _union(nodes: Mapping[str, Nodes], kernels: Iterable[str]) -> Nodes:
    return tuple(dict.fromkeys(node for kernel in kernels for node in nodes[kernel]))
