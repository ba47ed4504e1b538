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
    time.sleep(3.0)
    posted.put(lambda: done.append("done"))  # a wait without end would end with it

posted, done, storm = MainThreadQueue(), [], threading.Event()
storm.set()
signal.signal(signal.SIGTERM, lambda *_: None)
for work in (compute, interrupt):
    threading.Thread(target=work, daemon=True).start()
longest_s = 0.0
while not done:
    began_s = time.monotonic()
    posted.run(0.01)
    longest_s = max(longest_s, time.monotonic() - began_s)
print(longest_s, flush=True)
os._exit(0)
"""


def test_they_are_run_in_their_order_and_what_they_put_as_well() -> None:
    posted, ran = MainThreadQueue(), list[int]()
    posted.put(lambda: (ran.append(1), posted.put(lambda: ran.append(3)))[0])
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
    ended = subprocess.run([sys.executable, "-c", SIGNALS], capture_output=True, text=True, timeout=60, check=True)
    assert float(ended.stdout) < 2.5
