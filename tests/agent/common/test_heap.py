"""The heap that a job took goes back to the board, once after each job."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from job_bench import JobDeskBench

from agent.common.heap import release_free_memory
from agent.control import upkeep

ARENAS = """
import ctypes, sys, threading
from agent.common.heap import limit_malloc_arenas
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
if sys.argv[1] == "shared":
    limit_malloc_arenas()
together = threading.Barrier(8)
def take():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_info(0, ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w")))
libc.fflush(None)
"""
COUNT, BYTES = 1000, 100_000  # too small for pages of their own


def arenas(way: str) -> int:
    command = [sys.executable, "-c", ARENAS, way]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.count("<heap nr=")


def test_threads_share_what_they_take_memory_from() -> None:
    assert arenas("each its own") >= 8
    assert arenas("shared") == 2


def test_memory_freed_below_kept_memory_goes_back() -> None:
    process = psutil.Process()
    filled = [bytes([number % 256]) * BYTES for number in range(COUNT)]
    kept = filled[:: -COUNT // 10]  # the last one among them
    filled.clear()
    before_bytes = process.memory_info().rss
    release_free_memory()
    assert before_bytes - process.memory_info().rss > COUNT * BYTES / 2
    assert len(kept) == 10


def test_memory_goes_back_once_after_each_job(job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    monkeypatch.setattr(upkeep, "release_free_memory", lambda: given_back.append(job_desk.service.serving.id))
    job_desk.executor.tick({"camera": job_desk.state})  # what the start took
    job_desk.recalibrate()
    for _ in range(3):
        job_desk.executor.tick({"camera": job_desk.state})
    (_, after) = given_back
    assert after == job_desk.other.id
