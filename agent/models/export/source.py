"""Open the material of an export: the verified artefact, its graph, and the ranges of its tensors.

An artefact of ONNX Runtime holds its graph, and one of OpenVINO a graph of its own kind, with uint8 tensors. One of
TensorRT holds none. If its graph does not suffice, it is written again from the model's ONNX file, and from the
calibration and the plan in the artefact.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from agent.common.errors import AgentError
from agent.common.schema import validate
from agent.models.model import Model, open_model, read_plan
from agent.vision.preprocess import network_input
from agent.vision.spec import ModelSpec
from calibrate.plan import ALL_INT8
from engines.calibration import Calibration, load_calibration
from engines.graph.dequantised import activation_amax
from engines.graph.load import image_input
from engines.graph.profiles import profiles_for
from engines.interface import BuildRequest, Profile, ShapeRange
from engines.quantise.apply_plan import quantised_graph
from engines.store.artefact import Artefact, read_artefact

NO_LICENCE = "NOASSERTION"  # as SPDX has it
_LICENCE_KEYS = ("license", "licence")


@dataclass(frozen=True)
class Export:
    """The output of a format: its files by their names in the folder, and the three lines of its README."""

    files: Mapping[str, bytes]
    readme: tuple[str, str, str]


@dataclass(frozen=True)
class ExportSource:
    """An artefact to export.

    model: the model it was built of, opened again; None where no ONNX file was given.
    licence: of the model, an SPDX expression; empty: what the model itself says.
    """

    artefact: Artefact
    spec: ModelSpec
    calibration: Calibration | None
    model: Model | None
    licence: str

    @property
    def name(self) -> str:
        """The name of the model, without the suffix of its file."""
        return Path(str(self.artefact.manifest.get("model_name", "model.onnx"))).stem

    @property
    def runtime(self) -> str:
        """The runtime that the artefact was built for: onnxruntime, openvino, tensorrt or tensorrt_rtx."""
        return str(self.artefact.manifest["inputs"]["backend"]["runtime"])

    @property
    def precision(self) -> str:
        """The precision of the artefact: int8, fp16 or fp32."""
        return str(self.artefact.manifest["inputs"]["precision"])

    @property
    def labels_file(self) -> bytes:
        """The names of the classes, one a line."""
        return "".join(f"{label}\n" for label in self.spec.labels).encode()

    @cached_property
    def graph(self) -> ModelProto:
        """The graph, float or with int8 Q/DQ, with its metadata.

        Raises AgentError (`export.graph`) where the artefact holds none and no ONNX file was given.
        """
        if self.model is not None:
            return self._annotated(self._rebuilt(self.model))
        if self.runtime != "onnxruntime":
            raise AgentError(
                "export.graph",
                f"an engine of {self.runtime}, whose artefact holds no graph for other runtimes",
                "the ONNX file that it was built from",
                "add --model MODEL.onnx: the graph is written again from the calibration and the plan in the artefact",
            )
        return self._annotated(self._own_graph())

    @cached_property
    def graph_with_uint8(self) -> ModelProto:
        """The graph for runtimes that take uint8 too: OpenVINO's own where the artefact holds it. Raises as `graph`."""
        if self.model is None and self.runtime == "openvino":
            return self._annotated(self._own_graph())
        return self.graph

    @cached_property
    def ranges(self) -> dict[str, float]:
        """The largest magnitude per quantised activation, in graph order.

        Raises AgentError (`export.float`) where nothing is quantised, and as `graph`.
        """
        ranges = activation_amax(self.graph)
        if not ranges:
            raise AgentError(
                "export.float",
                f"an artefact in {self.precision} without an INT8 tensor",
                "one with INT8 layers",
                "build it with a calibration, and with a plan that leaves layers INT8; or export it as onnx",
            )
        return ranges

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The input shapes of the graph where it leaves dimensions open, else none. Raises as `graph`."""
        image = image_input(self.graph)
        profiles = tuple(
            {name: ShapeRange(shapes.min, shapes.opt, shapes.max) for name, shapes in profile.items()}
            for profile in self.spec.profiles
        )
        accepted = network_input(self.spec, image)
        request = BuildRequest(self.graph, self.precision, accepted.shape(accepted.usual_size), profiles)
        return profiles_for(self.graph, request)

    def _own_graph(self) -> ModelProto:
        return onnx.load_from_string(self.artefact.read_engine())

    def _rebuilt(self, model: Model) -> ModelProto:
        if self.precision != "int8":
            return model.master
        floats = {**model.plan.floats, **self.artefact.manifest.get("without_int8", {})}
        return quantised_graph(model.master, replace(model.plan, floats=floats), self.calibration).graph

    def _annotated(self, graph: ModelProto) -> ModelProto:
        """Return a copy with names, licence and calibration in its metadata; what the model says of itself stays."""
        copy = ModelProto()
        copy.CopyFrom(graph)
        own = {entry.key: entry.value for entry in graph.metadata_props}
        stated = next((value for key, value in own.items() if key.lower() in _LICENCE_KEYS), NO_LICENCE)
        metadata = {**own, "license": self.licence or stated, **self._metadata()}
        onnx.helper.set_model_props(copy, metadata)
        copy.producer_name, copy.producer_version = "tared", version("tared")
        return copy

    def _metadata(self) -> dict[str, str]:
        inputs = self.artefact.manifest["inputs"]
        facts: dict[str, Any] = {
            "names": dict(enumerate(self.spec.labels)),
            "tared.model": {"name": self.name, "sha256": inputs["model"]},
            "tared.artefact": {"id": self.artefact.id, "precision": self.precision},
            "tared.spec": inputs["spec"],
        }
        if self.calibration is not None:
            seen = self.calibration
            facts["tared.calibration"] = {
                "id": seen.id,
                "method": seen.method,
                "frames": seen.frames,
                "source": seen.source,
            }
        return {key: json.dumps(value) for key, value in facts.items()}


def open_source(path: Path, model_path: Path | None, licence: str, key: bytes | None) -> ExportSource:
    """Verify an artefact and open what an export needs of it.

    Raises EngineError as `read_artefact` and `open_model`; AgentError:
        export.model  the ONNX file is of another model
    """
    artefact = read_artefact(path, key)
    inputs, files = artefact.manifest["inputs"], artefact.manifest["files"]
    has_calibration = "calibration.json" in files
    calibration = load_calibration(artefact.path / "calibration.json") if has_calibration else None
    onnx_path = model_path or Path(str(artefact.manifest.get("model_name", "model.onnx")))
    spec = validate(ModelSpec, {**inputs["spec"], "path": onnx_path}, str(path))
    model = None
    if model_path is not None:
        plan = read_plan(artefact.path / "plan.json") if "plan.json" in files else ALL_INT8
        model = open_model(spec, plan)
        if model.sha256 != inputs["model"]:
            raise AgentError(
                "export.model",
                f"{model_path}, a model {model.sha256[:12]}",
                f"the model that {path} was built from, {str(inputs['model'])[:12]}",
                "give the ONNX file of this artefact with --model",
            )
    return ExportSource(artefact, spec, calibration, model, licence)
