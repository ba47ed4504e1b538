"""The network and the images of the calibration benchmark: a small MobileNet-like classifier, made from a seed.

Weights are random; the batch norms have the statistics of a few of the images themselves and are folded, as exporters
do it, so that activations have the ranges and the zeros that real ones have: 52 tensors, 224 x 224 pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

SIZE_PX = 224
SPEC = """path: model.onnx
task: classify
input: {color: rgb, resize: stretch, scale: 0.00784313725490196, mean: [1.0], std: [1.0]}
"""
BLOCKS = ((16, 1), (24, 2), (24, 1), (40, 2), (40, 1), (64, 2), (64, 1), (96, 2))  # (channels, stride)
_EXPANSION = 4
_BATCH_NORM_IMAGES = 8

Array = NDArray[np.float32]


def write(folder: Path, images: int) -> None:
    """Write model.onnx, model.yaml and `images` PNG files below folder/images-N; what is there already stays."""
    pictures = folder / f"images-{images}"
    pictures.mkdir(parents=True, exist_ok=True)
    for number in range(images):
        path = pictures / f"{number:04}.png"
        if not path.exists():
            cv2.imwrite(str(path), picture(number))
    (folder / "model.yaml").write_text(SPEC, encoding="utf-8")
    if not (folder / "model.onnx").exists():
        batch = np.stack([network_input(picture(number)) for number in range(_BATCH_NORM_IMAGES)])
        onnx.save(_Network(batch).model(), folder / "model.onnx")


def picture(number: int) -> NDArray[np.uint8]:
    """A photograph of sorts, BGR: soft light, a dozen things with edges, sensor noise."""
    random = np.random.default_rng(number)
    soft = cv2.resize(random.uniform(0.0, 255.0, (4, 4, 3)).astype(np.float32), (SIZE_PX, SIZE_PX))
    image = np.ascontiguousarray(soft * random.uniform(0.3, 1.0)).astype(np.uint8)
    for _ in range(12):
        x, y = (int(value) for value in random.integers(0, SIZE_PX, 2))
        color = tuple(int(value) for value in random.integers(0, 256, 3))
        if random.random() < 0.5:
            cv2.circle(image, (x, y), int(random.integers(4, 40)), color, -1)
        else:
            width, height = (int(value) for value in random.integers(4, 80, 2))
            cv2.rectangle(image, (x, y), (x + width, y + height), color, -1)
    noise = random.normal(0.0, 4.0, image.shape)
    taken: NDArray[np.uint8] = np.clip(image + noise, 0, 255).astype(np.uint8)
    return taken


def network_input(image: NDArray[np.uint8]) -> Array:
    """What SPEC says, in NumPy: (3, height, width)."""
    scaled: Array = image[:, :, ::-1].transpose(2, 0, 1).astype(np.float32) * np.float32(2.0 / 255.0)
    centred: Array = scaled - np.float32(1.0)
    return centred


class _Network:
    """Builds the graph node by node and computes `batch` along with it, for the batch norms' statistics."""

    def __init__(self, batch: Array) -> None:
        self._random = np.random.default_rng(2017)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        name, values = self._conv_relu("input", batch, 16, 3, 2)
        for channels, stride in BLOCKS:
            name, values = self._inverted_residual(name, values, channels, stride)
        name, values = self._conv_relu(name, values, 256, 1, 1)
        pooled = self._add("GlobalAveragePool", [name])
        flat = self._add("Flatten", [pooled])
        weight = self._random.normal(0.0, 1.0 / 16.0, (100, 256))
        self._add("Gemm", [flat, self._constant(weight), self._constant(np.zeros(100))], "output", transB=1)

    def model(self) -> onnx.ModelProto:
        """The network for a batch of one."""
        image = helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, SIZE_PX, SIZE_PX])
        scores = helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 100])
        graph = helper.make_graph(self._nodes, "mobilenet_like", [image], [scores], self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        return model

    def _inverted_residual(self, name: str, values: Array, channels: int, stride: int) -> tuple[str, Array]:
        wide = _EXPANSION * values.shape[1]
        inner, hidden = self._conv_relu(name, values, wide, 1, 1)
        inner, hidden = self._conv_relu(inner, hidden, wide, 3, stride, groups=wide)
        inner, hidden = self._conv(inner, hidden, channels, 1, 1)
        if stride > 1 or hidden.shape[1] != values.shape[1]:
            return inner, hidden
        return self._add("Add", [name, inner]), values + hidden

    def _conv_relu(
        self, name: str, values: Array, channels: int, kernel: int, stride: int, groups: int = 1
    ) -> tuple[str, Array]:
        name, values = self._conv(name, values, channels, kernel, stride, groups)
        return self._add("Relu", [name]), np.maximum(values, 0.0)

    def _conv(
        self, name: str, values: Array, channels: int, kernel: int, stride: int, groups: int = 1
    ) -> tuple[str, Array]:
        """A convolution with its batch norm folded in."""
        fan_in = values.shape[1] // groups * kernel * kernel
        weight = self._random.normal(0.0, fan_in**-0.5, (channels, values.shape[1] // groups, kernel, kernel))
        shape: dict[str, Any] = {
            "kernel_shape": [kernel, kernel],
            "strides": [stride, stride],
            "pads": [kernel // 2] * 4,
        }
        raw = _run("Conv", values, weight.astype(np.float32), group=groups, **shape)
        gain = self._random.uniform(0.5, 1.5, channels) / np.sqrt(raw.var(axis=(0, 2, 3)) + 1e-5)
        bias = self._random.normal(0.0, 0.3, channels) - raw.mean(axis=(0, 2, 3)) * gain
        inputs = [name, self._constant(weight * gain[:, None, None, None]), self._constant(bias)]
        column = (1, -1, 1, 1)
        return self._add("Conv", inputs, group=groups, **shape), (
            raw * gain.reshape(column) + bias.reshape(column)
        ).astype(np.float32)

    def _constant(self, values: NDArray[np.float64]) -> str:
        self._weights.append(numpy_helper.from_array(values.astype(np.float32), f"weight{len(self._weights)}"))
        return self._weights[-1].name

    def _add(self, operator: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or f"tensor{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [output], f"{operator}{len(self._nodes)}", **attributes))
        return output


def _run(operator: str, values: Array, weight: Array, **attributes: Any) -> Array:
    """One operator on `values`, by ONNX Runtime."""
    node = helper.make_node(operator, ["x", "w"], ["y"], **attributes)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "w")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": values, "w": weight})[0]
    return result
