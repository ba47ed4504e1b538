"""Group the nodes that a runtime fuses under one INT8 decision, and count the multiply-accumulates of each group.

`fusion_groups` finds the groups of a placed graph and the edges between them. `int8_macs_share` is the share of the
arithmetic that a placement puts into INT8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from onnx import ModelProto, NodeProto

from engines.graph.topology import (
    COMPUTE_OPS,
    ELEMENTWISE_OPS,
    Topology,
    attribute,
    graph_inputs,
    is_float,
    tensor_types,
    trial_shape,
    types_for_image,
    value_type,
)
from engines.quantise.equalise import divided_name, equalised_name
from engines.quantise.placement import Placement

PRODUCT_OPS = COMPUTE_OPS | {"Einsum", "Attention"}  # also those that are float on every runtime
# Operators that make no fewer values than they read.
_KEEPING_OPS = ELEMENTWISE_OPS | {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Softmax"}


def node_macs(master: ModelProto) -> dict[str, int]:
    """Return the multiply-accumulates per image of every convolution and product, by node name.

    Open dimensions of the image count as in `trial_shape`; what ONNX cannot infer then counts as 1.
    """
    sizes = _Sizes(master)
    macs = {}
    for node in sizes.topology.nodes:
        if node.op_type not in PRODUCT_OPS:
            continue
        weight = sizes.shape(node.input[1])
        if node.op_type == "Conv":  # each output element: one kernel over the input channels of its group
            macs[node.name] = sizes.elements(node.output[0]) * prod(weight[1:])
        elif node.op_type == "ConvTranspose":  # each input element: one kernel over the output channels of its group
            macs[node.name] = sizes.elements(node.input[0]) * prod(weight[1:])
        elif node.op_type == "Gemm":
            macs[node.name] = sizes.elements(node.output[0]) * weight[1 if attribute(node, "transB", 0) else 0]
        elif node.op_type == "Einsum":  # each output element: a sum over the letters that it lacks
            macs[node.name] = sizes.elements(node.output[0]) * sizes.summed_over(node)
        elif node.op_type == "Attention":  # each query, and then each output, meets every key
            met = sizes.shape(node.input[1])[-2:-1]
            macs[node.name] = (sizes.elements(node.input[0]) + sizes.elements(node.output[0])) * prod(met)
        else:
            macs[node.name] = sizes.matmul_macs(node)
    return macs


class _Sizes:
    """Sizes of the tensors of a graph, for one image of the usual size."""

    def __init__(self, master: ModelProto) -> None:
        self.topology = Topology(master)
        declared = value_type(graph_inputs(master)[0]).shape or ()
        is_open = not all(isinstance(size, int) for size in declared)
        self.types = types_for_image(master, trial_shape(declared)) if is_open else tensor_types(master)
        self._batch = max(1, *self.shape(graph_inputs(master)[0].name)[:1])
        self._elements: dict[str, int] = {}

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape; unknown dimensions are 1."""
        known = self.types[tensor].shape if tensor in self.types else None
        return tuple(size if isinstance(size, int) else 1 for size in known or ())

    def elements(self, tensor: str) -> int:
        """Return the elements per image; where they are not known, at least as many as those that were put in."""
        if tensor not in self._elements:
            count = prod(self.shape(tensor)) // self._batch
            maker = self.topology.producers.get(tensor)
            if maker is not None and maker.op_type in _KEEPING_OPS and not self._is_known(tensor):
                read = (name for name in maker.input if name not in self.topology.initializers)
                count = max(count, *map(self.elements, read))
            self._elements[tensor] = max(count, 1)
        return self._elements[tensor]

    def _is_known(self, tensor: str) -> bool:
        shape = self.types[tensor].shape if tensor in self.types else None
        return shape is not None and all(isinstance(size, int) for size in shape)

    def matmul_macs(self, node: NodeProto) -> int:
        """Return the multiply-accumulates of a MatMul by what is known of its operands and its result.

        Each of the three says them or, where it is broadcast or dimensions are unknown, less.
        """
        left, right = (self.shape(name) or (1,) for name in node.input[:2])
        rows = left[-2] if len(left) > 1 else 1
        columns = right[-1] if len(right) > 1 else 1
        inner = max(left[-1], right[-2] if len(right) > 1 else right[0])
        by_result = self.elements(node.output[0]) * inner
        by_right = 0 if node.input[1] in self.topology.initializers else self.elements(node.input[1]) * rows
        return max(by_result, self.elements(node.input[0]) * columns, by_right)

    def summed_over(self, node: NodeProto) -> int:
        """Return over how many values each output element of an Einsum is a sum."""
        equation = attribute(node, "equation", b"").decode().replace(" ", "")  # type: ignore[attr-defined]  # ONNX says string
        read, _, made = equation.partition("->")
        terms = read.split(",")
        letters = "".join(terms).replace(".", "")
        if "->" not in equation:  # then the letters that occur once are those of the result
            made = "".join(letter for letter in letters if letters.count(letter) == 1)
        lengths: dict[str, int] = {}
        for term, name in zip(terms, node.input, strict=True):
            before, _, after = term.partition("...")
            shape = self.shape(name)
            lengths |= zip(before, shape, strict=False)
            lengths |= zip(reversed(after), reversed(shape), strict=False)
        return prod(length for letter, length in lengths.items() if letter not in made)


def int8_macs_share(master: ModelProto, placement: Placement) -> float:
    """Return the share of the multiply-accumulates that run in INT8, in [0, 1]; 0.0 for a model without any.

    The model's own INT8 counts too.
    """
    macs = node_macs(master)
    total = sum(macs.values())
    return sum(macs.get(name, 0) for name in (*placement.own, *placement.quantised)) / total if total else 0.0


@dataclass(frozen=True)
class FusionGroup:
    """Nodes under one decision, all names in graph order.

    name: its first layer.
    layers: its convolutions and matrix products.
    nodes: the layers, the elementwise nodes on their results, and the residual Adds that they complete.
    macs: multiply-accumulates of the layers, per image.
    fixed: why it cannot be INT8; empty if it can.
    """

    name: str
    layers: tuple[str, ...]
    nodes: tuple[str, ...]
    macs: int
    fixed: str = ""


@dataclass(frozen=True)
class Grouping:
    """The decisions of a graph, in graph order, and where values cross between them.

    edges: (i, j, elements per image), i < j, one per pair of groups that read from one another, through whatever lies
    between that is in no group (Resize, Concat, MaxPool, ...). Elements are those of the tensors that the groups make.
    Values mostly flow from i to j; a group of several layers may also read from a later one, and as a boundary costs
    the same either way, the direction is not kept.
    owners: per node of the master graph the groups whose decision its time follows; nodes that are not in it cost the
    same under every plan. readers: per Q/DQ that engines/quantise/apply_plan.py puts in, by name, the groups that it
    is there for.
    """

    groups: tuple[FusionGroup, ...]
    edges: tuple[tuple[int, int, int], ...]
    owners: Mapping[str, tuple[int, ...]] = field(repr=False)
    readers: Mapping[str, tuple[int, ...]] = field(repr=False)

    def plan(self, int8: Sequence[bool], reasons: Mapping[str, str] | str) -> dict[str, str]:
        """Return the `floats` of a PrecisionPlan: every layer of the groups that are not INT8, with a reason.

        int8: a label per group; ignored for a group that is `fixed`.
        reasons: by group name, or one for all.
        """
        floats = {}
        for group, is_int8 in zip(self.groups, int8, strict=True):
            if group.fixed or not is_int8:
                reason = group.fixed or (reasons if isinstance(reasons, str) else reasons[group.name])
                floats.update(dict.fromkeys(group.layers, reason))
        return floats


def fusion_groups(master: ModelProto, placement: Placement) -> Grouping:
    """Return the groups of a master graph, equalised or not, under its placement: that of `ALL_INT8`."""
    return _Fusion(master, placement).grouping()


def tensors_read(group: FusionGroup, nodes: Mapping[str, NodeProto], placement: Placement) -> tuple[str, ...]:
    """Return the tensors that a group reads in INT8 under a placement: inputs of layers, skip connections of Adds.

    nodes: of the graph that was grouped, by name. A group that the placement leaves float reads none.
    """
    return tuple(dict.fromkeys(nodes[name].input[i] for name in group.nodes for i in placement.reads.get(name, ())))


class _Fusion:
    """One grouping; until the end, a group is named by its first layer."""

    def __init__(self, master: ModelProto, placement: Placement) -> None:
        self.topology = Topology(master)
        self.sizes = _Sizes(master)
        self.macs = node_macs(master)
        self.placement = placement
        self.position = {node.name: index for index, node in enumerate(self.topology.nodes)}
        self.layer_of = self._trace_layers()
        self.readers = self._trace_readers()
        self.first = self._join_concat_readers()

    def grouping(self) -> Grouping:
        members: dict[str, list[str]] = {}
        for node in self.topology.nodes:
            if node.name in self.layer_of:
                members.setdefault(self._group(node.name), []).append(node.name)
        order = sorted(members, key=self.position.__getitem__)
        groups = []
        for name in order:
            layers = tuple(node for node in members[name] if node in self.first)
            fixed = "" if name in self.placement.layers else self.placement.floats[name]
            macs = sum(self.macs[layer] for layer in layers)
            groups.append(FusionGroup(name, layers, tuple(members[name]), macs, fixed))
        index = {name: i for i, name in enumerate(order)}
        return Grouping(tuple(groups), self._edges(index), self._owners(index), self._quantiser_readers(index))

    def _group(self, node: str) -> str:
        return self.first[self.layer_of[node]]

    def _trace_layers(self) -> dict[str, str]:
        """Return, per node of a group, the layer that it is fused with."""
        layer_of: dict[str, str] = {}
        made: dict[str, str] = {}  # per tensor that a group makes: the layer
        divisions = {name(layer): layer for layer in self.placement.weights for name in (divided_name, equalised_name)}
        for node in self.topology.nodes:
            layer: str | None = None
            if node.op_type in PRODUCT_OPS:
                layer = None if node.name in self.placement.own else node.name
            elif node.name in divisions:  # it is there for the layer that reads it, while that is INT8
                layer = divisions[node.name]
            elif node.op_type in ELEMENTWISE_OPS:
                variable = [name for name in node.input if name and name not in self.topology.initializers]
                makers = {made.get(name) for name in variable}
                layer = makers.pop() if len(makers) == 1 else self._completed(node, made)
            if layer is not None:
                layer_of[node.name] = layer
                made.update(dict.fromkeys(node.output, layer))
        return layer_of

    def _completed(self, node: NodeProto, made: Mapping[str, str]) -> str | None:
        """Return the layer that a residual Add completes: by the placement, else the last that it alone reads."""
        if node.op_type != "Add":
            return None
        reads = self.placement.reads.get(node.name)
        if reads is not None and len(reads) == 1 and node.input[1 - reads[0]] in made:
            return made[node.input[1 - reads[0]]]
        operands = [name for name in node.input if name in made]
        alone = [name for name in operands if self.topology.sole_reader(name) is node]
        layers = [made[name] for name in (operands if reads is not None and not alone else alone)]
        return max(layers, key=self.position.__getitem__, default=None)

    def _trace_readers(self) -> dict[str, list[str]]:
        """Return, per quantised tensor, the layers whose groups read it in INT8, directly or moved."""
        readers: dict[str, list[str]] = {}
        for node in reversed(self.topology.nodes):
            for index in self.placement.reads.get(node.name, ()):
                if node.name in self.layer_of:
                    reading = [self.layer_of[node.name]]
                else:
                    reading = [layer for name in node.output for layer in readers[name]]
                known = readers.setdefault(node.input[index], [])
                known.extend(layer for layer in dict.fromkeys(reading) if layer not in known)
        return readers

    def _join_concat_readers(self) -> dict[str, str]:
        """Return, per layer, the first layer of its group."""
        first = {layer: layer for layer in self.layer_of.values()}
        for node in self.topology.nodes:
            if node.op_type == "Concat" and node.name in self.placement.reads:
                joined = {first[layer] for layer in self.readers[node.output[0]]}
                name = min(joined, key=self.position.__getitem__)
                first.update({layer: name for layer, known in first.items() if known in joined})
        return first

    def _edges(self, index: Mapping[str, int]) -> tuple[tuple[int, int, int], ...]:
        """Follow the tensors of every group, through nodes in no group, to the groups that read them."""
        arriving: dict[str, dict[str, int]] = {}  # per tensor: what groups made that it comes from, with the group
        crossing: dict[tuple[int, int], set[str]] = {}
        for node in self.topology.nodes:
            sources = {made: group for name in node.input for made, group in arriving.get(name, {}).items()}
            if node.name in self.layer_of:
                here = index[self._group(node.name)]
                for made, group in sources.items():
                    if group != here:
                        crossing.setdefault((min(group, here), max(group, here)), set()).add(made)
                arriving.update({name: {name: here} for name in node.output})
            else:
                floats = [name for name in node.output if is_float(self.sizes.types, name)]
                arriving.update(dict.fromkeys(floats, sources))
        return tuple((*pair, sum(self.sizes.elements(made) for made in crossing[pair])) for pair in sorted(crossing))

    def _owners(self, index: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        owners = {}
        for node in self.topology.nodes:
            if node.name in self.layer_of:
                owners[node.name] = self._indices(index, [self.layer_of[node.name]])
            elif node.name in self.placement.reads:  # moves values in INT8 when its readers are
                layers = [layer for name in node.output for layer in self.readers[name]]
                owners[node.name] = self._indices(index, layers)
        return owners

    def _quantiser_readers(self, index: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        readers = {}
        for tensor, layers in self.readers.items():
            readers.update(dict.fromkeys((f"{tensor}.int8", f"{tensor}.dequantised"), self._indices(index, layers)))
        weights: dict[str, list[str]] = {}
        for layer, weight in self.placement.weights.items():
            weights.setdefault(f"{weight.initializer}.axis{weight.axis}.dequantised", []).append(layer)
        return readers | {name: self._indices(index, layers) for name, layers in weights.items()}

    def _indices(self, index: Mapping[str, int], layers: Iterable[str]) -> tuple[int, ...]:
        return tuple(sorted({index[self.first[layer]] for layer in layers}))
