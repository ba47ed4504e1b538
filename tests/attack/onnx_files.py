"""ONNX files that no exporter writes: each a small model into which one fault was put, of a kind that the name says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import cast

from model_families import CLASSIFIERS, DETECTORS, OTHERS, family, rtdetr_deployed
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from agent.inspection.inspect import inspect_model, spec_lines
from attack.case import Case, Outcome, damaged

_MODELS = (*DETECTORS, *CLASSIFIERS, *OTHERS, rtdetr_deployed)
_OPEN = ("batch", 3, "height", "width")
_HUGE = (2**63 - 1, 2**62, 2**40, 2**31, 2**31 - 1, -1, -(2**63), 0)
_ELSEWHERE = (
    *("/proc/self/mem", "/proc/self/pagemap", "/dev/zero", "/dev/stdin", "/etc/passwd", "../outside", "", "."),
    *("absent.bin", "x" * 5000, "a\x00b", "\x1b[2J", "weights.bin", "//", "~/x", "..", "%2e%2e/x"),
)
_NAMES = ("", "image", "t0", "\x1b]0;x\x07", "\u202e", "a b", "x" * 100_000, "\x00", "'", "{", "%s", "../..", "\n")
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "nobody", "x" * 10_000, "\x00", "ai.onnx.training")
Fault = Callable[[random.Random, ModelProto], bytes]


def _whole(model: ModelProto) -> bytes:
    return model.SerializeToString()


def any_damage(rng: random.Random, model: ModelProto) -> bytes:
    return damaged(rng, _whole(model))[1]


def noise(rng: random.Random, _: ModelProto) -> bytes:
    starts = (
        b"",
        b"\x08\x08",
        b"\x1f\x8b\x08",
        b"PK\x03\x04",
        b"<html>",
        b"version https://git-lfs",
        b"{}",
        b"\x80\x05",
    )
    return rng.choice(starts) + rng.randbytes(rng.choice((0, 1, 100, 5000)))


def wrong_wire_type(rng: random.Random, model: ModelProto) -> bytes:
    """A field of a model, or of its graph, with a wire type that is not its own, or with a length that lies."""
    field, kind = rng.randrange(1, 26), rng.randrange(8)
    inserted = bytes([field << 3 & 0x7F | kind]) + rng.choice((b"\xff" * 9 + b"\x01", b"\x7f", b"\x00", b"\x80" * 12))
    return _whole(model) + inserted if rng.random() < 0.5 else inserted + _whole(model)


def no_nodes(rng: random.Random, model: ModelProto) -> bytes:
    del model.graph.node[rng.choice((0, 1, 2)) :]
    return _whole(model)


def no_graph(_: random.Random, model: ModelProto) -> bytes:
    model.ClearField("graph")
    return _whole(model)


def no_inputs(rng: random.Random, model: ModelProto) -> bytes:
    model.graph.ClearField(rng.choice(("input", "output", "initializer", "name")))
    return _whole(model)


def missing_initialiser(rng: random.Random, model: ModelProto) -> bytes:
    if model.graph.initializer:
        del model.graph.initializer[rng.randrange(len(model.graph.initializer))]
    return _whole(model)


def absurd_sizes(rng: random.Random, model: ModelProto) -> bytes:
    tensors = list(model.graph.initializer)
    if tensors and rng.random() < 0.5:
        dims = rng.choice(tensors).dims
        dims[:] = [rng.choice(_HUGE) for _ in range(rng.choice((1, 4, 9, 4000)))]
        return _whole(model)
    shape = rng.choice((*model.graph.input, *model.graph.output)).type.tensor_type.shape
    for dim in shape.dim:
        dim.dim_value = rng.choice(_HUGE)
    if rng.random() < 0.3:
        shape.dim.extend([shape.dim[0]] * rng.choice((1, 3, 3000)) if shape.dim else [])
    return _whole(model)


def absurd_attributes(rng: random.Random, model: ModelProto) -> bytes:
    nodes = [node for node in model.graph.node if node.attribute]
    if not nodes:
        return any_damage(rng, model)
    attribute = rng.choice(rng.choice(nodes).attribute)
    match rng.randrange(4):
        case 0:
            attribute.i = rng.choice(_HUGE)
            attribute.type = attribute.INT
        case 1:
            attribute.ints[:] = [rng.choice(_HUGE) for _ in range(rng.choice((0, 1, 4, 3000)))]
            attribute.type = attribute.INTS
        case 2:
            attribute.type = cast(AttributeProto.AttributeType, rng.choice((0, 1, 4, 5, 8, 14)))
        case _:
            attribute.name = rng.choice(_NAMES)
    return _whole(model)


def absurd_constants(rng: random.Random, model: ModelProto) -> bytes:
    """A reshape, a fill or a repetition that a run would have to allocate."""
    size = helper.make_tensor("size", TensorProto.INT64, [4], [rng.choice((1, 2**20, 2**31, -1)) for _ in range(4)])
    model.graph.initializer.append(size)
    source = model.graph.input[0].name
    kind = rng.choice(("Expand", "Reshape", "Tile"))
    node = helper.make_node(kind, [source, "size"], ["grown"])
    model.graph.node.insert(0, node)
    for each in model.graph.node[1:]:
        each.input[:] = ["grown" if name == source else name for name in each.input]
    return _whole(model)


def wrong_types(rng: random.Random, model: ModelProto) -> bytes:
    kinds = (*range(24), 99, -1)
    targets: list[TensorProto | ValueInfoProto] = [
        *model.graph.initializer,
        *model.graph.input,
        *model.graph.output,
    ]
    target = rng.choice(targets)
    if isinstance(target, TensorProto):
        target.data_type = rng.choice(kinds)
    elif rng.random() < 0.6:
        target.type.tensor_type.elem_type = rng.choice(kinds)
    else:
        other = rng.choice(("sequence_type", "map_type", "optional_type", "sparse_tensor_type"))
        getattr(target.type, other).SetInParent()
    return _whole(model)


def wrong_lengths(rng: random.Random, model: ModelProto) -> bytes:
    tensor = rng.choice(model.graph.initializer)
    tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)] + bytes(rng.choice((0, 1, 3, 999)))
    if rng.random() < 0.3:
        tensor.float_data.extend([float("nan")] * 3)
    if rng.random() < 0.3:
        tensor.string_data.append(b"\xff\xfe")
    return _whole(model)


def cycles(rng: random.Random, model: ModelProto) -> bytes:
    nodes = model.graph.node
    first, last = nodes[0], nodes[rng.randrange(len(nodes))]
    if first.input:
        first.input[0] = last.output[0]
    if rng.random() < 0.5:
        shuffled = list(nodes)
        rng.shuffle(shuffled)
        del nodes[:]
        nodes.extend(shuffled)
    return _whole(model)


def same_names(rng: random.Random, model: ModelProto) -> bytes:
    graph = model.graph
    match rng.randrange(4):
        case 0:
            graph.node.extend([rng.choice(graph.node)] * rng.choice((1, 3)))
        case 1:
            graph.input.extend([graph.input[0]])
        case 2:
            graph.output.extend([graph.output[0]] * 3)
        case _:
            graph.initializer.extend([rng.choice(graph.initializer)])
    return _whole(model)


def strange_names(rng: random.Random, model: ModelProto) -> bytes:
    name, graph = rng.choice(_NAMES), model.graph
    match rng.randrange(5):
        case 0:
            rng.choice((*graph.input, *graph.output)).name = name
        case 1:
            rng.choice(graph.node).name = name
        case 2:
            rng.choice(graph.node).op_type = name
        case 3:
            rng.choice(graph.node).output[0] = name
        case _:
            helper.set_model_props(model, {name: name, "names": name, "task": name, "author": "Ultralytics"})
            model.producer_name = name
    return _whole(model)


def huge_strings(rng: random.Random, model: ModelProto) -> bytes:
    text = rng.choice(("x", "{", "[", "(", "-", "\x1b[31m", "{0:")) * 300_000
    helper.set_model_props(model, {rng.choice(("names", "task", "author", text)): text})
    model.doc_string = text
    return _whole(model)


def unknown_operators(rng: random.Random, model: ModelProto) -> bytes:
    node = rng.choice(model.graph.node)
    if rng.random() < 0.5:
        node.op_type = rng.choice(("", "Dance", "QLinearConv", "QuantizeLinear", "Loop", "ATen", "\x1b[1m"))
    node.domain = rng.choice(_DOMAINS)
    return _whole(model)


def opsets(rng: random.Random, model: ModelProto) -> bytes:
    del model.opset_import[:]
    for _ in range(rng.choice((0, 1, 2, 500))):
        opset = helper.make_opsetid(rng.choice(_DOMAINS), 0)
        opset.version = rng.choice((0, 1, 5, 13, 99, 2**31, -1, 2**63 - 1))
        model.opset_import.append(opset)
    if rng.random() < 0.4:
        model.ir_version = rng.choice((0, 1, 3, 99, 2**62, -1))
    return _whole(model)


def external_data(rng: random.Random, model: ModelProto) -> bytes:
    for tensor in rng.sample(list(model.graph.initializer), k=1):
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        keys = {"location": rng.choice(_ELSEWHERE)}
        if rng.random() < 0.7:
            keys |= {"offset": rng.choice(("0", "-1", "9" * 30, "x", ""))}
        if rng.random() < 0.7:
            keys |= {"length": rng.choice(("0", "-1", "9" * 30, "4", "x", str(2**40)))}
        for key, value in keys.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    return _whole(model)


def nested(rng: random.Random, model: ModelProto) -> bytes:
    """Bodies of control flow within each other, as deep as protobuf's limit and beyond, which no library writes."""
    depth = rng.choice((1, 5, 20, 24, 30, 60, 200, 5000))
    body = helper.make_graph([helper.make_node("Identity", ["image"], ["inner"])], "body", [], [])
    content = body.SerializeToString()
    kind = rng.choice(("If", "Loop", "Scan"))
    for level in range(depth):
        attribute = AttributeProto(name="then_branch", type=AttributeProto.GRAPH).SerializeToString()
        node = NodeProto(op_type=kind, input=["image"], output=[f"o{level}"]).SerializeToString()
        content = _part(1, node + _part(5, attribute + _part(6, content)))
    return _whole(model) + _part(7, content)


def _part(field: int, content: bytes) -> bytes:
    """A field that holds bytes, as protobuf writes it."""
    length, rest = bytearray(), len(content)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([field << 3 | 2, *length, rest]) + content


def endless(rng: random.Random, model: ModelProto) -> bytes:
    """A loop without an end in the way of the image, which a run of the graph would not leave."""
    source = model.graph.input[0].name
    truth = helper.make_tensor("truth", TensorProto.BOOL, [], [True])
    most = helper.make_tensor("most", TensorProto.INT64, [], [2**62])
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["goes"]), helper.make_node("Abs", ["x"], ["y"])],
        "body",
        [value("n", 7, []), value("on", 9, []), value("x", 1, None)],
        [value("goes", 9, []), value("y", 1, None)],
    )
    model.graph.initializer.extend([truth, most])
    for node in model.graph.node:
        node.input[:] = ["looped" if name == source else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Loop", ["most", "truth", source], ["looped"], body=body))
    for output in model.graph.output:
        if rng.random() < 0.8:
            output.type.tensor_type.ClearField("shape")
    return _whole(model)


def functions(rng: random.Random, model: ModelProto) -> bytes:
    """A function of the model's own that calls itself, has another's name, or no body."""
    name = rng.choice(("Twice", "Conv", ""))
    call = helper.make_node(rng.choice((name, "Abs")), ["x"], ["y"], domain="own")
    opset = [helper.make_opsetid("own", 1), helper.make_opsetid("", 13)]
    function = helper.make_function("own", name, ["x"], ["y"], rng.choice(([call], [call] * 3, [])), opset)
    model.functions.extend([function] * rng.choice((1, 2)))
    model.opset_import.append(helper.make_opsetid("own", 1))
    source = model.graph.input[0].name
    model.graph.node.append(helper.make_node(name, [source], ["called"], domain="own"))
    return _whole(model)


def many_nodes(rng: random.Random, model: ModelProto) -> bytes:
    source = model.graph.input[0].name
    count = rng.choice((2_000, 20_000))
    names = [source, *(f"n{index}" for index in range(count))]
    chain = (helper.make_node("Abs", [x], [y]) for x, y in pairwise(names))
    model.graph.node.extend(chain)
    return _whole(model)


def renamed(rng: random.Random, model: ModelProto) -> bytes:
    """A whole model by another name of its first input: nothing of it is a fault."""
    source = model.graph.input[0].name
    model.graph.input[0].name = name = f"{source}{rng.randrange(9)}"
    for node in model.graph.node:
        node.input[:] = [name if each == source else each for each in node.input]
    return _whole(model)


FAULTS: tuple[Fault, ...] = (
    *(any_damage, wrong_wire_type, noise, no_nodes, no_graph, no_inputs, missing_initialiser),
    *(absurd_sizes, absurd_attributes, absurd_constants, wrong_types, wrong_lengths, cycles, same_names, strange_names),
    *(huge_strings, unknown_operators, opsets, external_data, nested, endless, functions, many_nodes, renamed),
)


def broken_files(rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield files, each with the name of its fault; all faults in turn, in any of the families of models."""
    for fault in islice(cycle(FAULTS), count):
        make = rng.choice(_MODELS)
        model = family(make, _OPEN) if rng.random() < 0.2 else family(make)
        yield fault.__name__.replace("_", " "), fault(rng, model)


def _inspect(content: bytes, path: Path) -> Outcome:
    """Guess a spec, which is refused for a graph that cannot be served."""
    path.write_bytes(content)
    inspection = inspect_model(path)
    json.dumps(inspection.as_dict())
    assert all(line.isprintable() for line in spec_lines(inspection, path.parent))
    inspection.spec()
    return None


def cases(rng: random.Random, folder: Path) -> Iterator[Case]:
    """Each fault once, in any of the families of models."""
    for name, content in broken_files(rng, len(FAULTS)):
        yield Case(name, partial(_inspect, content, folder / "model.onnx"))
