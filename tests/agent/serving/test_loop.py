"""The frame path alone: engines tried out between frames, kept or taken back, and an end that loses nothing."""

from __future__ import annotations

import threading
from typing import cast

import pytest
from brokers import eventually
from loop_bench import IMAGE, LIMIT_S, RECALL, Bench, NamedEngine, PlainTask, breaks_at

from agent.camera.capture import Frame
from agent.serving.inference import FrameLoop, RoundRobinScheduler
from engines.errors import EngineError


def test_a_candidate_answers_once_it_has_rehearsed_and_the_old_engine_is_closed_once_it_is_kept() -> None:
    old, new = NamedEngine("old"), NamedEngine("new")
    bench = Bench(old)
    assert bench.feed(2) == ["old"] * 2
    bench.rehearse(new)
    assert bench.served[2] == (2, "old", "old")
    assert not bench.loop.commit()
    assert bench.feed(2, skip=3) == ["new"] * 2
    assert bench.events == [("live", (6.0, 3))]
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
    assert len(bench.events) == 1


@pytest.mark.parametrize("error", [RuntimeError("broke"), EngineError("engine.failed", "a", "b", "c"), MemoryError()])
@pytest.mark.parametrize("frame", [0, 2])
def test_the_frame_a_candidate_fails_on_is_answered_by_the_old_engine(frame: int, error: Exception) -> None:
    old, new = NamedEngine("old"), NamedEngine("new", breaks_at(1 + frame, error))
    bench = Bench(old)
    bench.rehearse(new)
    assert bench.feed(4) == ["new"] * frame + ["old"] * (4 - frame)
    assert [number for number, _, _ in bench.served] == list(range(5))
    assert bench.events[-1] == ("probation.error", (1.0 + frame, True))
    assert [name for name, _ in bench.events[:-1]] == ["live"] * (frame > 0)
    assert new.closed.is_set()
    assert not bench.loop.commit()
    bench.end()
    assert bench.loop.error is None
    assert len(bench.events) == 1 + (frame > 0)


def test_a_loop_waits_for_frames_unless_it_works_or_hangs() -> None:
    turns, hung = RoundRobinScheduler([True]), threading.Event()
    (slot,) = turns.slots
    engine = NamedEngine("a")
    loop = FrameLoop(turns, "a", engine, [PlainTask(), PlainTask()], [lambda _: cast(None, hung.wait())])
    loop.start()
    eventually(lambda: turns.is_waiting)
    slot.put(Frame(0, 0.0, 0, IMAGE))
    eventually(lambda: not turns.is_waiting)
    hung.set()
    eventually(lambda: turns.is_waiting)
    slot.close()
    loop.join(LIMIT_S)


def test_a_recalled_candidate_answers_no_further_frame() -> None:
    old, new = NamedEngine("old"), NamedEngine("new")
    bench = Bench(old)
    assert not bench.loop.roll_back(RECALL)
    bench.rehearse(new)
    assert bench.feed(2) == ["new"] * 2
    assert bench.loop.roll_back(RECALL)
    assert not bench.loop.commit()
    assert bench.feed(2) == ["old"] * 2
    assert bench.events[-1] == ("probation.recalled", (3.0, False))
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


def test_a_candidate_that_fails_on_a_frame_during_which_it_was_kept_is_not_withdrawn() -> None:
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
    assert [name for name, _ in bench.events] == ["live"]


def test_a_trial_that_no_frame_follows_is_reported_at_the_end() -> None:
    old, new, late = NamedEngine("old"), NamedEngine("new"), NamedEngine("late")
    bench = Bench(old)
    bench.try_out(new)
    bench.end()
    bench.try_out(late)
    assert bench.events == [("ended", None)] * 2
    assert all(engine.closed.is_set() for engine in (old, new, late))


def test_a_commit_or_a_recall_after_the_last_frame_is_done_at_the_end() -> None:
    bench = Bench(NamedEngine("old"))
    bench.rehearse(NamedEngine("new"))
    bench.feed(1)
    assert bench.loop.roll_back(RECALL)
    bench.end()
    assert bench.events[1:] == [("probation.recalled", (None, False))]
    kept, before = NamedEngine("kept"), NamedEngine("before")
    bench = Bench(before)
    bench.rehearse(kept)
    bench.feed(1)
    assert bench.loop.commit()
    bench.end()
    assert len(bench.events) == 1
    assert kept.closed.is_set()
    assert before.closed.is_set()


def test_swaps_and_withdrawals_lose_no_frame() -> None:
    bench = Bench(NamedEngine("0"))
    for number in range(1, 6):
        bench.rehearse(NamedEngine("bad", breaks_at(3)))
        assert bench.feed(4) == ["bad"] * 2 + [str(number - 1)] * 2
        bench.rehearse(NamedEngine(str(number)))
        bench.feed(2)
        assert bench.loop.commit()
        assert bench.feed(2) == [str(number)] * 2
    bench.end()
    assert [frame for frame, _, _ in bench.served] == list(range(5 * 10))
    assert not bench.slot.dropped
    assert [name for name, _ in bench.events] == ["live", "probation.error", "live"] * 5


def test_only_one_trial_is_on_at_a_time() -> None:
    bench, newer = Bench(NamedEngine("old")), NamedEngine("newer")
    bench.try_out(NamedEngine("new"))
    with pytest.raises(RuntimeError, match="another trial runs"):
        bench.try_out(newer)
    assert newer.closed.is_set()
    bench.end()
