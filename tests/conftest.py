"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from numpy.typing import NDArray

import engines  # noqa: F401  # before anything imports ONNX Runtime, which would report elsewhere
from agent.common.console import ConsoleHandler

pytest_plugins = [
    "turned_clock",  # this first, and the next two after it: the others import them
    "brokers",
    "worlds",
    "bench",
    "databases",
    "job_bench",
    "job_worlds",
    "lab",
    "plan_bench",
    "trial_bench",
    "trt_world",
    "wrong_clock",
]


# Many tests share two cores: how long an example takes says nothing of it. Each run draws the same examples, so that
# only a change of the code can make a test fail; `make soak` draws others, with `--hypothesis-profile anew`.
hypothesis.settings.register_profile(
    "default suite",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default suite")
hypothesis.settings.register_profile("anew", derandomize=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real models and labelled images; absent on other machines, where its tests are skipped.

    TARED_SHARED names its parent, else it lies beside the repository. TARED_REQUIRE_SHARED=1 turns its
    absence into a failure.
    """
    shared = Path(os.environ.get("TARED_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    data = shared / "data"
    if not data.is_dir():
        message = f"no shared data at {data}; set TARED_SHARED"
        if os.environ.get("TARED_REQUIRE_SHARED") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return data


@pytest.fixture(scope="session")
def shared_vectors(shared_data: Path) -> dict[str, NDArray[Any]]:
    """The answers of the peers' calibrators on 38 histograms; see README.md beside the file."""
    with np.load(shared_data.parent / "vectors" / "thresholds.npz") as file:
        return {name: file[name] for name in file.files}


def pytest_configure() -> None:
    """A shell's background job ignores SIGINT, and so would the commands that tests interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Nothing of what is collected goes: to search it for circles, now or later, would cost seconds of a worker."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # of the tests that are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run first what takes minutes; at the end the workers share what is short."""
    place = {path: number for number, path in enumerate(_mixed(items))}
    items.sort(key=lambda item: (-_minutes(item), place[item.path]))
    items[:] = _dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _mixed(items: list[pytest.Item]) -> list[Path]:
    """Return the files; two others follow each that waits for processes: while these wait, those need the processor."""
    files = list(dict.fromkeys(item.path for item in items))
    marked = {item.path for item in items if item.get_closest_marker("slow")}
    slow = [path for path in files if path in marked or path.parent.name == "system"]
    others = [path for path in files if path not in slow]
    mixed = [path for each, *two in zip_longest(slow, others[::2], others[1::2]) for path in (each, *two)]
    return [path for path in mixed if path is not None]


def _minutes(item: pytest.Item) -> float:
    """The time limit of a test that has one of its own; 0 for any other."""
    timeout = item.get_closest_marker("timeout")
    return float(timeout.args[0]) / 60.0 if timeout is not None else 0.0


def _dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Deal the tests that take minutes to the workers in turn; each begins with its own, then follow its files.

    By `--dist worksteal` each worker starts with an equal part of the list. Were the longest tests all at its head, one
    worker would run them one after the other.
    """
    longest = [item for item in items if _minutes(item)]
    short, piles = items[len(longest) :], [longest[first::workers] for first in range(workers)]
    dealt: list[pytest.Item] = []
    for left, pile in zip(range(workers, 0, -1), piles, strict=True):
        room = (len(items) - len(dealt)) // left - len(pile)
        dealt += pile + short[:room]
        del short[:room]
    return dealt


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Undo the changes that a command, called in this process, has made to the log."""
    root = logging.getLogger()
    before = root.level, [each for each in root.handlers if isinstance(each, ConsoleHandler)]
    yield
    root.setLevel(before[0])
    for handler in [each for each in root.handlers if isinstance(each, ConsoleHandler) and each not in before[1]]:
        root.removeHandler(handler)
