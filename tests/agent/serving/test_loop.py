"""The frame path alone: engines tried out between frames, kept or taken back, and an end that loses nothing."""

from __future__ import annotations

import threading

import pytest
from loop_bench import IMAGE, LIMIT_S, RECALL, Bench, NamedEngine, PlainTask, breaks_at, until

from agent.camera.capture import Frame
from agent.serving.inference import FrameLoop, RoundRobinScheduler
from agent.serving.trial import Trial, TrialEvents
from agent.vision.task import ServedFrame
from engines.errors import EngineError


def test_a_candidate_answers_once_it_has_rehearsed_and_the_old_engine_is_closed_once_it_is_kept() -> None:
    old, new = NamedEngine("old"), NamedEngine("new")
    bench = Bench(old)
    assert bench.feed(2) == ["old"] * 2
    bench.rehearse(new)
    assert bench.served[2] == (2, "old", "old")
    assert not bench.loop.commit()
    assert bench.feed(2, skip=3) == ["new"] * 2
    assert bench.told == [("live", (6.0, 3))]
    assert not old.closed.is_set()
    assert not bench.loop.is_committing
    assert bench.loop.commit()
    assert bench.loop.is_committing
    assert bench.feed(1) == ["new"]
    assert not bench.loop.is_committing
    assert old.closed.is_set()
    assert not bench.loop.roll_back(RECALL)
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
    assert not bench.loop.commit()
    bench.end()
    assert bench.loop.error is None
    assert len(bench.told) == 1 + (frame > 0)


def test_a_loop_waits_for_frames_unless_it_works_or_hangs() -> None:
    turns, hung = RoundRobinScheduler([True]), threading.Event()
    (slot,) = turns.slots
    engine = NamedEngine("a")
    loop = FrameLoop(turns, "a", engine, [PlainTask(), PlainTask()], [lambda _: hung.wait()])
    loop.start()
    until(lambda: turns.is_waiting)
    slot.put(Frame(0, 0.0, 0, IMAGE))
    until(lambda: not turns.is_waiting)
    hung.set()
    until(lambda: turns.is_waiting)
    slot.close()
    loop.join(LIMIT_S)


def test_what_is_taken_back_answers_no_further_frame() -> None:
    old, new = NamedEngine("old"), NamedEngine("new")
    bench = Bench(old)
    assert not bench.loop.roll_back(RECALL)
    bench.rehearse(new)
    assert bench.feed(2) == ["new"] * 2
    assert bench.loop.roll_back(RECALL)
    assert not bench.loop.commit()
    assert bench.feed(2) == ["old"] * 2
    assert bench.told[-1] == ("probation.recalled", (3.0, False))
    assert new.closed.is_set()
    assert not old.closed.is_set()
    bench.end()


def test_an_engine_that_was_kept_has_none_to_fall_back_to() -> None:
    bench = Bench(NamedEngine("old"))
    bench.rehearse(NamedEngine("new", breaks_at(2)))
    bench.feed(1)
    assert bench.loop.commit()
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
    assert bench.loop.commit()
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
    assert bench.loop.roll_back(RECALL)
    bench.end()
    assert bench.told[1:] == [("probation.recalled", (None, False))]
    kept, before = NamedEngine("kept"), NamedEngine("before")
    bench = Bench(before)
    bench.rehearse(kept)
    bench.feed(1)
    assert bench.loop.commit()
    bench.end()
    assert len(bench.told) == 1
    assert kept.closed.is_set()
    assert before.closed.is_set()


def test_only_one_trial_is_on_at_a_time() -> None:
    bench, newer = Bench(NamedEngine("old")), NamedEngine("newer")
    bench.try_out(NamedEngine("new"))
    with pytest.raises(RuntimeError, match="another trial runs"):
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

    def keep(served: ServedFrame) -> None:
        ids.append((served.frame.id, served.engine_id))
        answered.release()

    turns = RoundRobinScheduler([False])
    (slot,) = turns.slots
    loop = FrameLoop(turns, "0", NamedEngine("0"), [PlainTask(), PlainTask()], [keep])
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
        loop.start_trial(trial)
        feed(1)
        until(lambda: not trial.is_busy)

    feed(3)
    for round_ in range(20):
        rehearse(f"bad {round_}", NamedEngine("bad", breaks_at(3)))
        feed(4)
        name = str(round_ + 1)
        rehearse(name, NamedEngine(name))
        feed(2)
        assert loop.commit()
        feed(2)
    slot.close()
    loop.join(LIMIT_S)
    assert [frame for frame, _ in ids] == list(range(number))
    assert slot.dropped.total() == 0
    assert told == ["live 0", "probation.error", "live 0"] * 20
    assert len({engine for _, engine in ids}) == 41
