"""The frame path alone: engines tried out between frames, kept or taken back, and an end that loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import agent.trial as trial_module
from agent.capture import Frame, FrameSlot
from agent.errors import AgentError
from agent.findings import Served
from agent.loop import FrameLoop
from agent.trial import REHEARSAL_S, Trial, TrialEvents
from agent.vision import VisionTask
from engines.backend import Array, Engine, EngineError, TensorSpec

IMAGE = np.zeros((4, 4, 3), np.uint8)
LIMIT_S = 20.0
RECALL = AgentError("probation.recalled", "a test", "none", "none")


class NamedEngine:
    """Answers with its own name; `answers` may do something else first, for its nth frame: of one on trial, 0 is its
    rehearsal."""

    def __init__(self, name: str, answers: Callable[[int], None] = lambda _: None) -> None:
        self.name = name
        self.closed = threading.Event()
        self.inputs: list[TensorSpec] = []
        self.outputs: list[TensorSpec] = []
        self._answers = answers
        self._count = 0

    def infer(self, batch: Array) -> dict[str, Array]:
        assert not self.closed.is_set()
        self._answers(self._count)
        self._count += 1
        return {self.name: batch}

    def close(self) -> None:
        self.closed.set()


def breaks_at(number: int, error: Exception | None = None) -> Callable[[int], None]:
    def answers(count: int) -> None:
        if count == number:
            raise error or RuntimeError("the engine broke")

    return answers


class PlainTask(VisionTask):
    """No preprocessing; the prediction is the name of the engine's output."""

    def __init__(self) -> None:
        self.inferred_s = 0.0

    def infer(self, engine: Engine, image: NDArray[np.uint8]) -> Any:
        return next(iter(engine.infer(image))), None


class Bench:
    """A loop, its slot, what it served, and what trials told."""

    def __init__(self, engine: NamedEngine) -> None:
        self.slot = FrameSlot(keep_every=True)
        self.served: list[tuple[int, str, str]] = []
        self.told: list[tuple[str, Any]] = []
        self.loop = FrameLoop(self.slot, engine.name, engine, PlainTask(), [self._keep])
        self._next_id = 0
        self.loop.start()

    def _keep(self, served: Served) -> None:
        self.served.append((served.frame.id, served.engine_id, str(served.result)))

    def try_out(self, engine: NamedEngine, deadline_s: float = LIMIT_S) -> Trial:
        events = TrialEvents(
            lambda ts, skipped: self.told.append(("live", (ts, skipped))),
            lambda error, ts, asked: self.told.append((error.code, (ts, asked))),
            lambda: self.told.append(("ended", None)),
        )
        trial = Trial(engine.name, engine, PlainTask(), deadline_s, events)
        self.loop.try_out(trial)
        return trial

    def rehearse(self, engine: NamedEngine, deadline_s: float = LIMIT_S) -> Trial:
        """`try_out`, and one frame, which the engine before answers; the rehearsal is over then."""
        trial = self.try_out(engine, deadline_s)
        self.feed(1)
        until(lambda: not trial.busy)
        return trial

    def feed(self, count: int, skip: int = 0) -> list[str]:
        """So many frames, the first after a gap in their ids: who answered each."""
        self._next_id += skip
        first = len(self.served)
        for number in range(self._next_id, self._next_id + count):
            self.slot.put(Frame(number, float(number), 0, IMAGE))
        self._next_id += count
        until(lambda: len(self.served) == first + count or not self.loop.is_alive())
        assert all(engine_id == result for _, engine_id, result in self.served)
        return [engine_id for _, engine_id, _ in self.served[first:]]

    def end(self) -> None:
        self.slot.close()
        self.loop.join(LIMIT_S)
        assert not self.loop.is_alive()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """What an engine hangs on, until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_a_candidate_answers_once_it_has_rehearsed_and_the_old_engine_is_closed_once_it_is_kept() -> None:
    old, new = NamedEngine("old"), NamedEngine("new")
    bench = Bench(old)
    assert bench.feed(2) == ["old"] * 2
    bench.rehearse(new)
    assert bench.served[2] == (2, "old", "old")
    assert not bench.loop.keep()
    assert bench.feed(2, skip=3) == ["new"] * 2
    assert bench.told == [("live", (6.0, 3))]
    assert not old.closed.is_set()
    assert not bench.loop.keeping
    assert bench.loop.keep()
    assert bench.loop.keeping
    assert bench.feed(1) == ["new"]
    assert not bench.loop.keeping
    assert old.closed.is_set()
    assert not bench.loop.go_back(RECALL)
    bench.end()
    assert new.closed.is_set()
    assert len(bench.told) == 1


@pytest.mark.parametrize("error", [RuntimeError("broke"), EngineError("engine.failed", "a", "b", "c"), MemoryError()])
@pytest.mark.parametrize("frame", [0, 2])
def test_the_frame_a_candidate_fails_on_is_answered_by_the_old_engine(frame: int, error: Exception) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", breaks_at(1 + frame, error))
    bench = Bench(old)
    bench.rehearse(new)
    assert bench.feed(4) == ["new"] * frame + ["old"] * (4 - frame)
    assert [number for number, _, _ in bench.served] == list(range(5))
    assert bench.told[-1] == ("probation.error", (1.0 + frame, True))
    assert [what for what, _ in bench.told[:-1]] == ["live"] * (frame > 0)
    assert new.closed.is_set()
    assert not bench.loop.keep()
    bench.end()
    assert bench.loop.error is None
    assert len(bench.told) == 1 + (frame > 0)


def served_by(engine: str) -> Served:
    return Served(Frame(99, 99.0, 0, IMAGE), engine, {}, 0, 0.0)


def test_while_a_candidate_is_on_trial_the_engine_before_says_what_it_would_have_answered() -> None:
    bench = Bench(NamedEngine("old"))
    assert bench.loop.before(served_by("old"), PlainTask()) is None
    bench.rehearse(NamedEngine("new"))
    bench.feed(1)
    assert bench.loop.before(served_by("new"), PlainTask()) == "old"
    assert bench.loop.before(served_by("old"), PlainTask()) is None  # of a frame from before the trial
    assert bench.loop.keep()
    assert bench.loop.before(served_by("new"), PlainTask()) is None  # it may be closed at any moment
    bench.feed(1)
    assert bench.loop.before(served_by("new"), PlainTask()) is None
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
    beside = threading.Thread(target=lambda: told.append(bench.loop.before(served_by("new"), PlainTask())))
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


def test_a_candidate_that_fails_in_its_rehearsal_costs_no_frame() -> None:
    old, new = NamedEngine("old"), NamedEngine("new", breaks_at(0))
    bench = Bench(old)
    bench.rehearse(new)
    assert bench.feed(2) == ["old"] * 2
    assert bench.told == [("probation.error", (1.0, False))]
    assert new.closed.is_set()
    assert not bench.loop.stuck
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
    until(lambda: not trial.busy)
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
    assert bench.loop.stuck
    hung.set()
    assert new.closed.wait(LIMIT_S)
    bench.end()


def test_what_is_taken_back_while_it_rehearses_is_left_behind(hung: threading.Event) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", hangs_at(0, hung))
    bench = Bench(old)
    bench.try_out(new)
    assert bench.feed(1) == ["old"]
    assert bench.loop.go_back(RECALL)
    assert bench.feed(2) == ["old"] * 2
    assert bench.told == [("probation.recalled", (1.0, False))]
    assert bench.loop.stuck
    assert not new.closed.is_set()
    hung.set()
    assert new.closed.wait(LIMIT_S)
    until(lambda: not bench.loop.stuck)
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
    assert bench.loop.stuck


def test_the_frame_a_candidate_hangs_on_is_answered_by_the_old_engine_within_the_deadline(
    hung: threading.Event,
) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", hangs_at(2, hung))
    bench = Bench(old)
    bench.rehearse(new, deadline_s=0.2)
    assert bench.feed(4) == ["new", "old", "old", "old"]
    assert bench.told == [("live", (1.0, 0)), ("probation.hang", (2.0, True))]
    assert bench.loop.stuck
    assert not new.closed.is_set()  # it is in the hands of a thread that may still use it
    hung.set()
    assert new.closed.wait(LIMIT_S)
    until(lambda: not bench.loop.stuck)
    bench.end()


def test_a_loop_waits_for_frames_unless_it_works_or_hangs() -> None:
    slot, hung = FrameSlot(keep_every=True), threading.Event()
    engine = NamedEngine("a")
    loop = FrameLoop(slot, "a", engine, PlainTask(), [lambda _: hung.wait()])
    loop.start()
    until(lambda: slot.awaited)
    slot.put(Frame(0, 0.0, 0, IMAGE))
    until(lambda: not slot.awaited)
    hung.set()
    until(lambda: slot.awaited)
    slot.close()
    loop.join(LIMIT_S)


def test_what_is_taken_back_answers_no_further_frame() -> None:
    old, new = NamedEngine("old"), NamedEngine("new")
    bench = Bench(old)
    assert not bench.loop.go_back(RECALL)
    bench.rehearse(new)
    assert bench.feed(2) == ["new"] * 2
    assert bench.loop.go_back(RECALL)
    assert not bench.loop.keep()
    assert bench.feed(2) == ["old"] * 2
    assert bench.told[-1] == ("probation.recalled", (3.0, False))
    assert new.closed.is_set()
    assert not old.closed.is_set()
    bench.end()


def test_an_engine_that_was_kept_has_none_to_fall_back_to() -> None:
    bench = Bench(NamedEngine("old"))
    bench.rehearse(NamedEngine("new", breaks_at(2)))
    bench.feed(1)
    assert bench.loop.keep()
    bench.feed(1)
    bench.loop.join(LIMIT_S)
    assert isinstance(bench.loop.error, RuntimeError)


def test_one_that_fails_on_a_frame_during_which_it_was_kept_is_not_taken_back() -> None:
    """Else `current` would be an engine that does not serve."""
    in_hand, kept = threading.Event(), threading.Event()

    def fails_once_kept(count: int) -> None:
        if count == 2:
            in_hand.set()
            kept.wait(LIMIT_S)
            raise RuntimeError("the engine broke")

    bench = Bench(NamedEngine("old"))
    bench.rehearse(NamedEngine("new", fails_once_kept))
    bench.feed(1)
    bench.slot.put(Frame(2, 2.0, 0, IMAGE))
    assert in_hand.wait(LIMIT_S)
    assert bench.loop.keep()
    kept.set()
    bench.loop.join(LIMIT_S)
    assert isinstance(bench.loop.error, RuntimeError)
    assert [what for what, _ in bench.told] == ["live"]


def test_a_trial_that_no_frame_follows_is_told_of_at_the_end() -> None:
    old, new, late = NamedEngine("old"), NamedEngine("new"), NamedEngine("late")
    bench = Bench(old)
    bench.try_out(new)
    bench.end()
    bench.try_out(late)
    assert bench.told == [("ended", None)] * 2
    assert all(engine.closed.is_set() for engine in (old, new, late))


def test_what_was_asked_for_after_the_last_frame_is_done_at_the_end() -> None:
    bench = Bench(NamedEngine("old"))
    bench.rehearse(NamedEngine("new"))
    bench.feed(1)
    assert bench.loop.go_back(RECALL)
    bench.end()
    assert bench.told[1:] == [("probation.recalled", (None, False))]
    kept, before = NamedEngine("kept"), NamedEngine("before")
    bench = Bench(before)
    bench.rehearse(kept)
    bench.feed(1)
    assert bench.loop.keep()
    bench.end()
    assert len(bench.told) == 1
    assert kept.closed.is_set()
    assert before.closed.is_set()


def test_only_one_trial_is_on_at_a_time() -> None:
    bench, newer = Bench(NamedEngine("old")), NamedEngine("newer")
    bench.try_out(NamedEngine("new"))
    with pytest.raises(RuntimeError, match="another one is on"):
        bench.try_out(newer)
    assert newer.closed.is_set()
    bench.end()


def test_what_breaks_the_loop_is_kept_and_the_source_does_not_wait_for_it() -> None:
    bench = Bench(NamedEngine("old", breaks_at(0)))
    for number in range(3):
        bench.slot.put(Frame(number, float(number), 0, IMAGE))
    bench.loop.join(LIMIT_S)
    assert isinstance(bench.loop.error, RuntimeError)


def test_twenty_swaps_and_twenty_rollbacks_lose_no_frame() -> None:
    """A live camera's slot, which waits for nobody; a frame comes as soon as the one before is answered.

    What a change of engine took longer than a frame would lose the frames that came meanwhile: those would be missing
    among the ids, and counted by the slot.
    """
    answered = threading.Semaphore(0)
    ids: list[tuple[int, str]] = []

    def keep(served: Served) -> None:
        ids.append((served.frame.id, served.engine_id))
        answered.release()

    slot = FrameSlot(keep_every=False)
    loop = FrameLoop(slot, "0", NamedEngine("0"), PlainTask(), [keep])
    loop.start()
    told: list[str] = []
    events = TrialEvents(
        lambda _, skipped: told.append(f"live {skipped}"), lambda error, *_: told.append(error.code), lambda: None
    )
    number = 0

    def feed(count: int) -> None:
        nonlocal number
        for _ in range(count):
            slot.put(Frame(number, float(number), 0, IMAGE))
            number += 1
            assert answered.acquire(timeout=LIMIT_S)

    def rehearse(name: str, engine: NamedEngine) -> None:
        trial = Trial(name, engine, PlainTask(), LIMIT_S, events)
        loop.try_out(trial)
        feed(1)
        until(lambda: not trial.busy)

    feed(3)
    for round_ in range(20):
        rehearse(f"bad {round_}", NamedEngine("bad", breaks_at(3)))
        feed(4)
        name = str(round_ + 1)
        rehearse(name, NamedEngine(name))
        feed(2)
        assert loop.keep()
        feed(2)
    slot.close()
    loop.join(LIMIT_S)
    assert [frame for frame, _ in ids] == list(range(number))
    assert slot.dropped.total() == 0
    assert told == ["live 0", "probation.error", "live 0"] * 20
    assert len({engine for _, engine in ids}) == 41
