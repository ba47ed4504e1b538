"""ONNX Runtime on the CPU: the embedded default, on any machine.

Q/DQ graphs run as written, in float with rounding to the INT8 grid: `session.disable_quant_qdq` is set. ONNX
Runtime's integer kernels would compute other numbers than the graph says: its fusions round differently and
force a float bias into int32, and int8 products saturate on x86 without VNNI. On the symmetric int8 that
TensorRT demands they are slower on top: it fuses few of these convolutions and dequantises the others'
weights on every run.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from calibrate.histogram import AbsHistogram, abs_histogram, merge
from engines.backend import Array, EngineError, Observation, Progress, TensorSpec
from engines.topology import tensor_types, trial_shape

_DTYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64,
    "tensor(int8)": np.int8, "tensor(uint8)": np.uint8, "tensor(int32)": np.int32, "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}  # fmt: skip
_LOG_ERRORS = 3  # ONNX Runtime's severity scale: 0 verbose ... 4 fatal
_FAILURES = tuple(v for v in vars(ort_state).values() if isinstance(v, type) and issubclass(v, Exception))
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")


class OnnxRuntimeBackend:
    """Backend with `threads` computing threads. Its engine file is the graph; loading optimises it."""

    name = "onnxruntime"
    engine_file = "engine.onnx"
    precisions: Sequence[str] = ("fp32",)

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def describe(self) -> Mapping[str, str]:
        return {
            "runtime": self.name,
            "version": ort.__version__,
            "provider": "CPUExecutionProvider",
            "machine": platform.machine(),
        }

    def build(
        self, graph: onnx.ModelProto, path: Path, progress: Progress, input_shape: Sequence[int] | None = None
    ) -> None:
        """Write the graph, under its name only once it has been loaded and has run on zeros.

        Raises EngineError: `engine.unsupported`, `engine.graph` or `engine.run` naming the node,
        `engine.write`.
        """
        partial = path.with_name(f".{path.name}.partial")
        try:
            progress(0.0, "writing the graph")
            with partial.open("wb") as file:
                file.write(graph.SerializeToString())
                file.flush()
                os.fsync(file.fileno())
            progress(0.3, "loading the graph")
            engine = self.load(partial)
            progress(0.7, "running it once")
            image = engine.inputs[0]
            engine.infer(np.zeros(input_shape or trial_shape(image.shape), image.dtype))
            engine.close()
            os.replace(partial, path)
        except OSError as error:
            remedy = "free disk space, or check the folder's permissions"
            raise EngineError("engine.write", f"{path}: {error.strerror}", "a writable folder", remedy) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        progress(1.0, "built")

    def load(self, path: Path) -> OnnxRuntimeEngine:
        """Raises EngineError: `engine.missing`, `engine.unreadable`, `engine.unsupported`, `engine.graph`."""
        return OnnxRuntimeEngine(str(path), self._threads)

    def observer(self, reference: onnx.ModelProto, taps: Sequence[str]) -> OnnxRuntimeObserver:
        """Raises EngineError: `observer.tap` (not a float32 tensor of the graph), and as `load`."""
        return OnnxRuntimeObserver(reference, taps, self._threads)


class OnnxRuntimeEngine:
    """Engine on one session; `model` is a path or the serialised graph.

    `plans_memory`: one block for all activations of a run. It saves time where activations share its parts; an
    observer's do not, they are outputs, and the block would come on top of them.
    """

    def __init__(self, model: str | bytes, threads: int, plans_memory: bool = True) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = plans_memory
        options.log_severity_level = _LOG_ERRORS
        # A spinning thread would hold a core of a two-core board that the camera needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except _FAILURES as error:
            raise _engine_error(error, "engine.graph") from error
        self._session: ort.InferenceSession | None = session
        self.inputs = [_spec(value) for value in session.get_inputs()]
        self.outputs = [_spec(value) for value in session.get_outputs()]
        batch = session.get_inputs()[0].shape[0]
        self.batched = {value.name: value.shape[:1] == [batch] for value in session.get_outputs()}
        """Per output: does it declare the input's batch dimension as its first?"""

    def infer(self, batch: Array) -> dict[str, Array]:
        """Raises EngineError: `engine.batch` (other shape or dtype), `engine.run`, `engine.closed`."""
        if self._session is None:
            raise EngineError("engine.closed", "a closed engine", "an open one", "load it again")
        self._check(batch)
        try:
            results: list[Array] = self._session.run(None, {self.inputs[0].name: batch})
        except _FAILURES as error:
            raise _engine_error(error, "engine.run") from error
        return dict(zip((output.name for output in self.outputs), results, strict=True))

    def close(self) -> None:
        self._session = None

    def _check(self, batch: Array) -> None:
        spec = self.inputs[0]
        fits = len(batch.shape) == len(spec.shape) and all(
            size > 0 and expected in (None, size) for size, expected in zip(batch.shape, spec.shape, strict=True)
        )
        if not fits or batch.dtype != spec.dtype:
            shape = ", ".join("any" if size is None else str(size) for size in spec.shape)
            raise EngineError(
                "engine.batch",
                f"{batch.dtype} {list(batch.shape)}",
                f"{spec.dtype} [{shape}] for input '{spec.name}'",
                "preprocess images for this engine's input",
            )


class OnnxRuntimeObserver:
    """Observer: the reference graph with its taps as further outputs.

    It runs at the graph's fixed batch size, or image by image where the batch is open. A kernel may sum in
    another order for another batch size, which changes last bits, and a bit can move a value into the next
    bin: this way histograms depend on the images alone, and memory stays that of one image.
    """

    def __init__(self, reference: onnx.ModelProto, taps: Sequence[str], threads: int) -> None:
        self.taps = tuple(taps)
        graph = onnx.ModelProto()
        graph.CopyFrom(reference)
        types = tensor_types(reference)
        present = {value.name for value in (*graph.graph.input, *graph.graph.output)}
        for tap in self.taps:
            found = types.get(tap)
            if found is None or found.elem_type != onnx.TensorProto.FLOAT:
                raise EngineError(
                    "observer.tap",
                    f"tap '{tap}'",
                    "a float32 tensor of the reference graph",
                    "place the taps on this very graph",
                )
            if tap not in present:
                graph.graph.output.append(onnx.helper.make_tensor_value_info(tap, found.elem_type, None))
        self._outputs = [output.name for output in reference.graph.output]
        self._engine = OnnxRuntimeEngine(graph.SerializeToString(), threads, plans_memory=False)
        self.inputs = self._engine.inputs
        self.outputs = [output for output in self._engine.outputs if output.name in self._outputs]
        self._step = self._engine.inputs[0].shape[0] or 1

    def observe(self, batch: Array) -> Observation:
        """Batch (N, C, H, W), N a multiple of a fixed batch size. Non-finite values are counted, not raised.

        Raises EngineError: as `infer`, and `observer.batch` for several images when an output has no batch
        axis.
        """
        histograms: dict[str, AbsHistogram] = {}
        parts: dict[str, list[Array]] = {name: [] for name in self._outputs}
        for start in range(0, max(len(batch), 1), self._step):
            image = batch[start : start + self._step]
            tensors = {self._engine.inputs[0].name: image} | self._engine.infer(image)
            for tap in self.taps:
                collected = abs_histogram(tensors[tap].astype(np.float32, copy=False))
                histograms[tap] = merge(histograms[tap], collected) if tap in histograms else collected
            for name in self._outputs:
                parts[name].append(tensors[name])
        return Observation({name: self._joined(name, part) for name, part in parts.items()}, histograms)

    def close(self) -> None:
        self._engine.close()

    def _joined(self, name: str, parts: list[Array]) -> Array:
        if len(parts) == 1:
            return parts[0]
        if not self._engine.batched[name]:
            raise EngineError(
                "observer.batch",
                f"{len(parts)} images, and output '{name}' without a batch axis",
                "one image at a time for this model",
                "observe single images",
            )
        return np.concatenate(parts)


def _spec(value: ort.NodeArg) -> TensorSpec:
    if value.type not in _DTYPES:
        raise EngineError(
            "engine.dtype",
            f"'{value.name}' of type {value.type}",
            "inputs and outputs of numeric tensors",
            "export the model without it",
        )
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return TensorSpec(value.name, np.dtype(_DTYPES[value.type]), shape)


def _engine_error(error: Exception, code: str) -> EngineError:
    """Sort ONNX Runtime's exceptions; its text names the node and the operator."""
    kind = type(error).__name__
    found = _PREFIX.sub("", str(error)).strip()
    if kind == "NoSuchFile":
        return EngineError("engine.missing", found, "an engine file", "build the engine")
    if kind == "InvalidProtobuf":
        return EngineError("engine.unreadable", found, "a complete engine file", "build the engine again")
    if kind == "NotImplemented":
        remedy = f"update onnxruntime ({ort.__version__} here), or export the model with other operators"
        return EngineError("engine.unsupported", found, "operators that ONNX Runtime has on the CPU", remedy)
    return EngineError(code, found, "a graph that ONNX Runtime runs", "check the model with onnxruntime alone")
