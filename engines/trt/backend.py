"""TensorRT 10, TensorRT 11 and TensorRT-RTX: the backend of a Jetson, and of PCs with an NVIDIA GPU.

Everything is strongly typed: precision lives in the graph (engines/half/convert.py), never in builder flags. The
reference is FP32 with TF32 products: as many bits of mantissa as FP16 with the range of FP32, so that no first frame
can overflow it.
"""

from __future__ import annotations

import atexit
import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import onnx.parser
from numpy.typing import NDArray
from onnx import ModelProto

from engines.board import board
from engines.cuda.gpu import Gpu
from engines.cuda.kernels import CudaExecutor, KernelGeometry, search_entropy
from engines.errors import EngineError
from engines.graph.dequantised import int8_layers
from engines.graph.profiles import profiles_for
from engines.graph.taps import expose_extremes
from engines.half.convert import half_precision
from engines.interface import BackendOptions, BuildRequest, Built, Observer, Progress, silent
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.store.artefact import Store, fingerprint
from engines.trt.builder import BuilderOptions, BuiltEngine, MissingKernelError, build_engine
from engines.trt.layers import LAYERS_FILE, Layer, layers_to_json, with_times, without_int8
from engines.trt.reference import Reference, open_reference
from engines.trt.release import TensorRtRelease, open_release
from engines.trt.session import Session, TensorRtEngine

_BOARD_FACTS = ("machine", "model", "l4t", "driver", "power_mode")  # kernels and their timings depend on them


class TensorRtBackend:
    """Backend on this machine's GPU; or, with a target, only its builder, on a machine that need not have one."""

    name = "tensorrt"
    engine_file = "engine.plan"
    precisions: Sequence[str] = ("fp32", "fp16")
    int8_must_gain = False  # it saves memory and power, too
    takes_unsigned = False
    weight_bits = 8

    def __init__(self, options: BackendOptions | None = None) -> None:
        """Open TensorRT and the GPU.

        Raises EngineError:
            backend.missing  no package of TensorRT is installed
            backend.library  a package is there and cannot be loaded
            backend.version  its version is not supported
            backend.gpu      this release does not support the GPU

        Raises DeviceError as Gpu does.
        """
        self._options = options or BackendOptions()
        self._release = open_release(crossing=self._options.target is not None)
        self._gpu = _gpu() if self._options.target is None else None
        if self._gpu is not None and self._release.traits.crosses:
            _require_support(self._release, self._gpu)

    def describe(self) -> Mapping[str, str]:
        """Return runtime and version; GPU, driver and board, or the target."""
        described = {"runtime": self._release.traits.module, "version": self._release.version}
        if self._gpu is None:
            return {**described, "target": str(self._options.target)}
        here = board()
        return {**described, **self._gpu.describe(), **{fact: here[fact] for fact in _BOARD_FACTS if fact in here}}

    def flags(self) -> Mapping[str, str]:
        chosen = {"dla": self._options.dla, "best": self._options.best or None}
        return {name: str(value) for name, value in chosen.items() if value is not None}

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        """Compile the graph for this GPU, or for the target.

        Raises EngineError:
            model.opset, model.half  the graph has no float16 form
            engine.profile           a profile of another input, or outside the model's shapes
            engine.memory            the builder ran out of memory
            engine.unsupported       an operator that TensorRT does not have
            engine.double, engine.graph, engine.empty  anything else that its parser refuses
            engine.target, engine.dla  an unknown target; a DLA core that is not there
            engine.build             anything else that the builder refuses; the message has its log line
        """
        graph, facts = request.graph, dict[str, Any]()
        if request.precision != "fp32":
            half = half_precision(graph, request.amax)
            graph, facts["float32"] = half.model, dict(half.float32)
        quantised = int8_layers(graph)
        try:
            built = self._build(graph, request, progress)
        except MissingKernelError as error:
            lacking = [node for node in quantised if _names(error.layer, node)]
            if not lacking:
                raise
            return Built(b"", without_int8=dict.fromkeys(lacking, f"no INT8 kernel: {error.found}"))
        layers = self._layers(built)
        lacking_int8 = without_int8(layers, quantised) if self._release.traits.times else {}
        if self._gpu is None:
            facts["verification_only"] = True
        return Built(built.content, {LAYERS_FILE: layers_to_json(layers)}, facts, lacking_int8)

    def load(self, engine: bytes) -> TensorRtEngine:
        """Load an engine onto the GPU.

        Raises EngineError:
            engine.unreadable  damaged, of another release, or of another GPU; the message is the log's
            engine.memory      too little memory for the activations
            engine.output      an output whose size depends on values
            engine.target      there is only a builder here

        Raises DeviceError when the GPU fails.
        """
        return TensorRtEngine(self._release, self._device(), engine)

    def observer(
        self, request: BuildRequest, taps: Sequence[str], progress: Progress = silent, layers: Sequence[str] = ()
    ) -> Observer:
        """Build or load the float reference, and open it with histogram taps that were compared with ONNX Runtime's.

        Raises EngineError as `build` and `open_reference` do, and `engine.target` where there is only a builder.
        """
        if self._options.reference == "onnxruntime":
            return OnnxRuntimeBackend(BackendOptions(self._options.threads)).observer(request, taps, progress, layers)
        graph, extremes = expose_extremes(request.graph, layers)
        request = replace(request, graph=graph)

        def build(debug: Sequence[str], outputs: Sequence[str], reported: Progress) -> bytes:
            return self._build(request.graph, request, reported, debug, outputs).content

        cache = self._options.cache
        store = Store(cache / "references", self._options.key) if cache is not None else None
        reference = Reference(
            self._release, self._device(), request, tuple(taps), extremes, build, self.describe(), store
        )
        return open_reference(reference, progress)

    def search_entropy(self, counts: NDArray[np.int64], windows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Search the thresholds of method `entropy` on the GPU, as EntropySearch says.

        Raises DeviceError as CudaExecutor does, EngineError (`engine.target`) where there is only a builder.
        """
        gpu = self._device()
        with gpu.current():
            geometry = KernelGeometry(bits=counts.shape[1].bit_length() - 1)
            return search_entropy(CudaExecutor(gpu, geometry), counts, windows)  # dropped while the context is current

    def _device(self) -> Gpu:
        if self._gpu is None:
            raise EngineError(
                "engine.target",
                f"an engine for {self._options.target}, built without a GPU to prove that the builder takes the model",
                "an engine of this machine's GPU",
                "build it on the board that shall run it",
            )
        return self._gpu

    def _build(
        self,
        graph: ModelProto,
        request: BuildRequest,
        progress: Progress,
        debug: Sequence[str] = (),
        outputs: Sequence[str] = (),
    ) -> BuiltEngine:
        timings = None
        if self._options.cache is not None:  # kernel timings of another release, GPU or power mode would be wrong
            described = self.describe()
            name = f"{described['runtime']}-{described['version']}-{fingerprint(described)}.timings"
            timings = self._options.cache / name
        options = BuilderOptions(
            self._options.target,
            self._options.dla if request.precision != "fp32" else None,  # the accelerators have no FP32
            self._options.best,
            timings,
            self._options.key,
            None if self._gpu is None or self._gpu.integrated else self._gpu.free_bytes,
        )
        return build_engine(
            self._release, graph, profiles_for(graph, request), options, progress, debug=debug, outputs=outputs
        )

    def _layers(self, built: BuiltEngine) -> Sequence[Layer]:
        """Return the builder's layers: from the inspector if the engine can be loaded, else from the log."""
        if self._gpu is None:
            return built.layers
        with closing(Session(self._release, self._gpu, built.content, slots=1 if self._options.best else 0)) as session:
            if not self._options.best:
                return session.layers()
            return with_times(session.layers(), session.layer_times_ms(session.zeros()))


@functools.cache
def _gpu() -> Gpu:
    """This process's GPU, until it ends."""
    gpu = Gpu()
    atexit.register(gpu.close)
    return gpu


@functools.cache
def _require_support(release: TensorRtRelease, gpu: Gpu) -> None:
    """Raise EngineError (`backend.gpu`) unless an engine of one node can be loaded, which takes a tenth of a second.

    A release that builds for GPUs elsewhere builds on any machine, and refuses its own GPU when it loads the engine.
    """
    text = '<ir_version: 8, opset_import: ["": 13]> support (float[1] x) => (float[1] y) { y = Identity(x) }'
    model = onnx.parser.parse_model(text)
    built = build_engine(release, model, (), BuilderOptions(), silent)
    try:
        Session(release, gpu, built.content, slots=0).close()
    except EngineError as error:
        expected = f"a GPU that {release.name} supports"
        remedy = "backend: auto, which takes another runtime; or a release of TensorRT for this GPU"
        raise EngineError("backend.gpu", error.found, expected, remedy) from error


def _names(layer: str, node: str) -> bool:
    """Return True if a layer's name, made of the names of its nodes, has this one in it: "a_1 + b" has no "a"."""
    return re.search(rf"(?<![\w/.:-]){re.escape(node)}(?![\w/.:-])", layer) is not None
