"""The reference engine beside the frame path: outputs and histograms of every tap, counted where the tensors lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
from onnx import ModelProto

from calibrate.histogram import AbsHistogram, merge
from engines.backend import Array, EngineError, Observation
from engines.onnxruntime_backend import OnnxRuntimeEngine
from engines.taps import element_counts, expose
from engines.trt.probes import Probe, Sight

_LEAST_SQNR_DB = 30.0  # TF32 products keep 10 bits, so some 50 dB are left of FP32 after a deep network


class TensorRtObserver:
    """Observer on one or more engines that together see every tap; the first one gives the outputs.

    It runs image by image, as ONNX Runtime's does: histograms depend on the images alone. Any size may be observed that
    a profile allows.
    """

    def __init__(self, reference: ModelProto, taps: Sequence[str], probes: Sequence[Probe]) -> None:
        self.taps = tuple(taps)
        self._reference = reference
        self._probes = list(probes)
        self.inputs = self._probes[0].inputs
        self.outputs = self._probes[0].outputs
        self._elements: dict[tuple[int, ...], Mapping[str, int | None]] = {}
        self._step = self.inputs[0].shape[0] or 1

    def observe(self, batch: Array) -> Observation:
        """Batch (N, C, H, W), N a multiple of a fixed batch size.

        Raises EngineError: `observer.taps` when a tap is missing, or has other values than its shape says;
        `observer.listener`; as Session.start.
        """
        histograms: dict[str, AbsHistogram] = {}
        parts: list[dict[str, Array]] = []
        for start in range(0, len(batch), self._step):
            sight = self._see(batch[start : start + self._step])
            parts.append(sight.outputs)
            for tap, found in sight.histograms.items():
                histograms[tap] = merge(histograms[tap], found) if tap in histograms else found
        return Observation(self._joined(parts), histograms)

    def infer(self, batch: Array) -> dict[str, Array]:
        """As `observe`, without the taps."""
        steps = range(0, len(batch), self._step)
        return self._joined([self._probes[0].infer(batch[start : start + self._step]) for start in steps])

    def verify(self, image: Array) -> None:
        """Compare outputs and a few taps with ONNX Runtime's on one image (N, C, H, W), N the fixed batch size or 1.

        Raises EngineError (`observer.mismatch`) where they are less alike than TF32 explains, and as `observe`.
        """
        compared = {self.taps[index] for index in (0, len(self.taps) // 2, -1)} if self.taps else set()
        sight = self._see(image, compared)
        exposed = expose(self._reference, sorted(compared)).SerializeToString()
        reference = OnnxRuntimeEngine(exposed, threads=1)
        expected = {reference.inputs[0].name: image, **reference.infer(image)}
        reference.close()
        for name, found in {**sight.outputs, **sight.values}.items():
            alike_db = _sqnr_db(expected[name], found)
            if alike_db < _LEAST_SQNR_DB:
                raise EngineError(
                    "observer.mismatch",
                    f"tensor '{name}' is {alike_db:.1f} dB like ONNX Runtime's",
                    f"at least {_LEAST_SQNR_DB:.0f} dB",
                    "report the model and the versions of `tared doctor`; --backend onnxruntime calibrates meanwhile",
                )

    def close(self) -> None:
        """Free every engine, idempotent."""
        with ExitStack() as stack:  # each of them, whatever another raises
            for probe in self._probes:
                stack.callback(probe.close)

    def _see(self, image: Array, copied: Collection[str] = ()) -> Sight:
        sights = [probe.see(image, copied) for probe in self._probes]
        histograms = {tap: found for sight in sights for tap, found in sight.histograms.items()}
        values = {tap: found for sight in sights for tap, found in sight.values.items()}
        self._check(image.shape, histograms)
        return Sight(sights[0].outputs, {tap: histograms[tap] for tap in self.taps}, values)

    def _check(self, shape: tuple[int, ...], histograms: Mapping[str, AbsHistogram]) -> None:
        """A tap that did not arrive, or not whole, would calibrate a network that nobody has seen."""
        if shape not in self._elements:
            self._elements[shape] = element_counts(self._reference, shape, self.taps)
        for tap, expected in self._elements[shape].items():
            found = _values(histograms[tap]) if tap in histograms else 0
            if found == 0 or expected not in (None, found):
                raise EngineError(
                    "observer.taps",
                    f"{found} values of tensor '{tap}'",
                    f"{expected or 'some'} for an input {list(shape)}",
                    "report the model and the versions of `tared doctor`; --backend onnxruntime calibrates meanwhile",
                )

    def _joined(self, parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _values(histogram: AbsHistogram) -> int:
    return int(histogram.counts.sum()) + histogram.nonfinite


def _sqnr_db(expected: Array, found: Array) -> float:
    """Signal to difference in dB; minus infinity where shapes or non-finite values differ."""
    a, b = expected.astype(np.float64).ravel(), found.astype(np.float64).ravel()
    if expected.shape != found.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return -np.inf
    a, b = a[np.isfinite(a)], b[np.isfinite(b)]
    noise, signal = float(np.sum((a - b) ** 2)), float(np.sum(a**2))
    return np.inf if noise == 0.0 else float(10.0 * np.log10(signal / noise)) if signal else -np.inf
