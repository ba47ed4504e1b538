"""Is the reference right? Planted faults are found and named, and what its arithmetic explains raises no alarm."""

from __future__ import annotations

import copy
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from brokers import eventually
from kept import kept_in, spoil
from numpy.typing import NDArray
from observer_bench import MANY, Bench, Faulty
from onnx import numpy_helper
from turned_clock import TurnedClock

from agent.models.model import Model
from agent.monitoring.audit import (
    AuditedFrame,
    AuditEvidence,
    FrameAuditor,
    Mismatch,
    ReferenceAudit,
    _difference,
)
from agent.monitoring.observer import ObserverThread
from agent.state.store import StateStore
from calibrate.errors import CalibrationError
from calibrate.statistics.evidence import NoiseDetector
from engines.graph.rounding import round_products, rounded, smooth_outputs
from engines.interface import Array, Observation
from engines.onnxruntime_backend import OnnxRuntimeObserver
from engines.registry import open_backend

TF32 = 11
YEARS = 1e6  # frames
Rows = NDArray[np.float32]
Spoil = Callable[[int, Mapping[str, Rows]], Mapping[str, Rows]]


class Tf32(Faulty):
    """A reference of another runtime: products of eleven bits, and what `spoil` makes of the outputs of each run."""

    product_bits = TF32

    def __init__(self, model: Model, spoil: Spoil = lambda _, outputs: outputs, graph: onnx.ModelProto | None = None):
        graph = round_products(graph or model.observed, TF32)
        super().__init__(OnnxRuntimeObserver(graph, model.placement.taps, 1, model.divisible), [])
        self._spoil = spoil
        self._runs = 0

    def observe(self, batch: Array) -> Observation:
        seen = super().observe(batch)
        return replace(seen, outputs=dict(self._spoiled(seen.outputs)))

    def infer(self, batch: Array) -> dict[str, Array]:
        rows = [super(Tf32, self).infer(image[np.newaxis]) for image in batch]  # the graph takes one image
        return dict(self._spoiled({name: np.concatenate([row[name] for row in rows]) for name in rows[0]}))

    def _spoiled(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        self._runs += 1
        return self._spoil(self._runs, outputs)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()


def frames(reference: Tf32, count: int, batch: bool = False) -> Iterator[AuditedFrame]:
    chance = np.random.default_rng(1)
    for number in range(count):
        tensor = chance.random((1, 3, 8, 8), np.float32)
        seen = reference.observe(tensor)
        in_batch = {name: rows[1:] for name, rows in reference.infer(np.concatenate([tensor, tensor])).items()}
        yield AuditedFrame("front", number, 1.0, tensor, seen.outputs, seen.histograms, in_batch if batch else {})


def with_a_wrong_kernel(model: Model, layer: int) -> onnx.ModelProto:
    """Half of the channels of one convolution compute nothing."""
    graph = onnx.ModelProto()
    graph.CopyFrom(model.observed)
    node = [node for node in graph.graph.node if node.op_type == "Conv"][layer]
    weight = next(tensor for tensor in graph.graph.initializer if tensor.name == node.input[1])
    values = numpy_helper.to_array(weight).copy()
    values[: len(values) // 2] = 0.0
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    return graph


def test_values_are_rounded_to_the_nearest_of_so_many_bits() -> None:
    values = np.random.default_rng(0).normal(0.0, 10.0, 1000).astype(np.float32)
    mantissa, exponent = np.frexp(values.astype(np.float64))
    np.testing.assert_array_equal(rounded(values, TF32), np.ldexp(np.rint(mantissa * 2**TF32), exponent - TF32))
    np.testing.assert_array_equal(rounded(values, 24), values)


def test_noise_that_the_arithmetic_explains_is_far_below_what_is_allowed(bench: Bench) -> None:
    auditor = FrameAuditor(bench.model, TF32)
    found = [auditor.audit(frame) for frame in frames(Tf32(bench.model), 8)]
    assert max(mismatch.noise for mismatch in found) < 0.2
    assert all(mismatch.sqnr_db > mismatch.allowed_db > 30.0 for mismatch in found)


def test_openvino_computes_what_onnx_runtime_does_until_a_kernel_is_wrong(bench: Bench) -> None:
    pytest.importorskip("openvino")
    backend, auditor = open_backend("openvino"), FrameAuditor(bench.model, TF32)
    (frame,) = frames(Tf32(bench.model), 1)
    for graph, is_wrong in ((bench.model.observed, False), (with_a_wrong_kernel(bench.model, 2), True)):
        with closing(backend.load(backend.build(bench.model.build_request(graph)).engine)) as engine:
            found = {name: rows.copy() for name, rows in engine.infer(frame.tensor).items()}
        assert (auditor.audit(replace(frame, outputs=found)).noise > 1.0) is is_wrong


@pytest.mark.parametrize("layer", [0, 2, -1])
def test_a_wrong_kernel_is_found_and_its_tensor_is_named(bench: Bench, layer: int) -> None:
    wrong = with_a_wrong_kernel(bench.model, layer)
    auditor, (frame,) = FrameAuditor(bench.model, TF32), frames(Tf32(bench.model, graph=wrong), 1)
    mismatch = auditor.audit(frame)
    assert (mismatch.noise > 10.0, mismatch.camera, mismatch.frame) == (True, "front", 0)
    graph, taps = wrong.graph, bench.model.placement.taps
    broken = [node for node in graph.node if node.op_type == "Conv"][layer].output[0]
    named = auditor.locate(frame)
    after = [name for node in graph.node for name in node.output]
    assert named == "" or after.index(named) >= after.index(broken), "no tensor before the fault is named"
    assert named != "" or layer == -1, taps


def test_a_fault_in_one_row_of_a_batch_is_found(bench: Bench) -> None:
    def second_row(_: int, outputs: Mapping[str, Rows]) -> Mapping[str, Rows]:
        return {name: np.concatenate([rows[:1], 1.2 * rows[1:]]) for name, rows in outputs.items()}

    auditor = FrameAuditor(bench.model, TF32)
    (frame,) = frames(Tf32(bench.model, second_row), 1, batch=True)
    assert auditor.audit(replace(frame, in_batch={})).noise < 0.2
    mismatch = auditor.audit(frame)
    assert (mismatch.is_in_batch, mismatch.noise > 10.0) == (True, True)


@pytest.mark.parametrize(
    ("spoilt", "most_frames"),
    [
        pytest.param(lambda _frame, _noise: 10.0**0.1, 500, id="1 dB beyond what is allowed"),
        pytest.param(lambda frame, noise: 1e3 if frame % 100 == 50 else noise, 500, id="one frame in a hundred"),
        pytest.param(lambda frame, noise: np.inf if frame % 7 == 0 else noise, 20, id="one shape of seven"),
    ],
)
def test_a_fault_is_proven_within_so_many_frames(spoilt: Callable[[int, float], float], most_frames: int) -> None:
    detector, chance = NoiseDetector(YEARS), np.random.default_rng(3)
    for frame in range(most_frames):
        detector.update(spoilt(frame, 0.1 * chance.f(10, 10)))
    assert detector.drift_detected


def test_allowed_noise_raises_no_alarm_in_years() -> None:
    detector, chance = NoiseDetector(YEARS), np.random.default_rng(4)
    for noise in 0.1 * chance.f(10, 10, 50_000):  # as of ten outputs
        detector.update(noise)
        assert not detector.drift_detected


def start(
    bench: Bench, spoil: Spoil, evidence: AuditEvidence, found: list[Mismatch], clock: TurnedClock
) -> ObserverThread:
    """An observer on a reference of another runtime, whose audits go by a clock."""

    def audit(product_bits: int) -> ReferenceAudit:
        return ReferenceAudit(FrameAuditor(bench.model, product_bits), 1e-9, evidence, found.append, clock)

    return bench.start(lambda _: Tf32(bench.model, spoil), open_checked=lambda _: bench.observer(), audit=audit)


def evidence(folder: Path | None, identity: str = "a", period_s: float | None = 300.0) -> AuditEvidence:
    return AuditEvidence(kept_in(folder) if folder else StateStore(None), identity, period_s)


def proven(folder: Path) -> AuditEvidence:
    """Two frames that have nothing to do with the right ones."""
    kept = evidence(folder)
    for number in range(20):
        if kept.mismatch is None:
            kept.add(Mismatch(math.inf, "out", -math.inf, 50.0, "front", number))
    return kept


def test_a_wrong_reference_is_reported_and_replaced(bench: Bench, tmp_path: Path) -> None:
    kept, found = evidence(tmp_path), list[Mismatch]()
    thread = start(bench, lambda _, outputs: {name: -rows for name, rows in outputs.items()}, kept, found, bench.clock)
    bench.feed(thread, lambda: bool(found))
    assert (found[0].allowed_db > 30.0, found[0].sqnr_db < 0.0) == (True, True)
    bench.feed(thread, lambda: not thread.is_opening and next(iter(thread.states().values())).spending.audited is None)
    assert bench.changes == [], "observing did not fail"
    again = evidence(tmp_path)
    assert (again.mismatch, again.audited) == (found[0], kept.audited)
    assert evidence(tmp_path, identity="another runtime").mismatch is None


def test_a_right_reference_is_audited_at_its_own_pace(bench: Bench, tmp_path: Path) -> None:
    kept, found = evidence(tmp_path), list[Mismatch]()
    thread = start(bench, lambda _, outputs: outputs, kept, found, TurnedClock())  # which stands still
    bench.feed(thread, lambda: kept.audited > 0)
    looks = itertools.count()
    bench.feed(thread, lambda: next(looks) > 200)
    audits = {each.name for each in threading.enumerate()} & {"audit"}
    assert (audits, found) == ({"audit"}, [])
    assert (evidence(tmp_path).audited, evidence(tmp_path).mismatch) == (1, None)
    (spending,) = {each.spending.audited for each in thread.states().values()}
    assert spending == 1


@pytest.mark.parametrize("period_s", [300.0, 600.0, None])
def test_a_mismatch_stands_whatever_the_period_is_by_now(tmp_path: Path, period_s: float | None) -> None:
    found = proven(tmp_path).mismatch
    assert found is not None
    again = evidence(tmp_path, period_s=period_s)
    assert (again.mismatch, again.is_answered) == (found, False)
    again.answer()
    assert evidence(tmp_path).is_answered


@pytest.mark.parametrize(("key", "value"), [("noise", "1"), ("output", 1), ("frame", -1), ("is_in_batch", None)])
def test_a_mismatch_that_is_damaged_proves_nothing(tmp_path: Path, key: str, value: object) -> None:
    mismatch = proven(tmp_path).mismatch
    assert mismatch is not None
    spoil(tmp_path, "UPDATE audit SET mismatch = ?", json.dumps({**asdict(mismatch), key: value}))
    state = StateStore(tmp_path)
    assert AuditEvidence(state, "a", 300.0).mismatch is None
    assert state.repairs == 1


class CannotLocate(FrameAuditor):
    """Lacks a descriptor for more than the comparison."""

    def locate(self, frame: AuditedFrame) -> str:
        raise OSError(str(frame.number))


def test_the_frame_that_proves_the_fault_is_reported_also_where_its_tensor_cannot_be_found(bench: Bench) -> None:
    found: list[Mismatch] = []
    clock = TurnedClock()
    audit = ReferenceAudit(CannotLocate(bench.model, TF32), 1e-9, evidence(None), found.append, clock)
    audit.start()
    frame, *_ = frames(Tf32(bench.model), 1)
    wrong = replace(frame, outputs={name: np.negative(rows) for name, rows in frame.outputs.items()})

    def is_due_or_over(ts: float) -> bool:
        return not audit.is_alive() or audit.is_due(ts)

    for number in itertools.count():
        clock.turn_until(partial(is_due_or_over, float(number)), step_s=1.0)
        if not audit.is_alive():
            break
        audit.offer(replace(wrong, number=number))
    (mismatch,) = found
    assert (mismatch.tensor, mismatch.noise > 10.0, mismatch.sqnr_db < 0.0) == ("", True, True)


def test_an_audit_that_is_stopped_ends_after_the_frame_in_hand(bench: Bench) -> None:
    begun, stopped = threading.Event(), threading.Event()

    class SlowAuditor(FrameAuditor):
        def audit(self, frame: AuditedFrame) -> Mismatch:
            begun.set()
            assert stopped.wait(MANY)
            return super().audit(frame)

    audit = ReferenceAudit(SlowAuditor(bench.model, TF32), 1e-9, evidence(None), lambda _: None)
    audit.start()
    assert audit.is_due(0.0)
    (frame,) = frames(Tf32(bench.model), 1)
    audit.offer(frame)
    assert begun.wait(MANY)
    assert not audit.is_due(1.0)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(audit.stop)
        eventually(lambda: audit._stopped)
        stopped.set()
        ended.result()
    assert not audit.is_alive()
    assert audit.evidence.audited == 0


def selecting(model: Model) -> Model:
    """Each of its outputs follows an operator that selects."""
    graph = onnx.ModelProto()
    graph.CopyFrom(model.observed)
    (output,) = graph.graph.output
    for node in graph.graph.node:
        for index, name in enumerate(node.output):
            node.output[index] = "before" if name == output.name else name
    graph.graph.node.append(onnx.helper.make_node("Round", ["before"], [output.name]))
    made = copy.copy(model)
    made.__dict__["observed"] = graph
    return made


def test_an_answer_that_rounding_flips_now_and_then_proves_nothing_and_many_do(bench: Bench) -> None:
    auditor = FrameAuditor(selecting(bench.model), TF32)
    (frame,) = frames(Tf32(bench.model), 1)
    right = auditor._run(auditor._graph, frame.tensor)
    (name, rows), *_ = right.items()
    flipped = {name: 9.0 * np.roll(np.eye(1, rows.size, int(rows.argmax()), np.float32), 1).reshape(rows.shape)}
    noises = [auditor.audit(replace(frame, outputs=outputs)).noise for outputs in (right, flipped)]
    assert noises[0] == 0.0
    assert noises[1] > 1.0
    rare, often = NoiseDetector(YEARS), NoiseDetector(YEARS)
    for number in range(20_000):
        rare.update(noises[number % 100 == 50])
        often.update(noises[number % 3 == 0])
    assert (rare.drift_detected, often.drift_detected) == (False, True)


def test_rounding_that_makes_values_that_are_not_finite_explains_any_noise() -> None:
    right, rounded_off = np.ones(3, np.float32), np.array([1.0, np.inf, 1.0], np.float32)
    assert _difference("out", right, rounded_off, rounded_off, is_in_batch=False).noise == 0.0
    assert _difference("out", right, rounded_off, right, is_in_batch=False).noise == math.inf


def test_a_detector_of_noise_restores_all_or_nothing() -> None:
    known, other = NoiseDetector(YEARS), NoiseDetector(YEARS)
    known.update(50.0)
    with pytest.raises(CalibrationError):
        other.restore({**known.state(), "gross": {}})
    assert other.e_value == 0.0


@pytest.mark.parametrize(("operator", "is_smooth"), [("Round", False), ("Greater", False), ("Shape", True)])
def test_outputs_after_a_decision_have_no_noise_and_a_shape_decides_nothing(
    bench: Bench, operator: str, is_smooth: bool
) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(bench.model.observed)
    last = model.graph.output[0].name
    inputs = [last, last] if operator == "Greater" else [last]
    make = onnx.helper.make_node
    model.graph.node.extend([make(operator, inputs, ["seen"]), make("Cast", ["seen"], ["after"], to=1)])
    model.graph.output.append(onnx.helper.make_tensor_value_info("after", onnx.TensorProto.FLOAT, None))
    assert ("after" in smooth_outputs(model)) is is_smooth
