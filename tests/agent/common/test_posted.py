"""Functions for the main thread, and signals that come while it waits for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agent.common.main_thread import MainThreadQueue

SIGNALS = """
import os, signal, sys, threading, time
from agent.common.main_thread import MainThreadQueue

def compute():
    while storm.is_set():
        sum(range(20_000))  # holds the interpreter's lock, as the frame path does: a signal is handled late

def interrupt():
    for _ in range(100):
        time.sleep(0.013)
        os.kill(os.getpid(), signal.SIGTERM)
    storm.clear()

posted, storm = MainThreadQueue(), threading.Event()
storm.set()
signal.signal(signal.SIGTERM, lambda *_: None)
for work in (compute, interrupt):
    threading.Thread(target=work, daemon=True).start()
while storm.is_set():
    posted.run(0.01)
os._exit(0)
"""


def test_functions_run_in_their_order_with_those_that_they_queue() -> None:
    posted, ran = MainThreadQueue(), list[int]()

    def first() -> None:
        ran.append(1)
        posted.put(lambda: ran.append(3))

    posted.put(first)
    posted.put(lambda: ran.append(2))
    posted.run(0.0)
    assert ran == [1, 2, 3]


def test_an_exception_is_raised_and_the_other_functions_stay() -> None:
    posted, ran = MainThreadQueue(), list[int]()
    posted.put(lambda: [][0])
    posted.put(lambda: ran.append(1))
    with pytest.raises(IndexError):
        posted.run(0.0)
    posted.run(0.0)
    assert ran == [1]


def test_no_signal_makes_a_wait_endless() -> None:
    """Each of a hundred comes as a wait of ten milliseconds ends; one that never ended was how Ctrl-C could be lost."""
    subprocess.run([sys.executable, "-c", SIGNALS], timeout=120, check=True)
