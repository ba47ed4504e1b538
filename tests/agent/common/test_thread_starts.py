"""Threads that the system refuses, as Python says it: at their start, or without memory for their first call."""

from __future__ import annotations

import _thread
import errno
import threading
from collections.abc import Callable

import pytest

from agent.common.main_thread import start_thread, thread_refused


def test_a_thread_runs_once() -> None:
    ran = threading.Event()
    thread = threading.Thread(target=ran.set)
    start_thread(thread)
    thread.join(10.0)
    assert ran.is_set()
    with pytest.raises(RuntimeError, match="once"):
        start_thread(thread)


def test_a_refusal_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    ran = threading.Event()
    thread = threading.Thread(target=ran.set)
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        with pytest.raises(OSError, match="can't start new thread") as refusal:
            start_thread(thread)
    assert refusal.value.errno == errno.EAGAIN
    assert "part.thread: can't start new thread" in str(thread_refused("part.thread", refusal.value))
    start_thread(thread)  # once there is room
    thread.join(10.0)
    assert ran.is_set()


def test_one_that_never_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_function: Callable[[], None], _arguments: tuple[()]) -> int:
        return 1  # as the system does: it has begun, and has no memory for its first call

    monkeypatch.setattr(_thread, "start_new_thread", lose)
    monkeypatch.setattr("agent.common.main_thread._BEGINS_S", 0.01)
    with pytest.raises(OSError, match="memory") as refusal:
        start_thread(threading.Thread(target=lambda: None))
    assert refusal.value.errno == errno.ENOMEM
