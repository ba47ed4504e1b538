"""Place Q/DQ: decide which nodes of a master graph read INT8, and which tensors share a scale.

The rules, in the order in which they depend on one another:

1. Layers. A convolution or matrix product with constant float32 weights reads its input as INT8, and its weights are
   INT8 with a scale per output channel. Exceptions are in `_Rules._unquantisable`.

   1a. Attention. A matrix product of two activations reads both as INT8 if its result goes on into a layer, through
       whatever activations, moves and softmaxes. Query, key and value differ in range: where one tensor is cut into
       them, each part has a scale of its own.

           query -> Q/DQ ---+
                            MatMul -> Softmax (float) -> Q/DQ ---+
           key   -> Q/DQ ---+                                    MatMul -> ... -> a layer
                                               value -> Q/DQ ----+

       NVIDIA's quantisers are there too (Model-Optimizer; TensorRT, "Fused Attention"): Q/DQ on query, key, value and
       probabilities, none on the logits.

2. Residual Add. Its skip connection is INT8 and shares the Q of its other readers. The operand that comes straight from
   a quantised layer, and that nothing else reads, stays float, because runtimes fuse the two.

       layer -> activation (float) ---+
                                      Add -> ... -> a quantised layer
       skip -> Q/DQ  -----------------+

   The sum that a normalisation reads is float, with both operands: the stream that runs through a transformer has rare
   values far beyond the others, and no layer reads it as it is.

   2a. If both operands come straight from such layers, the later layer's stays float: when it runs, the other operand
       is there to be added.

3. Movement. A node that only moves values (Concat, MaxPool, Resize, ...) reads INT8 if everything that reads its result
   does: INT8 in, INT8 out.

4. Scales. Tensors that hold values of the same source share a scale, and only the sources, the taps, are observed.

Everything else stays float, and `_FLOAT_OPS` gives reasons. A plan's nodes stay float too; it cannot shift the other
rules, since it is applied between rules 1 and 2. What the model itself has in INT8 is kept as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto

from calibrate.plan import ALL_INT8, PrecisionPlan
from engines.errors import EngineError
from engines.graph.existing_qdq import own_int8
from engines.graph.topology import (
    AVERAGE_OPS,
    COMPUTE_OPS,
    ELEMENTWISE_OPS,
    MOVEMENT_OPS,
    QDQ_OPS,
    Topology,
    channel_axis,
    data_inputs,
    is_float,
    moves_values,
    tensor_types,
)

_ATTENTION_OPS = {"Softmax", "Where"}  # these normalise and mask what lies between the products of attention
_PART_OPS = {"Split", "Slice", "Gather"}  # they cut a tensor into parts
_NORMALISATIONS = {"LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"}
_FLOAT_OPS = {
    **dict.fromkeys(("Softmax", "LogSoftmax"), "it is a softmax: its exponentials need float"),
    **dict.fromkeys(_NORMALISATIONS, "it is a normalisation: its mean and variance need float"),
    **dict.fromkeys(("Erf", "Gelu"), "it is a GELU: runtimes compute it in float behind the layer before"),
    "GridSample": "it samples at computed places: these and its interpolation need float",
    "Resize": "it interpolates: runtimes do so in float",
    "Einsum": "it is an Einsum, which no runtime has in INT8: a MatMul in its place could be",
    "Attention": "it is a fused attention, which computes in float",
}


@dataclass(frozen=True)
class ScaleGroup:
    """Tensors under one scale. All their values occur in the `taps`, which are the ones to observe."""

    tensors: tuple[str, ...]
    taps: tuple[str, ...]


@dataclass(frozen=True)
class Weight:
    """A constant weight to quantise: the initialiser and the axis of its output channels."""

    initializer: str
    axis: int


@dataclass(frozen=True)
class Placement:
    """State which nodes and tensors are quantised.

    Every node but the model's Q/DQ is in `quantised`, in `own` or, with its reason, in `floats`.

    Args:
        reads: The input indices that take Q/DQ, for each quantised node; none where it reads a tensor that the model
            itself dequantised.
        weights: The weight of each quantised convolution or matrix product that has one.
        products: Names of the quantised matrix products of two activations.
        groups: Every activation tensor that is given Q/DQ is in exactly one group; in graph order.
        floats: Name of each node that stays float -> the reason in plain words.
        own: Names of the convolutions and matrix products that the model itself has in INT8; kept as they are.
    """

    reads: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, Weight]
    groups: tuple[ScaleGroup, ...]
    floats: Mapping[str, str]
    own: tuple[str, ...] = ()
    products: tuple[str, ...] = ()

    @property
    def layers(self) -> frozenset[str]:
        """Names of the convolutions and matrix products that read INT8 by this placement."""
        return frozenset((*self.weights, *self.products))

    @property
    def quantised(self) -> tuple[str, ...]:
        """Names of the nodes that read INT8 by this placement, in graph order."""
        return tuple(self.reads)

    @property
    def taps(self) -> tuple[str, ...]:
        """The tensors that need a histogram, in graph order."""
        return tuple(tap for group in self.groups for tap in group.taps)

    @property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """The taps that must be given one amax, group by group."""
        return tuple(group.taps for group in self.groups if len(group.taps) > 1)


def place(master: ModelProto, plan: PrecisionPlan = ALL_INT8) -> Placement:
    """Apply the rules to a master graph. Under a plan, its nodes stay float and read unquantised values.

    The taps under any plan are among those of `ALL_INT8`: one calibration serves every plan. Raises
    EngineError `plan.node` when the plan names a node that the graph does not have, or one of the model's own INT8.
    """
    unknown = set(plan.floats) - {node.name for node in master.graph.node}
    if unknown:
        raise EngineError(
            "plan.node",
            f"node '{min(unknown)}' in the plan",
            "nodes of this model",
            "make the plan again for this model",
        )
    return _Rules(master, plan).placement()


class _Rules:
    """The rules of this module, each applied to what the ones before have filled in."""

    def __init__(self, master: ModelProto, plan: PrecisionPlan) -> None:
        self.topology = Topology(master)
        self.types = tensor_types(master)
        self.plan = plan
        self.own = own_int8(self.topology)
        self.kept: dict[str, None] = {}
        self.reads: dict[str, tuple[int, ...]] = {}
        self.weights: dict[str, Weight] = {}
        self.floats: dict[str, str] = {}
        self.products: dict[str, None] = {}
        self.cuts: set[str] = set()
        self.sources = self._trace_sources()
        self.layers: dict[str, str] = {}
        self.position = {node.name: index for index, node in enumerate(self.topology.nodes)}

    def placement(self) -> Placement:
        nodes = self.topology.nodes
        layers = [node for node in nodes if node.op_type in COMPUTE_OPS]
        for node in layers:
            if self.own.multiplies(node):
                self.kept[node.name] = None
            elif reason := self._unquantisable(node):
                self.floats[node.name] = reason
            else:  # rule 1; a plan is applied later, so that it cannot shift the other rules
                rank = len(self.topology.initializers[node.input[1]].dims)
                self.weights[node.name] = Weight(node.input[1], channel_axis(node, rank))
        self.products = self._find_products()
        self.cuts = self._find_cuts()
        self.sources = self._trace_sources()
        self.layers = self._trace_layers()
        self._apply_plan(layers)
        feeding = self._feeding_layers()
        for node in nodes:
            if node.op_type == "Add":
                self._residual(node, feeding)
        for node in reversed(nodes):
            self._movement(node)
        reads = {node.name: self.reads[node.name] for node in nodes if node.name in self.reads}
        floats = {
            node.name: self._float_reason(node)
            for node in nodes
            if node.name not in reads and node.name not in self.kept and node.op_type not in QDQ_OPS
        }
        read = [node.input[index] for node in nodes for index in self.reads.get(node.name, ())]
        to_scale = [tensor for tensor in dict.fromkeys(read) if tensor not in self.own.pairs]
        groups = scale_groups(to_scale, self.sources, [*self.topology.inputs, *self.topology.producers])
        return Placement(reads, self.weights, groups, floats, tuple(self.kept), tuple(self.products))

    def _trace_sources(self) -> dict[str, tuple[str, ...]]:
        """Return, per tensor that operators only moved together, the tensors its values come from.

        A tensor that comes from the model's own INT8 too is a source itself, and so is each part of one that is cut.
        """
        sources: dict[str, tuple[str, ...]] = {}
        for node in self.topology.nodes:
            if node.name not in self.cuts and moves_values(node, self.topology.initializers):
                inputs = [node.input[index] for index in data_inputs(node)]
                origins = dict.fromkeys(source for name in inputs for source in sources.get(name, (name,)))
                if not any(map(self.own.concerns, origins)):
                    sources.update(dict.fromkeys(node.output, tuple(origins)))
        return sources

    def _unquantisable(self, node: NodeProto) -> str | None:
        """Return why rule 1 leaves a layer float; None if it does not."""
        weight = self.topology.initializers.get(node.input[1])
        if node.input[1] in self.own.weights:
            return "the model has its weights in INT8, and its input float"
        if weight is None:
            return "its weights are not constant, and no layer reads what it makes"
        if weight.data_type != TensorProto.FLOAT:
            return f"its weights are {TensorProto.DataType.Name(weight.data_type).lower()}, not float32"
        if node.input[0] in self.topology.initializers:
            return "its input is constant"
        if node.op_type == "MatMul" and len(weight.dims) != 2:
            return f"its weights have rank {len(weight.dims)}, not 2"
        sources = self.sources.get(node.input[0], (node.input[0],))
        makers = [self.topology.producers[source] for source in sources if source in self.topology.producers]
        if any(maker.op_type == "Softmax" for maker in makers):
            return "it reads probabilities: the expected value of a softmax is box decoding"
        return None

    def _find_products(self) -> dict[str, None]:
        """Rule 1a: return the products of two activations whose result goes on into a layer, in graph order."""
        through = ELEMENTWISE_OPS | MOVEMENT_OPS | AVERAGE_OPS | QDQ_OPS | _ATTENTION_OPS
        computed = self._computed_from_image()
        reaching: set[str] = set()  # tensors from which a layer can be reached
        found: list[str] = []
        for node in reversed(self.topology.nodes):
            if node.name in self.weights or node.name in self.kept:
                reaching.update(node.input[:2])
            elif reaching.intersection(node.output):
                if node.op_type == "MatMul" and computed.issuperset(node.input) and not self._is_own(node):
                    found.append(node.name)
                    self.floats.pop(node.name)
                    reaching.update(node.input)
                elif node.op_type in through:
                    reaching.update(node.input)
        return dict.fromkeys(reversed(found))

    def _computed_from_image(self) -> set[str]:
        """Return the float32 tensors that depend on the image's values, and not on its size alone."""
        computed = set(self.topology.inputs)
        for node in self.topology.nodes:
            if node.op_type not in ("Shape", "Size") and computed.intersection(node.input):
                computed.update(node.output)
        return {name for name in computed if is_float(self.types, name)}

    def _is_own(self, node: NodeProto) -> bool:
        """Return True if the model has one operand of a product in INT8 by weights of its own."""
        return bool(self.own.weights.intersection(node.input))

    def _find_cuts(self) -> set[str]:
        """Rule 1a: return the names of the nodes that cut a tensor into operands of products."""
        cuts: set[str] = set()
        waiting = [name for node in self.topology.nodes if node.name in self.products for name in node.input]
        while waiting:
            node = self.topology.producers.get(waiting.pop())
            if node is not None and node.output[0] in self.sources:
                if node.op_type in _PART_OPS:
                    cuts.add(node.name)
                else:
                    waiting += [node.input[index] for index in data_inputs(node)]
        return cuts

    def _trace_layers(self) -> dict[str, str]:
        """Return the layer of each tensor that one quantisable layer made, alone, directly or through activations."""
        layers: dict[str, str] = {}
        for node in self.topology.nodes:
            if node.name in self.weights or node.name in self.kept:
                layers[node.output[0]] = node.name
            elif node.op_type in ELEMENTWISE_OPS:
                variable = [name for name in node.input if name and name not in self.topology.initializers]
                makers = {layers.get(name, "") for name in variable}
                if len(makers) == 1 and "" not in makers:
                    layers[node.output[0]] = makers.pop()
        return layers

    def _apply_plan(self, layers: list[NodeProto]) -> None:
        for node in self.topology.nodes:
            if node.name in self.plan.floats and (node.name in self.kept or node.op_type in QDQ_OPS):
                raise EngineError(
                    "plan.node",
                    f"node '{node.name}' in the plan, which the model itself has in INT8",
                    "nodes of the model's float part",
                    "leave it out: the model's own quantisation is kept as it is",
                )
        self.floats.update(self.plan.floats)
        self.weights = {name: weight for name, weight in self.weights.items() if name not in self.floats}
        self.products = {name: None for name in self.products if name not in self.floats}
        for node in layers:
            if node.name in self.weights or node.name in self.products:
                self.reads[node.name] = self._to_quantise(node, (0, 1) if node.name in self.products else (0,))

    def _to_quantise(self, node: NodeProto, indices: Iterable[int]) -> tuple[int, ...]:
        """Return those of a node's inputs that the model itself has not dequantised."""
        return tuple(index for index in indices if not self.own.dequantises(node.input[index]))

    def _feeding_layers(self) -> set[str]:
        """Return the tensors from which a quantised layer can be reached."""
        feeding: set[str] = set()
        through = ELEMENTWISE_OPS | MOVEMENT_OPS | AVERAGE_OPS | QDQ_OPS
        for node in reversed(self.topology.nodes):
            if node.name in self.weights or node.name in self.kept:
                feeding.add(node.input[0])
            elif node.op_type in through and feeding.intersection(node.output):
                feeding.update(node.input)
        return feeding

    def _residual(self, node: NodeProto, feeding: set[str]) -> None:
        """Rule 2: the skip connection of a residual Add is INT8."""
        made = {index: self.layers[name] for index, name in enumerate(node.input) if name in self.layers}
        alone = [index for index in made if self.topology.sole_reader(node.input[index]) is node]
        # Rule 2a: the latest layer's operand stays float.
        fused = max(alone, key=lambda index: self.position[made[index]], default=None)
        completed = made.values() if fused is None else [made[fused]]
        if not self._same_feature_maps(node):
            reason = "no residual: its operands are not two feature maps of one shape"
        elif node.output[0] not in feeding:
            reason = "no residual: its sum feeds no quantised layer"
        elif self._is_normalised(node.output[0]):
            reason = "a normalisation reads its sum"
        elif not made:
            reason = "no residual: neither operand comes straight out of a convolution or matrix product"
        elif self.kept.keys() & set(completed):
            reason = "the layer that it completes is the model's own INT8"
        elif not any(layer in self.weights for layer in completed):
            reason = "the layer that it completes stays float"
        elif node.name in self.plan.floats:
            reason = self.plan.floats[node.name]
        else:
            self.reads[node.name] = self._to_quantise(node, [index for index in (0, 1) if index != fused])
            return
        self.floats.setdefault(node.name, reason)

    def _is_normalised(self, tensor: str) -> bool:
        """Return True if a normalisation reads a tensor, or its mean is subtracted from it."""
        readers = [reader for reader, _ in self.topology.readers(tensor)]
        means = {reader.output[0] for reader in readers if reader.op_type == "ReduceMean"}
        return any(
            reader.op_type in _NORMALISATIONS or (reader.op_type == "Sub" and means.intersection(reader.input))
            for reader in readers
        )

    def _same_feature_maps(self, node: NodeProto) -> bool:
        """Return True for two float32 tensors of one rank, at least 2, of which no two sizes are known to differ.

        Open sizes may have any name.
        """
        a, b = (self.types.get(name) for name in node.input)
        if a is None or b is None or any(name in self.topology.initializers for name in node.input):
            return False
        if not a.elem_type == b.elem_type == TensorProto.FLOAT or a.shape is None or b.shape is None:
            return False
        if len(a.shape) != len(b.shape) or len(a.shape) < 2:
            return False
        sizes = zip(a.shape, b.shape, strict=True)
        return all(p == q for p, q in sizes if isinstance(p, int) and isinstance(q, int))

    def _movement(self, node: NodeProto) -> None:
        """Rule 3: movement. Called from the outputs backwards: first the readers, then what they read."""
        if node.output[0] not in self.sources or self.topology.pinned.intersection(node.output):
            return
        if node.name in self.plan.floats:
            return
        readings = [reading for name in node.output for reading in self.topology.readers(name)]
        if readings and all(index in self.reads.get(reader.name, ()) for reader, index in readings):
            self.reads[node.name] = data_inputs(node)

    def _float_reason(self, node: NodeProto) -> str:
        if set(node.output) <= self.own.activations.keys():
            return "it moves what the model itself has in INT8"
        if moves_values(node, self.topology.initializers) and node.name not in self.plan.floats:
            if node.name in self.cuts:
                return "it cuts a tensor into parts that have scales of their own: operands of attention"
            if node.output[0] not in self.sources:
                return "it moves values that are under scales of the model's own"
            return "not everything that reads its result is quantised"
        known = _FLOAT_OPS.get(node.op_type, "it multiplies no weights: activation, decoding or shape arithmetic")
        return self.floats.get(node.name, known)


def scale_groups(
    tensors: Iterable[str], sources: Mapping[str, tuple[str, ...]], order: Sequence[str]
) -> tuple[ScaleGroup, ...]:
    """Rule 4: join tensors that have a source in common, directly or through others; each is in exactly one group.

    sources: per tensor that only holds values of others, these others.
    order: all names in the order in which groups are sorted.
    """
    groups: list[tuple[set[str], set[str]]] = []  # tensors, taps
    for tensor in tensors:
        members, taps = {tensor}, set(sources.get(tensor, (tensor,)))
        for joined in [group for group in groups if group[1] & taps]:
            groups.remove(joined)
            members |= joined[0]
            taps |= joined[1]
        groups.append((members, taps))
    position = {name: index for index, name in enumerate(order)}

    def ordered(names: set[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=position.__getitem__))

    result = [ScaleGroup(ordered(members), ordered(taps)) for members, taps in groups]
    return tuple(sorted(result, key=lambda group: position[group.taps[0]]))
