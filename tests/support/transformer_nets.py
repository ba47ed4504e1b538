"""Pieces of transformers and of dense heads, small: a block of a ViT, deformable attention, a segmentation decoder."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto
from zoo import Net

OPSET = 17  # the first with LayerNormalization
TOKENS, WIDTH, HEADS = 16, 32, 2  # of the ViT, for an image (1, 3, 16, 16) in patches of 4 x 4
DEPTH = WIDTH // HEADS


def ints(net: Net, *values: int) -> str:
    return net.constant(np.array(values, np.int64))


def number(net: Net, value: float) -> str:
    return net.constant(np.array(value, np.float32))


def linear(net: Net, x: str, inputs: int, outputs: int) -> str:
    """A matrix product and its bias."""
    weight = net.constant((net.rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)).astype(np.float32))
    return net.node("Add", net.node("MatMul", x, weight), net.constant(np.zeros(outputs, np.float32)))


def normalised(net: Net, x: str, decomposed: bool) -> str:
    """LayerNorm over the last axis: the operator, or as exporters before opset 17 write it."""
    gain, bias = net.constant(np.ones(WIDTH, np.float32)), net.constant(np.zeros(WIDTH, np.float32))
    if not decomposed:
        return net.node("LayerNormalization", x, gain, bias, axis=-1)
    centred = net.node("Sub", x, net.node("ReduceMean", x, axes=[-1]))
    variance = net.node("ReduceMean", net.node("Pow", centred, number(net, 2.0)), axes=[-1])
    deviation = net.node("Sqrt", net.node("Add", variance, number(net, 1e-5)))
    return net.node("Add", net.node("Mul", net.node("Div", centred, deviation), gain), bias)


def gelu(net: Net, x: str) -> str:
    half = net.node("Mul", x, number(net, 0.5))
    return net.node(
        "Mul", half, net.node("Add", net.node("Erf", net.node("Div", x, number(net, 2.0**0.5))), number(net, 1.0))
    )


def patches(net: Net) -> str:
    """(1, TOKENS, WIDTH) of an image (1, 3, 16, 16)."""
    embedded = net.node("Conv", "image", net.weight(WIDTH, 3, 4, 4), strides=[4, 4])
    return net.node("Transpose", net.node("Reshape", embedded, ints(net, 1, WIDTH, TOKENS)), perm=[0, 2, 1])


def attention(net: Net, x: str) -> str:
    """Self-attention of (1, TOKENS, WIDTH), whose query, key and value one matrix makes."""
    made = net.node("Reshape", linear(net, x, WIDTH, 3 * WIDTH), ints(net, 1, TOKENS, 3, HEADS, DEPTH))
    by_head = net.node("Transpose", made, perm=[2, 0, 3, 1, 4])
    query, key, value = (net.node("Gather", by_head, net.constant(np.array(part)), axis=0) for part in range(3))
    scaled = net.node("Mul", query, number(net, DEPTH**-0.5))
    logits = net.node("MatMul", scaled, net.node("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = net.node("MatMul", net.node("Softmax", logits, axis=-1), value)
    joined = net.node("Reshape", net.node("Transpose", mixed, perm=[0, 2, 1, 3]), ints(net, 1, TOKENS, WIDTH))
    return linear(net, joined, WIDTH, WIDTH)


def vit_block(decomposed: bool = False) -> ModelProto:
    """An image (1, 3, 16, 16) through patches, one block of a ViT and a head for 5 classes."""
    net = Net((1, 3, 16, 16))
    x = patches(net)
    x = net.node("Add", x, attention(net, normalised(net, x, decomposed)))
    hidden = gelu(net, linear(net, normalised(net, x, decomposed), WIDTH, 4 * WIDTH))
    x = net.node("Add", x, linear(net, hidden, 4 * WIDTH, WIDTH))
    return net.model(linear(net, net.node("ReduceMean", x, axes=[1], keepdims=0), WIDTH, 5), opset=OPSET)


def position_sensitive_attention() -> ModelProto:
    """Attention between convolutions, as in YOLO11: channels first, one convolution makes query, key and value.

    The value is the first operand of its product, and a depthwise convolution reads it, too.
    """
    net = Net((1, 8, 4, 4))
    made = net.node("Conv", "image", net.weight(HEADS * 16, 8, 1, 1))
    by_head = net.node("Reshape", made, ints(net, 1, HEADS, 16, 16))
    query = net.node("Split", by_head, ints(net, 4, 4, 8), outputs=3, axis=2)
    key, value = f"{query}_1", f"{query}_2"
    logits = net.node("MatMul", net.node("Transpose", query, perm=[0, 1, 3, 2]), key)
    weights = net.node("Softmax", net.node("Mul", logits, number(net, 0.5)), axis=-1)
    mixed = net.node("MatMul", value, net.node("Transpose", weights, perm=[0, 1, 3, 2]))
    places = net.conv(net.node("Reshape", value, ints(net, 1, 16, 4, 4)), 16, 16, group=16)
    summed = net.node("Add", net.node("Reshape", mixed, ints(net, 1, 16, 4, 4)), places)
    return net.model(net.node("Conv", summed, net.weight(8, 16, 1, 1)), opset=OPSET)


def deformable_piece() -> ModelProto:
    """Deformable attention over one map: values are sampled where queries say, and weighted by a softmax."""
    net = Net((1, 3, 16, 16))
    tokens = patches(net)
    as_map = net.node("Transpose", linear(net, tokens, WIDTH, WIDTH), perm=[0, 2, 1])
    values = net.node("Reshape", as_map, ints(net, 1, WIDTH, 4, 4))
    places = net.node("Reshape", net.node("Tanh", linear(net, tokens, WIDTH, 8)), ints(net, 1, TOKENS, 4, 2))
    sampled = net.node("GridSample", values, places, align_corners=0)
    weights = net.node("Softmax", linear(net, tokens, WIDTH, 4), axis=-1)
    weighted = net.node("Mul", sampled, net.node("Unsqueeze", weights, ints(net, 1)))
    mixed = net.node("ReduceSum", weighted, ints(net, 3), keepdims=0)
    return net.model(linear(net, net.node("Transpose", mixed, perm=[0, 2, 1]), WIDTH, 4), opset=OPSET)


def decoder_head(shape: tuple[int | str, ...] = (1, 3, 16, 16)) -> ModelProto:
    """A map for each pixel: ConvTranspose in two groups, nearest and linear Resize, a skip that is concatenated."""
    net = Net(shape)
    skip = net.node("Relu", net.conv("image", 3, 8, strides=[2, 2]))
    deep = net.node("Relu", net.conv(skip, 8, 8, strides=[2, 2]))
    raised = net.node("ConvTranspose", deep, net.weight(8, 4, 2, 2), net.weight(8), strides=[2, 2], group=2)
    twice = net.constant(np.array([1, 1, 2, 2], np.float32))
    near = net.node("Resize", net.node("Concat", net.node("Relu", raised), skip, axis=1), "", twice, mode="nearest")
    return net.model(net.node("Resize", net.conv(near, 16, 4), "", twice, mode="linear"), opset=OPSET)
