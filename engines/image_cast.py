"""A uint8 image becomes float before anything else: a pass over the first nodes of a graph."""

from __future__ import annotations

from onnx import ModelProto, NodeProto, TensorProto

from engines.topology import Topology, value_type

_MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}  # of any type, value by value


def cast_image_first(model: ModelProto) -> ModelProto:
    """What turns the bytes of an image and then casts them, casts them and then turns the floats: the same values.

    TensorRT knows no other operator on kUINT8 than the cast (NVIDIA, TensorRT API, DataType: "use the IdentityLayer to
    convert kUINT8 network-level inputs ... prior to use with other TensorRT layers").
    """
    topology = Topology(model)
    image = next(value for value in model.graph.input if value.name in topology.inputs)
    if value_type(image).elem_type != TensorProto.UINT8:
        return model
    moves, cast = _moves_before_cast(topology, image.name)
    if not moves or cast is None:
        return model
    moved = moves[-1].output[0]
    moves[0].input[0], moves[-1].output[0] = moved, cast.output[0]
    cast.input[0], cast.output[0] = image.name, moved
    nodes = [node for node in topology.nodes if node is not cast]
    nodes.insert(next(index for index, node in enumerate(nodes) if node is moves[0]), cast)
    retyped = {node.output[0] for node in (*moves, cast)}
    kept = [value for value in model.graph.value_info if value.name not in retyped]
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    model.graph.value_info.extend(kept)
    return model


def _moves_before_cast(topology: Topology, image: str) -> tuple[list[NodeProto], NodeProto | None]:
    """The nodes that alone move the image, one after the other, and the Cast behind them, if that is what follows."""
    moves: list[NodeProto] = []
    reader = topology.sole_reader(image)
    while reader is not None and reader.op_type in _MOVES:
        moves.append(reader)
        reader = topology.sole_reader(reader.output[0])
    return moves, reader if reader is not None and reader.op_type == "Cast" else None
