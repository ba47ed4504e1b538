"""python -m benchmarks.workers.openvino_instructions GRAPH TENSORS: is an INT8 graph computed as it is written?

GRAPH: an ONNX file with Q/DQ. TENSORS: a .npy file of network inputs, (images, C, H, W). Prints one JSON object:
whether products saturate, and signal to noise in dB over all outputs, of the graph as tared gives it to OpenVINO
(`built`), and of the same with weights of eight bits (`eight_bits`). ONEDNN_MAX_CPU_ISA limits the instructions.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from engines.errors import EngineError
from engines.interface import Array, Backend, BuildRequest
from engines.openvino_backend import OpenVinoBackend
from engines.quantise.integer_kernels import shift_concatenated
from engines.registry import open_backend


def outputs(backend: Backend, graph: bytes, images: Array) -> NDArray[np.float64]:
    """Return all outputs of all images, flat."""
    with closing(backend.load(graph)) as engine:
        answers = [engine.infer(image) for image in images]
    return np.concatenate([output.ravel() for answer in answers for output in answer.values()]).astype(np.float64)


def ratio_db(graph: bytes, images: Array) -> float:
    """Return the signal to noise of OpenVINO's outputs, to those of ONNX Runtime."""
    written = outputs(open_backend("onnxruntime"), graph, images)
    noise = outputs(OpenVinoBackend(), graph, images) - written
    return float(10.0 * np.log10(np.square(written).mean() / np.square(noise).mean()))


def main() -> None:
    model = ModelProto.FromString(Path(sys.argv[1]).read_bytes())
    images, backend = np.load(sys.argv[2]), OpenVinoBackend()
    try:
        built = backend.build(BuildRequest(model, "int8", images[0].shape)).engine
        eight_bits = ModelProto()
        eight_bits.CopyFrom(model)
        shift_concatenated(eight_bits)
        ratios: dict[str, float | str] = {"built": ratio_db(built, images)}
        ratios["eight_bits"] = ratio_db(eight_bits.SerializeToString(), images)
    except EngineError as error:
        ratios = {"error": str(error)}
    print(json.dumps({"products": backend.describe()["products"], **ratios}))


if __name__ == "__main__":
    main()
