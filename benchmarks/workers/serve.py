"""python serve.py SCRIPT: calls functions of a worker script for a parent, over stdin and stdout.

A request is (function name, arguments, repeats), an answer (value, CPU seconds per call, wall seconds per call, error).
Arrays travel as bytes: NumPy 1 does not read what NumPy 2 pickles.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
from typing import Any

import numpy as np


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    sys.path.insert(0, os.getcwd())  # the repository, for tared's own workers
    try:
        worker = importlib.import_module(sys.argv[1])
    except Exception as error:
        _answer(answers, (None, 0.0, 0.0, f"does not import: {type(error).__name__}: {error}"))
        return
    _answer(answers, (None, 0.0, 0.0, ""))
    while True:
        try:
            function, arguments, repeats = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        value, *rest = _timed(getattr(worker, function), [unpacked(argument) for argument in arguments], repeats)
        _answer(answers, (packed(value), *rest))


def packed(value: Any) -> Any:
    """An array as a tuple of plain things, anything else as it is."""
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    return value


def unpacked(value: Any) -> Any:
    """What `packed` was given; arrays are read-only."""
    if isinstance(value, tuple) and value[0] == "array":
        return np.frombuffer(value[3], value[1]).reshape(value[2])
    return value


def _timed(function: Any, arguments: list[Any], repeats: int) -> tuple[Any, float, float, str]:
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        for _ in range(repeats):
            value = function(*arguments)
    except Exception as error:
        return None, 0.0, 0.0, f"{type(error).__name__}: {error}"
    cpu_s, wall_s = time.process_time() - began_cpu, time.perf_counter() - began
    return value, cpu_s / repeats, wall_s / repeats, ""


def _answer(answers: Any, answer: tuple[Any, ...]) -> None:
    pickle.dump(answer, answers, protocol=5)
    answers.flush()


if __name__ == "__main__":
    main()
