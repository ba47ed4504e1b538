"""python quantise.py TOOL MODEL TENSORS OUTPUT [SPEC]: a peer's INT8 form of a network.

It is calibrated on preprocessed images.

TENSORS: a .npy file of network inputs, (images, C, H, W) float32. SPEC: the model's, for the tool that needs a metric.
TOOL, each called as its manual says:

    default    onnxruntime.quantization.quantize_static with nothing but its arguments
    minmax     the same as TensorRT takes it: Q/DQ, symmetric int8, weights per channel; calibrated by MinMax
    entropy    the same, calibrated by Entropy
    modelopt   modelopt.onnx.quantization.quantize, its float part left in float32
    nncf       nncf.quantize with nothing but its arguments: symmetric, the preset "performance"
    nncf-mixed the same with the preset "mixed": activations that have a sign are asymmetric
    nncf-accuracy  nncf.quantize_with_accuracy_control: the metric is tared's fidelity on the same images, of which a
               plan may lose as much (MAX_DROP)

Every tool is given the network for one image, in opset 13, which scales per channel need, with its constants no longer
inputs, as ONNX Runtime's documentation advises; its own tools then also with quant_pre_process.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import onnx
from onnx import version_converter

MAX_DROP = 0.1  # recalibration.max_loss

Tensors = dict[str, np.ndarray]  # by input
Verdict = tuple[float, None]


class TensorReader:
    """A CalibrationDataReader, as ONNX Runtime and ModelOpt take it: `get_next` until None."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._tensors = np.load(path, mmap_mode="r")
        self._taken = 0

    def get_next(self) -> dict[str, np.ndarray] | None:
        if self._taken == len(self._tensors):
            return None
        self._taken += 1
        return self._read(self._taken - 1)

    def get_first(self) -> dict[str, np.ndarray]:
        """The first input, without taking it: ModelOpt looks at shapes with it."""
        return self._read(0)

    def _read(self, number: int) -> dict[str, np.ndarray]:
        return {self._name: np.array(self._tensors[number : number + 1])}


def prepared(path: str) -> onnx.ModelProto:
    """The network with its constants as constants, in opset 13 at least."""
    model = onnx.load(path)
    constants = {constant.name for constant in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for size in model.graph.input[0].type.tensor_type.shape.dim[:1]:
        size.dim_value = 1  # as tared compiles for it, too
    opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    return model if opset >= 13 else version_converter.convert_version(model, 13)


def with_onnxruntime(tool: str, model: str, reader: TensorReader, output: str, folder: Path) -> None:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    ready = str(folder / "preprocessed.onnx")
    quant_pre_process(model, ready, skip_symbolic_shape=True)  # without SymPy; ONNX's own inference knows these shapes
    if tool == "default":
        quantize_static(ready, output, reader)
        return
    quantize_static(
        ready,
        output,
        reader,
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method={"minmax": CalibrationMethod.MinMax, "entropy": CalibrationMethod.Entropy}[tool],
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
    )


def with_modelopt(model: str, reader: TensorReader, output: str) -> None:
    from modelopt.onnx.quantization import quantize

    quantize(
        model,
        calibration_data_reader=reader,
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        output_path=output,
        log_level="ERROR",
    )


def with_nncf(tool: str, model: onnx.ModelProto, reader: TensorReader, output: str, spec: str) -> None:
    import nncf

    images = nncf.Dataset(list(iter(reader.get_next, None)))
    if tool == "nncf-accuracy":
        made = nncf.quantize_with_accuracy_control(model, images, images, fidelity_to(model, spec), max_drop=MAX_DROP)
    else:
        mixed = {"preset": nncf.QuantizationPreset.MIXED} if tool == "nncf-mixed" else {}
        made = nncf.quantize(model, images, **mixed)
    onnx.save(made, output)


def fidelity_to(reference: onnx.ModelProto, spec: str) -> Callable[[onnx.ModelProto, Iterable[Tensors]], Verdict]:
    """The mean fidelity of a network's answers to the reference's, as tared's verdict has it."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from agent.vision.fidelity import fidelity
    from agent.vision.spec import load_model_spec
    from agent.vision.task import VisionTask
    from engines.registry import open_backend

    model_spec = load_model_spec(Path(spec))

    def answers(model: onnx.ModelProto, images: Iterable[Tensors]) -> list[Any]:
        engine = open_backend("onnxruntime").load(model.SerializeToString())
        task = VisionTask(model_spec, engine.inputs, engine.outputs)
        return [task.decode(engine.infer(tensor), tensor.shape) for image in images for tensor in image.values()]

    def validate(model: onnx.ModelProto, images: Iterable[Tensors]) -> Verdict:
        shown = list(images)
        pairs = zip(answers(model, shown), answers(reference, shown), strict=True)
        agreements = [fidelity(answer, truth) for answer, truth in pairs]
        return mean([each.value for each in agreements if not each.is_empty] or [1.0]), None

    return validate


def main() -> None:
    tool, path, tensors, output, *spec = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        model = prepared(path)
        ready = str(Path(folder) / "model.onnx")
        onnx.save(model, ready)
        reader = TensorReader(model.graph.input[0].name, tensors)
        if tool == "modelopt":
            with_modelopt(ready, reader, output)
        elif tool.startswith("nncf"):
            with_nncf(tool, model, reader, output, "".join(spec))
        else:
            with_onnxruntime(tool, ready, reader, output, Path(folder))


if __name__ == "__main__":
    main()
