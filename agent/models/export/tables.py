"""Write the ranges of an artefact's tensors as the tables that other calibrators keep.

Such a table belongs to a float network whose tensors have the same names: each format has that network beside it,
the artefact's graph without Q/DQ. A tensor that the plan leaves float is not in the table.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import flatbuffers
import numpy as np

from agent.models.export.source import Export, ExportSource
from calibrate.scale import QMAX
from engines.graph.dequantised import int8_layers, without_qdq
from engines.graph.topology import COMPUTE_OPS

FLOAT_MODEL = "model.onnx"
# The releases of JetPack 5, 6 and 7.0, with the number in the cache's header. TensorRT 11 has no calibrators.
_CACHES = {"8.5.2": "TRT-8502", "10.3.0": "TRT-100300", "10.13.3": "TRT-101303"}
_PPQ_VERSION = "0.6.6"
_PPQ_FP32, _PPQ_TRT_INT8 = 0, 101  # values of ppq.core.TargetPlatform


def export_tensorrt_cache(source: ExportSource) -> Export:
    """Write calibration caches of TensorRT 8.5 to 10: a header, then `name: ` and the big-endian float32 scale."""
    lines = "".join(f"{name}: {scale_hex(amax / QMAX)}\n" for name, amax in source.ranges.items())
    caches = {
        f"calibration_{release}.cache": f"{header}-EntropyCalibration2\n{lines}".encode()
        for release, header in _CACHES.items()
    }
    return Export(
        {**caches, FLOAT_MODEL: _float_network(source)},
        (
            f"trtexec --onnx={FLOAT_MODEL} --int8 --fp16 --calib=calibration_10.3.0.cache --saveEngine=model.engine",
            "Take the cache of your release; for one between them, change the number in the cache's first line.",
            "TensorRT 11 reads no cache, and later releases of 10 deprecate it: see 'tared export --to trtexec'.",
        ),
    )


def scale_hex(scale: float) -> str:
    """Return a scale as TensorRT's caches have it.

    >>> scale_hex(1.0 / 127.0)
    '3c010204'
    """
    return struct.pack(">f", scale).hex()


def export_onnxruntime(source: ExportSource) -> Export:
    """Write ONNX Runtime's calibration table: for its quantisation tools, and for its TensorRT provider.

    The values are the largest magnitudes. ONNX Runtime's own writer takes the larger of lowest and highest, which is
    too small for a tensor that reaches further below zero than above.
    """
    ranges = source.ranges
    document = {
        "CLS": "TensorsData",
        "calibration_method": {"CLS": "CalibrationMethod", "value": "CalibrationMethod.MinMax"},
        "data": {
            name: {"lowest": _array(-amax), "highest": _array(amax), "CLS": "TensorData"}
            for name, amax in ranges.items()
        },
        "smooth_quant": False,
    }
    return Export(
        {
            "calibration.json": (json.dumps(document) + "\n").encode(),
            "calibration.flatbuffers": _flatbuffers(ranges),
            "calibration.cache": "".join(f"{name} {_text(amax)}\n" for name, amax in sorted(ranges.items())).encode(),
            FLOAT_MODEL: _float_network(source),
        },
        (
            f"TensorRT provider, with {FLOAT_MODEL}: trt_int8_enable=True, "
            "trt_int8_calibration_table_name='calibration.flatbuffers'.",
            "Quantisation tools: onnxruntime.quantization.calibrate.load_tensors_data('calibration.json').",
            "calibration.cache is the same as text. Every value is the largest magnitude of its tensor.",
        ),
    )


def _array(value: float) -> dict[str, Any]:
    return {"data": float(np.float32(value)), "dtype": "float32", "CLS": "numpy.array"}


def _text(value: float) -> str:
    return str(float(np.float32(value)))


def _flatbuffers(ranges: Mapping[str, float]) -> bytes:
    """Return a table TrtTable {dict: [KeyValue {key: string, value: string}]}, sorted by key."""
    builder = flatbuffers.Builder(1024)
    entries = []
    for name in sorted(ranges):
        key, value = builder.CreateString(name), builder.CreateString(_text(ranges[name]))
        builder.StartObject(2)
        builder.PrependUOffsetTRelativeSlot(0, key, 0)
        builder.PrependUOffsetTRelativeSlot(1, value, 0)
        entries.append(builder.EndObject())
    builder.StartVector(4, len(entries), 4)
    for entry in reversed(entries):
        builder.PrependUOffsetTRelative(entry)
    vector = builder.EndVector()
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, vector, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def export_ppq(source: ExportSource) -> Export:
    """Write PPQ's quantisation setting, with the plan as a dispatching table, and the ranges for its TensorRT tool."""
    ranges = source.ranges
    quantised = set(int8_layers(source.graph))
    layers = [node.name for node in source.graph.graph.node if node.op_type in COMPUTE_OPS]
    table = {layer: _PPQ_TRT_INT8 if layer in quantised else _PPQ_FP32 for layer in layers}
    setting = {
        "version": _PPQ_VERSION,
        "signature": "PPL Quantization Tool",
        "dispatching_table": {"dispatchings": table},
    }
    return Export(
        {
            "setting.json": (json.dumps(setting, indent=1) + "\n").encode(),
            "ranges.json": (json.dumps({"act_quant_info": ranges}, indent=1) + "\n").encode(),
            FLOAT_MODEL: _float_network(source),
        },
        (
            "Setting: ppq.api.setting.QuantizationSettingFactory.from_json(open('setting.json').read()).",
            f"It sends each layer of {FLOAT_MODEL} that is INT8 under the plan to TRT_INT8, and the others to FP32.",
            "ranges.json: int8_scale_file of ppq.utils.TensorRTUtil.build_engine, with the largest magnitudes.",
        ),
    )


def _float_network(source: ExportSource) -> bytes:
    return without_qdq(source.graph).SerializeToString()
