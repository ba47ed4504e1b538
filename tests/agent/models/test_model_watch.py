"""A model's file that changes is news once, and when it is whole."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from zoo import residual_net

from agent.models.model_watch import ModelWatch, content_of

POLL_S = 0.02


class Watched:
    """A model's file, and what its watch has told."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.onnx"
        self.put(1.0)
        self.first = content_of(self.path)
        self.told: queue.Queue[str] = queue.Queue()
        self.polls: queue.Queue[None] = queue.Queue()
        self.watch = ModelWatch(self.path, self.first, self.told.put, POLL_S)
        poll = self.watch._poll

        def counted() -> None:
            poll()
            self.polls.put(None)

        self.watch._poll = counted  # type: ignore[method-assign]  # to know that a poll is over

    def put(self, factor: float) -> None:
        """Another model, in one rename."""
        model = residual_net()
        weights = model.graph.initializer[0]
        weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * np.float32(factor), weights.name))
        new = self.path.with_name("new.onnx")
        onnx.save(model, new)
        new.replace(self.path)

    def pass_by(self, polls: int = 6) -> None:
        """So many polls more."""
        while not self.polls.empty():
            self.polls.get()
        for _ in range(polls):
            self.polls.get(timeout=10.0)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    made.watch.start()
    made.pass_by()
    assert made.told.empty()
    yield made
    made.watch.stop()


def test_another_content_is_told_once(watched: Watched) -> None:
    watched.put(2.0)
    assert watched.told.get(timeout=10.0) == content_of(watched.path) != watched.first
    watched.pass_by()
    assert watched.told.empty()


def test_a_file_that_was_only_touched_is_no_news(watched: Watched) -> None:
    os.utime(watched.path)
    watched.put(1.0)
    watched.pass_by()
    assert watched.told.empty()


def test_what_is_served_again_is_told_by_no_name(watched: Watched) -> None:
    watched.put(2.0)
    assert watched.told.get(timeout=10.0) != ""
    watched.put(1.0)
    assert watched.told.get(timeout=10.0) == ""


def test_what_is_no_model_is_told_too(watched: Watched) -> None:
    watched.path.write_bytes(b"no model")
    assert watched.told.get(timeout=10.0) == content_of(watched.path)


def test_a_file_that_is_gone_for_a_while_is_waited_for(watched: Watched) -> None:
    watched.path.unlink()
    watched.pass_by()
    assert watched.told.empty()
    watched.put(2.0)
    assert watched.told.get(timeout=10.0) == content_of(watched.path)


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    """Look by poll, in this thread."""
    path = tmp_path / "model.onnx"
    onnx.save(residual_net(), path)
    told: list[str] = []
    watch = ModelWatch(path, content_of(path), told.append)
    for _ in range(3):
        watch._poll()
    with path.open("ab") as file:
        for _ in range(5):
            file.write(b"x")
            file.flush()
            watch._poll()
    assert told == []
    for _ in range(2):
        watch._poll()
    assert told == [content_of(path)]


def test_tensors_in_a_file_beside_it_count(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = residual_net()
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    before, told = content_of(path), list[str]()
    watch = ModelWatch(path, before, told.append)
    for _ in range(4):
        watch._poll()
    assert told == []
    content = bytearray((tmp_path / "weights.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "weights.bin").write_bytes(content)
    for _ in range(4):
        watch._poll()
    assert told == [content_of(path)] != [before]
