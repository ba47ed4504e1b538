"""Read the scales that another tool chose, make them a calibration, and compare them with what frames say.

The kind of a file is found from its content: TensorRT's calibration cache, a table of ONNX Runtime (JSON, flatbuffers
or text), or an ONNX graph with Q/DQ, as ModelOpt writes it. Its tensors are matched with the model's by name.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from flatbuffers.table import Table

from agent.common.errors import AgentError
from agent.models.model import Model
from calibrate.noise import tensor_noise
from calibrate.scale import QMAX
from engines.calibration import Calibration
from engines.graph.dequantised import activation_amax
from engines.graph.load import parse_model

_TRT_HEADER = re.compile(r"TRT-(\d+)-(\w+)")
_TRT_METHODS = {
    "EntropyCalibration2": "entropy",
    "EntropyCalibration": "entropy",
    "MinMaxCalibration": "min-max",
}
_TRT_LINE = re.compile(r"(.+): ([0-9a-fA-F]{8})")
# Exceptions of JSON and flatbuffers for bytes that are no table, or a damaged one.
_FOREIGN = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError, struct.error)


@dataclass(frozen=True)
class ForeignRanges:
    """The ranges in a file of another tool.

    kind: of the file, for people and as the calibration's method: `tensorrt-entropy`, `tensorrt-min-max`,
        `onnxruntime-table` or `qdq-graph`.
    amax: the largest magnitude that the scale of each tensor reaches.
    """

    kind: str
    amax: Mapping[str, float]


def read_ranges(path: Path) -> ForeignRanges:
    """Read a file of another tool.

    Raises AgentError:
        cache.missing  it cannot be read
        cache.format   it is none of the known kinds, or damaged
    EngineError as `parse_model` and `activation_amax` for a graph.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AgentError(
            "cache.missing", f"{path}: {error.strerror}", "a readable file", "check the path of --from-cache"
        ) from error
    if path.suffix == ".onnx":
        ranges = ForeignRanges("qdq-graph", activation_amax(parse_model(path)))
    elif content.startswith(b"TRT-"):
        ranges = _read_tensorrt(path, content)
    else:
        ranges = ForeignRanges("onnxruntime-table", _read_onnxruntime(path, content))
    if not ranges.amax:
        raise _unreadable(path, "no tensor in it")
    for name, amax in ranges.amax.items():
        if not (np.isfinite(amax) and amax >= 0.0):
            raise _unreadable(path, f"range {amax} of tensor '{name}'")
    return ranges


def _read_tensorrt(path: Path, content: bytes) -> ForeignRanges:
    header, *lines = content.decode("utf-8", errors="replace").splitlines()
    match = _TRT_HEADER.fullmatch(header.strip())
    if match is None or match[2] not in _TRT_METHODS:
        raise _unreadable(path, f"first line '{header[:80]}'")
    amax = {}
    for number, line in enumerate(lines, 2):
        entry = _TRT_LINE.fullmatch(line.strip())
        if entry is None and line.strip():
            raise _unreadable(path, f"line {number} '{line[:80]}'")
        if entry is not None:
            (scale,) = struct.unpack(">f", bytes.fromhex(entry[2]))
            amax[entry[1]] = QMAX * scale
    return ForeignRanges(f"tensorrt-{_TRT_METHODS[match[2]]}", amax)


def _read_onnxruntime(path: Path, content: bytes) -> dict[str, float]:
    try:
        if content.lstrip().startswith(b"{"):
            document = json.loads(content)
            return {str(name): _json_amax(entry) for name, entry in document.get("data", document).items()}
        if path.suffix == ".flatbuffers":
            return {name: abs(float(value)) for name, value in _key_values(content)}
        pairs = (line.rsplit(None, 1) for line in content.decode().splitlines() if line.strip())
        return {name: abs(float(value)) for name, value in pairs}
    except _FOREIGN as error:
        raise _unreadable(path, str(error)) from error


def _json_amax(entry: Any) -> float:
    """Return the largest magnitude of an entry: a range with `lowest` and `highest`, or a pair of numbers."""
    bounds = [entry["lowest"], entry["highest"]] if isinstance(entry, Mapping) else list(entry)
    values = [bound["data"] if isinstance(bound, Mapping) else bound for bound in bounds]
    return float(np.abs(np.array(values, np.float64)).max())


def _key_values(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield the entries of a table TrtTable {dict: [KeyValue {key: string, value: string}]}."""
    buffer = bytearray(content)
    table = Table(buffer, flatbuffers.encode.Get(flatbuffers.packer.uoffset, buffer, 0))
    entries = table.Offset(4)
    for index in range(table.VectorLen(entries) if entries else 0):
        entry = Table(buffer, table.Indirect(table.Vector(entries) + 4 * index))
        key, value = (entry.String(entry.Offset(slot) + entry.Pos).decode() for slot in (4, 6))
        yield key, value


def _unreadable(path: Path, found: str) -> AgentError:
    return AgentError(
        "cache.format",
        f"{path}: {found}",
        "a calibration cache of TensorRT (entropy or min-max), a table of ONNX Runtime, or a .onnx with Q/DQ",
        "export it again with the tool that made it",
    )


def matched_ranges(model: Model, ranges: ForeignRanges) -> dict[str, float]:
    """Return the range of each tap that the other tool has, by name.

    Tensors under one scale of ours count as one: a tool that quantises what a Concat makes need not have its inputs.
    """
    matched = {}
    for group in model.placement.groups:
        shared = [ranges.amax[name] for name in (*group.tensors, *group.taps) if name in ranges.amax]
        if shared:
            matched.update({tap: ranges.amax.get(tap, max(shared)) for tap in group.taps})
    return matched


def foreign_calibration(model: Model, ranges: ForeignRanges, source: str, frames: Calibration | None) -> Calibration:
    """Make a calibration of this model from the ranges of another tool.

    A tensor that the other tool does not have gets its scale from the frames' calibration. The histograms and extremes
    are those of the frames; without frames there are none.

    Raises AgentError:
        cache.tensors  tensors are missing and there are no frames, or the file has none of the model's tensors
    """
    known = matched_ranges(model, ranges)
    missing = [tap for tap in model.needed_taps if tap not in known]
    if not known or (missing and frames is None):
        raise AgentError(
            "cache.tensors",
            f"no range for {len(missing)} of {len(model.needed_taps)} tensors, '{(missing or [''])[0]}' among them",
            f"ranges of {model.spec.path.name}",
            "add --frames SRC: these tensors get their ranges from the frames"
            if known
            else "give the file that was made for this model",
        )
    if frames is None:
        return Calibration(model.sha256, ranges.kind, 0, source, {}, known, model.preprocessing)
    return replace(frames, method=ranges.kind, amax={**frames.amax, **known})


def differences(foreign: Calibration, frames: Calibration) -> list[dict[str, Any]]:
    """Compare two calibrations with the same histograms, tensor by tensor, the largest difference first.

    Keys of each row, in JSON's types: `tensor`, `scale` of the other tool, and
        frames_scale  the scale that frames suggest
        db            noise under the other tool's scale over that under the frames'; positive: the frames' is better
        clipping      the share of clipping in the noise under the other tool's scale
    """
    noise = tensor_noise(frames.histograms, [foreign.scales, frames.scales])
    rows = list[tuple[float, dict[str, Any]]]()
    for name, ratios in zip(noise.names, noise.ratios, strict=True):
        theirs, ours = (float(ratios[index].sum()) for index in (0, 1))
        db = 10.0 * float(np.log10(theirs / ours)) if theirs > 0.0 and ours > 0.0 else 0.0
        clipping = float(ratios[0, 1]) / theirs if theirs > 0.0 else 0.0
        scales = {"scale": foreign.scales[name], "frames_scale": frames.scales[name]}
        rows.append((abs(db), {"tensor": name, **scales, "db": round(db, 2), "clipping": round(clipping, 4)}))
    return [row for _, row in sorted(rows, key=lambda each: -each[0])]
