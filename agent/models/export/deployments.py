"""Write what inference servers deploy: a configuration of DeepStream's nvinfer, a model repository of Triton.

Both serve TensorRT's engine where the artefact is one, else the graph.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto

from agent.common.errors import AgentError
from agent.models.export.graphs import ENGINE, MODEL, openvino_files, trtexec_files
from agent.models.export.graphs import FLOAT32 as GRAPH
from agent.models.export.source import Export, ExportSource
from agent.vision.spec import InputSpec
from agent.vision.tasks.opening import open_task
from engines.graph.load import image_input
from engines.graph.topology import MOVEMENT_OPS, QDQ_OPS, Topology, graph_inputs, value_type
from engines.interface import TensorSpec

CONFIG, LABELS = "config_infer.txt", "labels.txt"
_COLORS = {"rgb": 0, "bgr": 1, "gray": 2}
_NETWORK_MODES = {"fp32": 0, "int8": 1, "fp16": 2}
_CLASSIFIER, _RAW_TENSORS = 1, 100  # network types of nvinfer
_MOVING = MOVEMENT_OPS | QDQ_OPS | {"Identity", "Cast"}
_TYPES: Mapping[int, str] = {
    TensorProto.FLOAT: "TYPE_FP32", TensorProto.FLOAT16: "TYPE_FP16", TensorProto.DOUBLE: "TYPE_FP64",
    TensorProto.UINT8: "TYPE_UINT8", TensorProto.INT8: "TYPE_INT8", TensorProto.INT32: "TYPE_INT32",
    TensorProto.INT64: "TYPE_INT64", TensorProto.BOOL: "TYPE_BOOL",
}  # fmt: skip


def export_deepstream(source: ExportSource) -> Export:
    """Write a configuration of nvinfer, the labels, and the engine, or else the graphs with trtexec's commands.

    Raises AgentError as `ExportSource.graph`, and `export.input` for a preprocessing that nvinfer does not have.
    """
    settings = [*_preprocessing(source.spec.input), *_answers(source)]
    if _is_tensorrt(source):
        files, graph = {ENGINE: source.artefact.read_engine()}, []
        making = f"{ENGINE} is the engine of this artefact"
    else:
        files, graph = trtexec_files(source), [f"onnx-file={GRAPH}"]
        making = f"First build {ENGINE} on the board: sh build_10.sh"
    if source.spec.labels:
        settings.append(f"labelfile-path={LABELS}")
        one_line = open_task(source.spec).scores_classes  # nvinfer separates the classes of a classifier by semicolons
        files[LABELS] = (";".join(source.spec.labels) + "\n").encode() if one_line else source.labels_file
    lines = [
        "[property]",
        "gpu-id=0",
        "gie-unique-id=1",
        "process-mode=1",
        "batch-size=1",
        f"network-mode={_NETWORK_MODES[source.precision]}",
        f"model-engine-file={ENGINE}",
        *graph,
        *settings,
    ]
    files[CONFIG] = ("\n".join(lines) + "\n").encode()
    return Export(
        files,
        (
            f"{making}; then nvinfer config-file-path={CONFIG}.",
            _answers_text(source),
            "Not tried on DeepStream: compare a few answers with 'tared infer' before you rely on it.",
        ),
    )


def _is_tensorrt(source: ExportSource) -> bool:
    return source.runtime == "tensorrt" and not source.artefact.manifest.get("verification_only")


def _preprocessing(spec: InputSpec) -> list[str]:
    """Return nvinfer's y = factor * (x - offset), colours and scaling. Raises AgentError (`export.input`)."""
    channels = spec.channels
    std, mean = (np.broadcast_to(np.asarray(values, float), channels) for values in (spec.std, spec.mean))
    if np.ptp(std) > 0.0:
        raise _not_in_nvinfer(
            f"input.std with {channels} values, {list(map(float, std))}",
            "one factor for all channels",
            "export the model with its normalisation in the graph, and build the artefact again",
        )
    if spec.resize not in ("letterbox", "stretch"):
        raise _not_in_nvinfer(
            f"input.resize {spec.resize}", "letterbox or stretch", "calibrate and build with one of the two"
        )
    keeps_proportions = spec.resize == "letterbox"
    settings = [
        f"net-scale-factor={float(spec.scale / std[0])!r}",
        f"offsets={';'.join(repr(float(offset)) for offset in mean / spec.scale)}",
        f"model-color-format={_COLORS[spec.color]}",
        f"maintain-aspect-ratio={int(keeps_proportions)}",
    ]
    if keeps_proportions:
        settings.append(f"symmetric-padding={int(spec.anchor == 'center')}")
        if spec.pad:
            settings.append(f"# nvinfer pads with 0; this model was calibrated with a padding of {spec.pad}")
    return settings


def _answers(source: ExportSource) -> list[str]:
    task = open_task(source.spec)
    if task.scores_classes:
        return [f"network-type={_CLASSIFIER}", f"classifier-threshold={source.spec.score_threshold}"]
    if parser := _own_parser(source):
        return [*parser]
    classes = [f"num-detected-classes={len(source.spec.labels)}"] if source.spec.labels else []
    remark = [f"# {task.nvinfer_remark}"] if task.nvinfer_remark else []
    return [*classes, f"network-type={_RAW_TENSORS}", "output-tensor-meta=1", *remark]


def _own_parser(source: ExportSource) -> Sequence[str]:
    """Return the keys of a parser of nvinfer's own that answers as the task does; none where it has none."""
    if _is_tensorrt(source) and source.model is None:
        return ()  # nothing here shows the engine's outputs
    graph = source.graph
    if len(graph.graph.output) != 1 or not _ends_in_probabilities(graph):
        return ()
    (value,) = graph.graph.output
    shape = tuple(side if isinstance(side, int) else None for side in value_type(value).shape or ())
    return open_task(source.spec).nvinfer_parser(TensorSpec(value.name, np.dtype(np.float32), shape))


def _ends_in_probabilities(graph: ModelProto) -> bool:
    """Return whether all values of the one output are a softmax's or a sigmoid's, moved and resized at most."""
    producers = Topology(graph).producers
    node = producers.get(graph.graph.output[0].name)
    while node is not None and node.op_type in _MOVING:
        node = producers.get(node.input[0])
    return node is not None and node.op_type in ("Softmax", "Sigmoid")


def _answers_text(source: ExportSource) -> str:
    if open_task(source.spec).scores_classes:
        return f"It answers with classes of {LABELS}: the network's outputs must be probabilities for the threshold."
    if _own_parser(source):
        return "It answers with a class for each pixel, -1 for none (NvDsInferSegmentationMeta)."
    decoder = f"; decode them as '{source.spec.decoder}'" if source.spec.decoder else ""
    return f"It hands out the network's raw tensors (output-tensor-meta){decoder}."


def _not_in_nvinfer(found: str, expected: str, remedy: str) -> AgentError:
    return AgentError("export.input", found, f"{expected}, as nvinfer has it", remedy)


def export_triton(source: ExportSource) -> Export:
    """Write a model repository: one model with its configuration, its labels and its first version.

    Raises AgentError as `ExportSource.graph`; `export.graph` also for a TensorRT engine without its ONNX file, which
    has the names and shapes of inputs and outputs.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", source.name)
    graph = source.graph_with_uint8
    if _is_tensorrt(source):
        backend, versions = "tensorrt", {"model.plan": source.artefact.read_engine()}
    elif source.runtime == "openvino":
        backend, versions = "openvino", openvino_files(graph)
    else:
        backend, versions = "onnxruntime", {MODEL: graph.SerializeToString()}
    labels = {f"{name}/{LABELS}": source.labels_file} if source.spec.labels else {}
    return Export(
        {
            f"{name}/config.pbtxt": _config(source, name, backend, graph).encode(),
            **labels,
            **{f"{name}/1/{file}": content for file, content in versions.items()},
        },
        (
            f"A model repository: tritonserver --model-repository=THIS_FOLDER serves '{name}' (backend {backend}).",
            f"Input '{image_input(graph).name}': frames prepared as parameter 'tared.spec' in config.pbtxt says.",
            f"The outputs are the network's own; decode them as '{source.spec.decoder or source.spec.task}'.",
        ),
    )


def _config(source: ExportSource, name: str, backend: str, graph: ModelProto) -> str:
    """Return config.pbtxt in protobuf's text format. max_batch_size 0: shapes are those of the whole tensor."""
    inputs = [_tensor("input", value, "") for value in graph_inputs(graph)]
    labelled = LABELS if open_task(source.spec).scores_classes and source.spec.labels else ""
    outputs = [_tensor("output", value, labelled) for value in graph.graph.output]
    parameters = [
        _parameter("tared.artefact", source.artefact.id),
        _parameter("tared.spec", json.dumps(source.artefact.manifest["inputs"]["spec"])),
    ]
    lines = [f"name: {_quoted(name)}", f"backend: {_quoted(backend)}", "max_batch_size: 0"]
    return "\n".join([*lines, *inputs, *outputs, *parameters]) + "\n"


def _tensor(field: str, value: ValueInfoProto, labels: str) -> str:
    kind = value_type(value)
    dims = ", ".join(str(size) if isinstance(size, int) else "-1" for size in kind.shape or ())
    more = f", label_filename: {_quoted(labels)}" if labels else ""
    return f"{field} {{ name: {_quoted(value.name)}, data_type: {_TYPES[kind.elem_type]}, dims: [ {dims} ]{more} }}"


def _parameter(key: str, value: str) -> str:
    return f"parameters {{ key: {_quoted(key)}, value: {{ string_value: {_quoted(value)} }} }}"


def _quoted(text: str) -> str:
    """Return a string of protobuf's text format, UTF-8."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
