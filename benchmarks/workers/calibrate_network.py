"""python calibrate_network.py MODEL IMAGES THREADS TENSORS: the bare network over all images, nothing counted.

TENSORS: 'all' exposes every tensor as an output, the path of a calibration.json those that it has scales for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from phases import Phases


def main() -> None:
    phases = Phases()
    with phases.phase("imports"):
        import onnx
        import onnxruntime as ort
        from pictures import PictureReader
    path, images, threads, tensors = sys.argv[1:]
    with phases.phase("model preparation"):
        model = onnx.load(path)
        made = [output for node in model.graph.node for output in node.output]
        names = made if tensors == "all" else list(json.loads(Path(tensors).read_text())["tensors"])
        del model.graph.output[:]
        model.graph.output.extend(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names if name in made
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = int(threads)
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as tared, on a shared machine
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        reader = PictureReader(images)
    phases.wrap(reader, "get_next", "images")
    with phases.phase("network"):
        while inputs := reader.get_next():
            session.run(None, inputs)
    phases.report(tensors=len(model.graph.output))


if __name__ == "__main__":
    main()
