"""Candidates on trial in the loop: rehearsals, engines that hang, and answers of the previous engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loop_bench import IMAGE, LIMIT_S, RECALL, Bench, NamedEngine, PlainTask, breaks_at, until

import agent.serving.trial as trial_module
from agent.camera.capture import Frame
from agent.serving.trial import REHEARSAL_S
from agent.vision.task import ServedFrame


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """What an engine hangs on, until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def served_by(engine: str) -> ServedFrame:
    return ServedFrame(Frame(99, 99.0, 0, IMAGE), engine, {}, 0, 0.0)


def test_while_a_candidate_is_on_trial_the_engine_before_says_what_it_would_have_answered() -> None:
    bench = Bench(NamedEngine("old"))
    assert bench.loop.previous_prediction(served_by("old"), PlainTask()) is None
    bench.rehearse(NamedEngine("new"))
    bench.feed(1)
    assert bench.loop.previous_prediction(served_by("new"), PlainTask()) == "old"
    assert bench.loop.previous_prediction(served_by("old"), PlainTask()) is None  # of a frame from before the trial
    assert bench.loop.commit()
    assert bench.loop.previous_prediction(served_by("new"), PlainTask()) is None  # it may be closed at any moment
    bench.feed(1)
    assert bench.loop.previous_prediction(served_by("new"), PlainTask()) is None
    bench.end()


def test_an_engine_that_is_asked_beside_is_not_closed_meanwhile_and_answers_the_frame_path_then(
    hung: threading.Event,
) -> None:
    asked = threading.Event()

    def slowly(count: int) -> None:
        if count == 1:  # the first frame was the candidate's rehearsal
            asked.set()
            assert hung.wait(LIMIT_S)

    old = NamedEngine("old", slowly)
    bench = Bench(old)
    bench.rehearse(NamedEngine("new", breaks_at(2)))
    bench.feed(1)
    told: list[Any] = []
    beside = threading.Thread(target=lambda: told.append(bench.loop.previous_prediction(served_by("new"), PlainTask())))
    beside.start()
    assert asked.wait(LIMIT_S)
    bench.slot.put(Frame(2, 2.0, 0, IMAGE))  # on which the candidate fails
    bench.slot.close()
    bench.loop.join(0.2)
    assert len(bench.served) == 2
    assert not old.closed.is_set()
    hung.set()
    beside.join(LIMIT_S)
    bench.loop.join(LIMIT_S)
    assert told == ["old"]
    assert bench.served[2] == (2, "old", "old")
    assert old.closed.is_set()


def test_a_candidate_that_is_recalled_while_the_one_before_is_asked_leaves_it_to_one_thread_at_a_time(
    hung: threading.Event,
) -> None:
    asked, alone = threading.Event(), list[bool]()

    def slowly(count: int) -> None:
        if asked.is_set():
            alone.append(hung.is_set())
        elif count == 1:
            asked.set()
            assert hung.wait(LIMIT_S)

    bench = Bench(NamedEngine("old", slowly))
    bench.rehearse(NamedEngine("new"))
    bench.feed(1)
    beside = threading.Thread(target=lambda: bench.loop.previous_prediction(served_by("new"), PlainTask()))
    beside.start()
    assert asked.wait(LIMIT_S)
    assert bench.loop.roll_back(RECALL)
    bench.slot.put(Frame(2, 2.0, 0, IMAGE))
    bench.slot.close()
    bench.loop.join(0.2)
    assert len(bench.served) == 2
    hung.set()
    beside.join(LIMIT_S)
    bench.loop.join(LIMIT_S)
    assert bench.served[2] == (2, "old", "old")
    assert alone == [True]


def test_a_candidate_that_fails_in_its_rehearsal_costs_no_frame() -> None:
    old, new = NamedEngine("old"), NamedEngine("new", breaks_at(0))
    bench = Bench(old)
    bench.rehearse(new)
    assert bench.feed(2) == ["old"] * 2
    assert bench.told == [("probation.error", (1.0, False))]
    assert new.closed.is_set()
    assert not bench.loop.is_stuck
    bench.end()
    assert len(bench.told) == 1


def hangs_at(number: int, event: threading.Event) -> Callable[[int], None]:
    def answers(count: int) -> None:
        if count == number:
            event.wait(LIMIT_S)

    return answers


def test_a_rehearsal_takes_its_time_and_no_frame_waits_for_it(hung: threading.Event) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", hangs_at(0, hung))
    bench = Bench(old)
    trial = bench.try_out(new, deadline_s=0.1)
    assert bench.feed(5) == ["old"] * 5
    assert not threading.Event().wait(0.2)  # longer than a frame may take
    assert bench.feed(5) == ["old"] * 5
    assert bench.told == []
    hung.set()
    until(lambda: not trial.is_busy)
    assert bench.feed(3) == ["new"] * 3
    assert bench.told == [("live", (10.0, 0))]
    assert [number for number, _, _ in bench.served] == list(range(13))
    bench.end()


def test_a_rehearsal_that_takes_longer_than_any_is_a_hang(
    hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REHEARSAL_S > 10.0
    monkeypatch.setattr(trial_module, "REHEARSAL_S", 0.0)
    old, new = NamedEngine("old"), NamedEngine("new", hangs_at(0, hung))
    bench = Bench(old)
    bench.try_out(new)
    assert bench.feed(3) == ["old"] * 3
    assert bench.told == [("probation.hang", (1.0, False))]
    assert bench.loop.is_stuck
    hung.set()
    assert new.closed.wait(LIMIT_S)
    bench.end()


def test_what_is_taken_back_while_it_rehearses_is_left_behind(hung: threading.Event) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", hangs_at(0, hung))
    bench = Bench(old)
    bench.try_out(new)
    assert bench.feed(1) == ["old"]
    assert bench.loop.roll_back(RECALL)
    assert bench.feed(2) == ["old"] * 2
    assert bench.told == [("probation.recalled", (1.0, False))]
    assert bench.loop.is_stuck
    assert not new.closed.is_set()
    hung.set()
    assert new.closed.wait(LIMIT_S)
    until(lambda: not bench.loop.is_stuck)
    bench.end()


@pytest.mark.parametrize(("answers", "told"), [(None, "ended"), (breaks_at(0), "probation.error")])
def test_a_rehearsal_that_frames_end_in_has_its_say(answers: Callable[[int], None] | None, told: str) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", *([answers] if answers else []))
    bench = Bench(old)
    bench.try_out(new)
    bench.feed(1)
    bench.end()
    assert [what for what, _ in bench.told] == [told]
    assert new.closed.is_set()
    assert old.closed.is_set()


def test_a_rehearsal_that_hangs_does_not_keep_the_loop_from_its_end(hung: threading.Event) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", hangs_at(0, hung))
    bench = Bench(old)
    bench.try_out(new, deadline_s=0.1)
    bench.feed(1)
    bench.end()
    assert bench.told == [("probation.hang", (None, False))]
    assert old.closed.is_set()
    assert bench.loop.is_stuck


def test_the_frame_a_candidate_hangs_on_is_answered_by_the_old_engine_within_the_deadline(
    hung: threading.Event,
) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", hangs_at(2, hung))
    bench = Bench(old)
    bench.rehearse(new, deadline_s=0.2)
    assert bench.feed(4) == ["new", "old", "old", "old"]
    assert bench.told == [("live", (1.0, 0)), ("probation.hang", (2.0, True))]
    assert bench.loop.is_stuck
    assert not new.closed.is_set()  # it is in the hands of a thread that may still use it
    hung.set()
    assert new.closed.wait(LIMIT_S)
    until(lambda: not bench.loop.is_stuck)
    bench.end()
