"""Compare the reference with ONNX Runtime on frames drawn at random: does it compute what it shall?

Fidelity and drift are measured by the reference. Where that runs on another runtime, it may be wrong without an error:
an FP32 engine of TensorRT was (NVIDIA/TensorRT issue 4813), for some batches alone. So one observed frame in some
minutes is also run through ONNX Runtime on the CPU.

1. `FrameAuditor` compares one frame. The noise that the reference's arithmetic allows is measured on this very frame:
   ONNX Runtime runs the graph with rounded factors, too (engines/graph/rounding.py).
2. `ReferenceAudit` is the thread that does it, at low priority and for at most one part in a hundred of a core. Its
   NoiseDetector raises the alarm, at most once in ten years for nothing.
3. `Mismatch` says what differs, where, and by how much.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import onnx
import pydantic
from pydantic import ConfigDict, NonNegativeInt

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import FaultLog
from agent.common.state_files import count, parse_state
from agent.common.timing import RandomInterval
from agent.models.model import Model
from agent.state.salvage import Row
from agent.state.store import StateStore
from agent.vision.fidelity import fidelity
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from calibrate.histogram import AbsHistogram
from calibrate.statistics.evidence import NoiseDetector
from engines.graph.rounding import round_products, smooth_outputs
from engines.interface import Array
from engines.onnxruntime_backend import OnnxRuntimeEngine, OnnxRuntimeObserver

log = logging.getLogger(__package__)

_NICE = 19
_SHARE = 0.01  # part of a core that audits may take
_FALSE_ALARM_S = 10 * 365.25 * 86_400.0
# Allowed noise over what rounding makes: hardware may cut bits off where the emulation rounds, and its sums are not
# exact either. Faults are louder: a reference is wrong where answers change, some 20 dB above that.
_MARGIN_DB = 10.0
_LEAST_NOISE = 1e-13  # relative to the signal: of FP32 itself
# Of 1 - fidelity: allowed in the mean where every output follows an operator that selects. An answer at the threshold
# flips by rounding alone, so no single frame counts for more than NoiseDetector.GROSS: only their mean is evidence.
_FLIPS = 0.02
_COARSE_BINS = 64  # in which the histograms of a tensor are compared
_DISTANCE = 0.02, 4.0  # from which on a tensor differs: at least, and over the distance that rounding makes


@dataclass(frozen=True)
class AuditedFrame:
    """An observed frame, and what the reference computed for it.

    tensor: Its network input (1, C, H, W). outputs: By name; `in_batch`: the same when the frame was one of several,
    in any row; empty where the reference was not asked. histograms: Of the taps.
    """

    camera: str
    number: int
    ts: float
    tensor: Array
    outputs: Mapping[str, Array]
    histograms: Mapping[str, AbsHistogram]
    in_batch: Mapping[str, Array] = field(default_factory=dict)


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Mismatch:
    """The worst difference of one frame. Raises ValueError for the fields of a damaged file.

    noise: Its power over the allowed one. output: Of the model. sqnr_db, allowed_db: Signal to difference, and the
    least that the arithmetic explains, in dB. tensor: The first inside the graph whose values differ by more than
    that, where one can be seen to; else empty. is_in_batch: only as one row of several.
    """

    noise: float
    output: str
    sqnr_db: float
    allowed_db: float
    camera: str = ""
    frame: NonNegativeInt = 0
    ts: float = 0.0
    tensor: str = ""
    is_in_batch: bool = False


class FrameAuditor:
    """Compares what the reference of a model computed for a frame with ONNX Runtime's answer.

    Its sessions are opened for each frame and closed again: they would take as much memory as the model, all the time.
    """

    def __init__(self, model: Model, product_bits: int) -> None:
        """product_bits: as in engines.interface.Observer."""
        self._graph = model.observed
        self._taps = model.placement.taps
        self._spec: ModelSpec = model.spec
        self._bits = product_bits
        self._smooth = smooth_outputs(model.observed)

    def audit(self, frame: AuditedFrame) -> Mismatch:
        """Return the worst difference, whether it is allowed or not. Raises EngineError as ONNX Runtime does."""
        right = self._run(self._graph, frame.tensor)
        if self._smooth:
            rounded = self._run(round_products(self._graph, self._bits), frame.tensor)
            differences = [
                _difference(name, right[name], found[name], rounded[name], is_in_batch)
                for is_in_batch, found in ((False, frame.outputs), (True, frame.in_batch))
                if found
                for name in self._smooth
            ]
            worst = max(differences, key=lambda each: each.noise)
        else:
            worst = self._decoded(frame, right)
        return replace(worst, camera=frame.camera, frame=frame.number, ts=frame.ts)

    def locate(self, frame: AuditedFrame) -> str:
        """Return the first tensor whose histogram differs by more than rounding explains; empty if none does."""
        exact, rounded = (
            self._observe(graph, frame.tensor) for graph in (self._graph, round_products(self._graph, self._bits))
        )
        for tap in self._taps:
            least, factor = _DISTANCE
            allowed = max(least, factor * _distance(exact[tap], rounded[tap]))
            if tap in frame.histograms and _distance(exact[tap], frame.histograms[tap]) > allowed:
                return tap
        return ""

    def _decoded(self, frame: AuditedFrame, right: Mapping[str, Array]) -> Mismatch:
        """Compare answers instead of outputs: each of them follows an operator that selects."""
        with closing(OnnxRuntimeEngine(self._graph.SerializeToString(), threads=1)) as engine:
            task = VisionTask(self._spec, engine.inputs, engine.outputs)
        answer, found = (task.answer(outputs, frame.tensor) for outputs in (right, frame.outputs))
        loss = 1.0 - fidelity(found, answer).value
        noise = min(loss / _FLIPS, NoiseDetector.GROSS)
        return Mismatch(noise, "the decoded answer", _db(loss), _db(_FLIPS))

    def _run(self, graph: onnx.ModelProto, tensor: Array) -> dict[str, Array]:
        with closing(OnnxRuntimeEngine(graph.SerializeToString(), threads=1)) as engine:
            return engine.infer(tensor)

    def _observe(self, graph: onnx.ModelProto, tensor: Array) -> Mapping[str, AbsHistogram]:
        with closing(OnnxRuntimeObserver(graph, self._taps, threads=1)) as observer:
            return observer.observe(tensor).histograms


def _difference(name: str, right: Array, found: Array, rounded: Array, is_in_batch: bool) -> Mismatch:
    allowed = max(_noise(right, rounded), _LEAST_NOISE) * 10.0 ** (_MARGIN_DB / 10.0)
    noise = _noise(right, found)
    relative = noise / allowed if math.isfinite(allowed) else 0.0  # rounding alone makes values that are not finite
    return Mismatch(relative, name, _db(noise), _db(allowed), is_in_batch=is_in_batch)


def _noise(right: Array, found: Array) -> float:
    """Return the power of the difference over that of the signal; infinite where shapes or non-finite values differ."""
    if right.shape != found.shape or not np.array_equal(np.isfinite(right), np.isfinite(found)):
        return math.inf
    finite = np.isfinite(right)
    signal, other = right[finite].astype(np.float64), found[finite].astype(np.float64)
    difference, power = float(np.square(other - signal).sum()), float(np.square(signal).sum())
    return difference / power if power else math.inf if difference else 0.0


def _db(noise: float) -> float:
    return -10.0 * math.log10(noise) if noise else math.inf


def _distance(one: AbsHistogram, other: AbsHistogram) -> float:
    """Return the total variation distance in [0, 1] of two histograms, in few bins: noise moves values by one."""
    range_exp = max(one.range_exp, other.range_exp)
    shares = []
    for histogram in (one.widened(range_exp), other.widened(range_exp)):
        coarse = histogram.counts.reshape(min(_COARSE_BINS, histogram.counts.size), -1).sum(axis=1)
        shares.append(coarse / max(1, coarse.sum()))
    return float(np.abs(shares[0] - shares[1]).sum() / 2.0)


class ReferenceAudit(threading.Thread):
    """Audit the frames that are offered, one at a time, until the reference is found wrong; then end.

    The evidence outlives a restart, in a file: a fault in one frame of a hundred takes hours to prove. `evidence`
    counts the audited frames, and holds the mismatch that raised the alarm, None as long as there is none.
    """

    def __init__(
        self,
        auditor: FrameAuditor,
        period_s: float,
        evidence: AuditEvidence,
        on_mismatch: Callable[[Mismatch], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Args:
        period_s: Seconds of capture time between two audited frames, in the mean.
        evidence: Of earlier processes, too.
        on_mismatch: Called once in this thread.
        """
        super().__init__(name="audit", daemon=True)
        self._auditor = auditor
        self._interval = RandomInterval(period_s)
        self.evidence = evidence
        self._on_mismatch = on_mismatch
        self._clock = clock
        self._faults = FaultLog(log)
        self._offered: queue.SimpleQueue[AuditedFrame | None] = queue.SimpleQueue()  # None: the end
        self._is_free = True  # no offered frame waits or is under way: `offer` clears it, and `run` sets it after that
        self._stopped = False
        self._rested_s = 0.0  # monotonic time from which on its share of a core is kept

    def is_due(self, ts: float) -> bool:
        """Return whether the frame of capture time `ts` is one to audit, and the previous one is done."""
        is_free = self._is_free and self._clock.monotonic_s() >= self._rested_s
        return is_free and self.evidence.mismatch is None and self._interval.due(ts)

    def offer(self, frame: AuditedFrame) -> None:
        """Audit this frame; its arrays are copied, and the caller goes on at once."""
        self._is_free = False
        self._offered.put(frame)

    def stop(self) -> None:
        """End the thread after the frame in hand, and wait for its end.

        Python ends a daemon thread that comes back from ONNX Runtime while the process ends, and that aborts it.
        """
        self._stopped = True
        self._offered.put(None)
        self.join()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (frame := self._offered.get()) is not None and not self._stopped:
            begun_s, cpu_s = self._clock.monotonic_s(), time.thread_time()
            try:
                mismatch = self._auditor.audit(frame)
                if self._stopped:  # the next observer goes on with the file
                    return
                if mismatch.noise > 1.0:
                    log.warning("event=audit frame=%d noise_db=%.1f", frame.number, 10.0 * math.log10(mismatch.noise))
                self.evidence.add(mismatch)
                if self.evidence.mismatch is not None:
                    self.evidence.locate(self._locate(frame))
                    self._on_mismatch(self.evidence.mismatch)
                    return
            except Exception as error:  # whatever it is, it costs this frame alone
                self._faults.note("audit", error)
            finally:
                self._rested_s = begun_s + (time.thread_time() - cpu_s) / _SHARE
                self._is_free = True

    def _locate(self, frame: AuditedFrame) -> str:
        try:
            return self._auditor.locate(frame)
        except Exception as error:  # the reference is wrong all the same
            self._faults.note("locate", error)
            return ""


class AuditEvidence:
    """The evidence against the reference of one model on one runtime.

    `mismatch` proves the reference wrong, and stays valid
    in later periods; `is_answered`: the work made with that reference was dropped, and its renewal has started.
    """

    def __init__(self, state: StateStore, identity: str, period_s: float | None) -> None:
        """Args:
        identity: Of the model and the runtime; evidence against another one does not count.
        period_s: Seconds between two audited frames: how many of them ten years have. None: no frame is audited.
        """
        self._state = state
        self._identity = identity
        self.detector = NoiseDetector(max(2.0, _FALSE_ALARM_S / period_s) if period_s is not None else math.inf)
        self.audited = 0
        self.mismatch: Mismatch | None = None
        self.is_answered = False
        state.read("audit", self._restore)

    def add(self, mismatch: Mismatch) -> None:
        """Count a frame; the one that proves the reference wrong becomes the mismatch."""
        self.audited += 1
        self.detector.update(mismatch.noise)
        if self.detector.drift_detected:
            self.mismatch = mismatch
        self._write()

    def locate(self, tensor: str) -> None:
        """Keep which tensor of the mismatch differs first; empty: it could not be seen."""
        if self.mismatch is not None:
            self.mismatch = replace(self.mismatch, tensor=tensor)
            self._write()

    def answer(self) -> None:
        """Keep that the mismatch was answered."""
        self.is_answered = True
        self._write()

    def _write(self) -> None:
        detector = json.dumps(self.detector.state())
        mismatch = json.dumps(asdict(self.mismatch)) if self.mismatch is not None else None
        self._state.write("audit", [(self._identity, self.audited, detector, mismatch, int(self.is_answered))])

    def _restore(self, rows: Sequence[Row]) -> bool:
        ((identity, audited, detector, mismatch, answered),) = rows
        if identity != self._identity:
            return True
        audited = count(audited)
        if mismatch is not None:
            self.mismatch, self.is_answered = Mismatch(**parse_state(mismatch)), bool(answered)
        else:
            self.detector.restore(parse_state(detector))
        self.audited = audited
        return True
