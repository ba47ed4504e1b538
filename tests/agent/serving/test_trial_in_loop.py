"""Candidates on trial in the loop: rehearsals, engines that hang, and answers of the previous engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from brokers import eventually
from loop_bench import IMAGE, LIMIT_S, RECALL, Bench, NamedEngine, PlainTask, breaks_at
from turned_clock import TurnedClock

from agent.camera.capture import Frame
from agent.serving.trial import REHEARSAL_S
from agent.vision.task import ServedFrame
from agent.vision.tasks.raw import RawOutputs

DEADLINE_S = 2.0


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """An engine hangs until this is set, as it is at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def previous(bench: Bench, engine: str = "new") -> Any:
    """Return the previous engine's prediction for a frame that this engine has answered."""
    served = ServedFrame(Frame(99, 99.0, 0, IMAGE), engine, RawOutputs({}), 0, 0.0)
    return bench.loop.previous_prediction(served, PlainTask())


def hangs_at(number: int, event: threading.Event) -> Callable[[int], None]:
    def answers(count: int) -> None:
        if count == number:
            event.wait(LIMIT_S)

    return answers


def test_the_previous_engine_predicts_beside_a_candidate_as_long_as_the_trial_lasts() -> None:
    bench = Bench(NamedEngine("old"))
    assert previous(bench, "old") is None
    bench.rehearse(NamedEngine("new"))
    bench.feed(1)
    assert previous(bench) == "old"
    assert previous(bench, "old") is None  # of a frame from before the trial
    assert bench.loop.commit()
    assert previous(bench) is None  # it may be closed at any moment
    bench.feed(1)
    assert previous(bench) is None
    bench.end()


@pytest.mark.parametrize("reason", ["failed", "recalled"])
def test_the_previous_engine_serves_again_after_its_answer_to_another_thread(
    released: threading.Event, reason: str
) -> None:
    """The engine itself fails if two threads use it, or if it is closed meanwhile."""
    asked, failing = threading.Event(), threading.Event()

    def answers_late(count: int) -> None:
        if count == 1:  # the first frame was the candidate's rehearsal
            asked.set()
            assert released.wait(LIMIT_S)

    def breaks(count: int) -> None:
        if count == 2:
            failing.set()
            raise RuntimeError("the engine broke")

    old = NamedEngine("old", answers_late)
    bench = Bench(old)
    bench.rehearse(NamedEngine("new", breaks))
    bench.feed(1)
    found: list[Any] = []
    beside = threading.Thread(target=lambda: found.append(previous(bench)))
    beside.start()
    assert asked.wait(LIMIT_S)
    if reason == "recalled":
        assert bench.loop.roll_back(RECALL)
    bench.put()
    assert reason == "recalled" or failing.wait(LIMIT_S)
    bench.slot.close()
    bench.loop.join(0.2)  # in which a loop that does not wait would use the engine
    assert len(bench.served) == 2
    released.set()
    beside.join(LIMIT_S)
    bench.loop.join(LIMIT_S)
    assert bench.loop.error is None
    assert found == ["old"]
    assert bench.served[2] == (2, "old", "old")
    assert old.closed.is_set()


def test_a_candidate_that_fails_in_its_rehearsal_costs_no_frame() -> None:
    old, new = NamedEngine("old"), NamedEngine("new", breaks_at(0))
    bench = Bench(old)
    bench.rehearse(new)
    assert bench.feed(2) == ["old"] * 2
    assert bench.events == [("probation.error", (1.0, False))]
    assert new.closed.is_set()
    assert not bench.loop.is_stuck
    bench.end()
    assert len(bench.events) == 1


def test_a_rehearsal_takes_its_time_and_no_frame_waits_for_it(released: threading.Event) -> None:
    clock, new = TurnedClock(), NamedEngine("new", hangs_at(0, released))
    bench = Bench(NamedEngine("old"), clock)
    trial = bench.try_out(new, DEADLINE_S)
    assert bench.feed(5) == ["old"] * 5
    clock.turn(REHEARSAL_S - 1.0)
    assert bench.feed(5) == ["old"] * 5
    assert bench.events == []
    released.set()
    eventually(lambda: not trial.is_busy)
    assert bench.feed(3) == ["new"] * 3
    assert bench.events == [("live", (10.0, 0))]
    assert [number for number, _, _ in bench.served] == list(range(13))
    bench.end()


def assert_left_behind(bench: Bench, new: NamedEngine, released: threading.Event) -> None:
    """The thread of a candidate that hangs closes its engine itself, once it comes back."""
    assert bench.loop.is_stuck
    assert not new.closed.is_set()
    released.set()
    assert new.closed.wait(LIMIT_S)
    eventually(lambda: not bench.loop.is_stuck)


@pytest.mark.parametrize("reason", ["probation.hang", "probation.recalled"])
def test_a_rehearsal_that_lasts_too_long_or_is_recalled_is_left_behind(released: threading.Event, reason: str) -> None:
    clock, new = TurnedClock(), NamedEngine("new", hangs_at(0, released))
    bench = Bench(NamedEngine("old"), clock)
    bench.try_out(new)
    assert bench.feed(1) == ["old"]
    if reason == "probation.hang":
        clock.turn(REHEARSAL_S)
    else:
        assert bench.loop.roll_back(RECALL)
    assert bench.feed(2) == ["old"] * 2
    assert bench.events == [(reason, (1.0, False))]
    assert_left_behind(bench, new, released)
    bench.end()


@pytest.mark.parametrize(("answers", "event"), [(None, "ended"), (breaks_at(0), "probation.error")])
def test_a_rehearsal_under_way_at_the_last_frame_is_reported(answers: Callable[[int], None] | None, event: str) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", *([answers] if answers else []))
    bench = Bench(old)
    bench.try_out(new)
    bench.feed(1)
    bench.end()
    assert [name for name, _ in bench.events] == [event]
    assert new.closed.is_set()
    assert old.closed.is_set()


def test_a_rehearsal_that_hangs_does_not_keep_the_loop_from_its_end(released: threading.Event) -> None:
    clock, old = TurnedClock(), NamedEngine("old")
    bench = Bench(old, clock)
    bench.try_out(NamedEngine("new", hangs_at(0, released)), DEADLINE_S)
    bench.feed(1)
    bench.slot.close()
    clock.until_waiting()
    clock.turn(DEADLINE_S)
    bench.end()
    assert bench.events == [("probation.hang", (None, False))]
    assert old.closed.is_set()
    assert bench.loop.is_stuck


def test_a_frame_that_a_candidate_hangs_on_is_answered_by_the_old_engine_at_the_deadline(
    released: threading.Event,
) -> None:
    clock, new = TurnedClock(), NamedEngine("new", hangs_at(2, released))
    bench = Bench(NamedEngine("old"), clock)
    bench.rehearse(new, DEADLINE_S)
    assert bench.feed(1) == ["new"]
    bench.put()
    clock.until_waiting()
    clock.turn(DEADLINE_S)
    eventually(lambda: len(bench.served) == 3)
    assert bench.served[2] == (2, "old", "old")
    assert bench.feed(2) == ["old", "old"]
    assert bench.events == [("live", (1.0, 0)), ("probation.hang", (2.0, True))]
    assert_left_behind(bench, new, released)
    bench.end()
