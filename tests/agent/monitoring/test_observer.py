"""The observer thread when its reference engine takes long, fails, or is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from observer_bench import FAULT, FULL, MANY, Bench, Faulty
from turned_clock import TurnedClock
from worlds import SPEC

import agent.monitoring.observer as observer_module
from agent.camera.capture import Frame
from agent.collection.selection import FrameSelector, LumaGrid
from agent.common.schema import validate
from agent.config import Config
from agent.monitoring.observation_budget import ObservationBudget
from agent.monitoring.observer import PREPARING, ObserverThread
from agent.vision.task import ServedFrame
from agent.vision.tasks.raw import RawOutputs
from calibrate.errors import TaredError
from engines.errors import EngineError
from engines.interface import Array, Observation, Observer, Progress


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.end()


def test_an_outage_is_reported_once_at_its_beginning_and_once_at_its_end(bench: Bench) -> None:
    observer = bench.observer(FULL, FULL, FULL)
    thread = bench.start(lambda _: observer)
    bench.feed(thread, lambda: len(bench.changes) == 2)
    assert bench.changes == [FULL, None]
    assert thread.states()["camera"].outage == ""
    assert thread.error is None
    assert sum(thread.collection.counts) >= observer_module._WELL_AFTER


def test_an_observer_that_fails_now_and_then_fills_no_log(bench: Bench) -> None:
    observer = bench.observer(*[FULL, None] * 20)
    thread = bench.start(lambda _: observer)
    bench.feed(thread, lambda: not observer.faults)
    assert bench.changes == [FULL]
    bench.feed(thread, lambda: len(bench.changes) == 2)
    assert bench.changes == [FULL, None]


def test_a_fault_that_takes_its_time_is_billed_without_the_pause_after_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still but for a minute in every fault, and an hour in every report."""
    monkeypatch.setattr(observer_module, "_OBSERVING_S", (0.0, 0.0))
    clock, bills = TurnedClock(), list[tuple[float, bool]]()
    monkeypatch.setattr(ObservationBudget, "spend", lambda _, spent_s, failed: bills.append((spent_s, failed)))

    class Slow(Faulty):
        def observe(self, batch: Array) -> Observation:
            clock.turn(60.0 if self.faults else 0.0)
            return super().observe(batch)

    class Reports(list[TaredError | None]):
        def append(self, error: TaredError | None) -> None:
            clock.turn(3600.0)
            super().append(error)

    bench.changes = Reports()
    slow = Slow(bench.observer(), [FULL] * 5)
    thread = bench.start(lambda _: slow, clock)
    bench.feed(thread, lambda: len(bench.changes) == 2)
    assert bills[:7] == [*[(60.0, True)] * 5, *[(0.0, False)] * 2]


def hidden_fault() -> EngineError:
    error = EngineError("observer.listener", "DeviceError while the taps were counted", "a histogram", "report it")
    error.__cause__ = FAULT
    return error


@pytest.mark.parametrize(
    "fault",
    [FAULT, EngineError("engine.run", "enqueue failed", "an inference", "restart"), hidden_fault(), KeyError("bug")],
    ids=["cuda.launch", "engine.run", "a fault behind another error", "a bug"],
)
def test_a_lost_gpu_and_a_bug_end_the_thread(bench: Bench, fault: Exception) -> None:
    observer = bench.observer(None, fault)
    thread = bench.start(lambda _: observer)
    bench.feed(thread, lambda: thread.error is not None)
    thread.join(MANY)
    assert thread.error is fault
    assert observer.closed.is_set()
    assert bench.changes == []


def test_frames_are_passed_over_until_the_reference_is_there(bench: Bench) -> None:
    gate, opened_in, seen = threading.Event(), list[threading.Thread](), list[float]()

    class Watched(Faulty):
        def observe(self, batch: Array) -> Observation:
            seen.append(float(batch.mean()))
            return super().observe(batch)

    def slow(_progress: Progress) -> Observer:
        opened_in.append(threading.current_thread())
        gate.wait(MANY)
        return Watched(bench.observer(), [])

    thread = bench.start(slow)
    assert thread.states()["camera"].outage == PREPARING
    for ts in range(100):
        thread.offer(ServedFrame(Frame(ts, float(ts), 0, np.zeros((8, 8, 3), np.uint8)), "", RawOutputs({}), 0, 0.0))
    gate.set()
    thread.wait_until_tried(MANY)
    assert thread.states()["camera"].outage == ""
    bench.feed(thread, lambda: len(seen) > 101)
    assert len(set(seen)) == 1, "none of the hundred dark frames was kept for later"
    assert opened_in == [thread]
    assert bench.changes == []


def test_a_reference_that_cannot_be_opened_is_tried_again(bench: Bench) -> None:
    mismatch = EngineError("observer.mismatch", "tensor 't' is 3.0 dB like ONNX Runtime's", "30 dB", "report it")
    attempts, again = [mismatch, mismatch], threading.Event()

    def opening(_progress: Progress) -> Observer:
        if attempts:
            raise attempts.pop()
        assert again.wait(MANY)
        return bench.observer()

    thread = bench.start(opening)
    thread.wait_until_tried(MANY)
    assert thread.states()["camera"].outage == "observer.mismatch"
    again.set()
    bench.feed(thread, lambda: thread.collection.counts[0] > 0)
    assert bench.changes == [mismatch, None]


def test_a_pause_ends_with_the_thread(bench: Bench) -> None:
    def never(_progress: Progress) -> Observer:
        raise FULL

    thread = bench.start(never)
    bench.clock.until_waiting()
    thread.stop()
    thread.join(MANY)
    assert not thread.is_alive()
    assert (thread.error, bench.changes) == (None, [FULL])


def test_a_gpu_that_is_lost_while_the_reference_is_opened_ends_the_thread(bench: Bench) -> None:
    def lost(_progress: Progress) -> Observer:
        raise FAULT

    thread = bench.start(lost)
    thread.join(MANY)
    assert thread.error is FAULT
    assert bench.changes == []


def test_the_default_budget_lets_a_day_of_calibrations_be_collected_in_time(bench: Bench) -> None:
    """30 frames a second that take 10 ms each, observations of 25 ms, and a scene in which nothing happens."""
    content = {"model": SPEC, "camera": {"source": "clip.avi"}, "recalibration": {"per_day": 2}}
    config = validate(Config, content, "test")
    budget = ObserverThread(lambda _: bench.observer(), bench.model.spec, config, bench.changes.append)._budget
    budget.set_pace(alert=True)
    needed, number = config.calibration.frames * 4 / 3, 0
    still = LumaGrid.from_image(np.full((8, 8, 3), 128, np.uint8))
    for _ in range(3):
        selection, began = FrameSelector(config.calibration.frames, config.calibration.within_s), number
        while selection.counts.taken < needed:
            number += 1
            budget.earn(0.01)
            if budget.due(number / 30):
                budget.spend(0.025)
                selection.consider(number / 30, still, ())
            assert (number - began) / 30 <= 1.02 * config.calibration.within_s
    assert budget.debt_s > 0.0


@pytest.mark.parametrize("wanted", [True, False])
def test_a_sheet_that_the_owner_does_not_want_any_more_goes_at_the_start(
    bench: Bench, tmp_path: Path, wanted: bool
) -> None:
    sheet = tmp_path / "selection.png"
    sheet.write_bytes(b"frames")
    content = {"model": SPEC, "camera": {"source": "clip.avi"}, "calibration": {"contact_sheet": wanted}}
    config = validate(Config, {**content, "state_dir": tmp_path}, "test")
    thread = ObserverThread(lambda _: bench.observer(), bench.model.spec, config, bench.changes.append)
    thread.start()
    assert thread.wait_until_tried(MANY)
    thread.stop()
    thread.join(MANY)
    assert sheet.exists() is wanted
