"""The daemon as users start it, with an account of what its CPU time went to.

    python -m benchmarks.workers.accounted_daemon OUTPUT WARM FRAMES run -c config.yaml

From the WARM-th inference on and for FRAMES more; then OUTPUT gets CPU seconds by what they went to, as JSON, and the
daemon ends. The engine, OpenCV's reads and a task's two halves are timed by their thread's clock; FFmpeg's own
threads, those that there are more of after the first frame, count as decoding; all else counts to the thread that
spent it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2

from agent.vision.task import VisionTask
from engines.onnxruntime_backend import OnnxRuntimeEngine
from fleet.cli.main import main

_opened = cv2.VideoCapture
_TASKS = Path("/proc/self/task")
THREAD = "thread: "


def tasks() -> set[int]:
    """The threads of this process."""
    return set(map(int, os.listdir(_TASKS)))


class Account:
    """Adds up, by part and thread."""

    def __init__(self) -> None:
        self._spent_s: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.decoders = set[int]()  # FFmpeg's own threads
        self._lock = threading.Lock()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose CPU time in its thread is added to the part."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                with self._lock:
                    self._spent_s[part, threading.get_native_id()] += time.thread_time() - began_s

        return call

    def now(self) -> defaultdict[str, float]:
        """CPU seconds of this process by part, and beside them, named THREAD and so, of each thread as a whole."""
        with self._lock:
            spent = dict(self._spent_s)
        found: defaultdict[str, float] = defaultdict(float)
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        inside: defaultdict[int, float] = defaultdict(float)
        for (part, thread), seconds in spent.items():
            found[part] += seconds
            inside[thread] += seconds
        for task in tasks():
            try:
                total_s = int((_TASKS / str(task) / "schedstat").read_text().split()[0]) / 1e9
            except (FileNotFoundError, ProcessLookupError):  # it ended since it was listed
                continue
            if task in names:
                found[f"the rest of thread {names[task]}"] += total_s - inside[task]
                found[f"{THREAD}{names[task]}"] += total_s
            else:
                found["video decoding" if task in self.decoders else "threads of libraries"] += total_s
        return found


class Capture:
    """What `cv2.VideoCapture` is, with its reads accounted for."""

    def __init__(self, *arguments: Any) -> None:
        self._before = tasks()
        self._capture = _opened(*arguments)
        self._read = account.timed("video decoding", self._capture.read)
        self.grab = account.timed("video decoding", self._capture.grab)
        self.retrieve = account.timed("video decoding", self._capture.retrieve)

    def read(self, *arguments: Any) -> Any:
        answer = self._read(*arguments)
        if self._before:
            account.decoders |= tasks() - self._before
            self._before = set[int]()
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)


def account_until_end(output: Path, warm: int, frames: int) -> None:
    """Time what is to be told apart, and end the daemon once so many frames are told of."""
    engine: Any = OnnxRuntimeEngine
    task: Any = VisionTask
    engine.infer = account.timed("engine", engine.infer)
    task.preprocess = account.timed("preprocessing", task.preprocess)
    task.decode = account.timed("decoding the answer", task.decode)
    cv2.VideoCapture = Capture  # type: ignore[misc, assignment]  # it stands in for OpenCV's
    inferred = engine.infer
    count, before = 0, defaultdict[str, float](float)

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count, before
        count += 1
        if count == warm:
            before = account.now()
        elif count == warm + frames:
            spent = account.now()
            output.write_text(json.dumps({part: spent[part] - before[part] for part in spent}))
            os.kill(os.getpid(), signal.SIGTERM)
        return inferred(*arguments, **named)

    engine.infer = counted


account = Account()

if __name__ == "__main__":
    _, output, warm, frames, *arguments = sys.argv
    account_until_end(Path(output), int(warm), int(frames))
    sys.exit(main(arguments))
