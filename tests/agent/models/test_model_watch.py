"""A model's file that changes is news once, and when it is whole."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from zoo import residual_net

from agent.models.external_data import external_names_apart
from agent.models.model_watch import ModelWatch, _files, content_of

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


@pytest.mark.parametrize("location", ["/proc/self/pagemap", "../elsewhere.bin", "/dev/zero"])
def test_no_file_elsewhere_is_read_for_a_models_tensors(tmp_path: Path, location: str) -> None:
    """Some of them never end."""
    folder = tmp_path / "models"
    folder.mkdir()
    (tmp_path / "elsewhere.bin").write_bytes(b"x")
    model = residual_net()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    onnx.save(named(onnx.load(folder / "model.onnx", load_external_data=False), location), folder / "model.onnx")
    assert external_names_apart(folder / "model.onnx") == [location]
    assert [file.name for file in _files(folder / "model.onnx")] == ["model.onnx"]
    assert content_of(folder / "model.onnx")


def named(model: ModelProto, location: str) -> ModelProto:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    return model


def test_a_pipe_in_the_place_of_the_model_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(OSError, match="not a regular file"):
        content_of(tmp_path / "model.onnx")


@pytest.mark.parametrize(("nodes", "names"), [(1, ["weights.bin"]), (2_000_000, [])])
def test_a_model_that_takes_far_more_memory_than_its_size_is_left_to_the_job(
    tmp_path: Path, nodes: int, names: list[str]
) -> None:
    """The process that reads it ends at its limit, and the daemon goes by the file itself."""
    path = tmp_path / "model.onnx"
    tensor = TensorProto(data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights.bin")
    path.write_bytes(ModelProto(graph=GraphProto(node=[NodeProto()] * nodes, initializer=[tensor])).SerializeToString())
    assert external_names_apart(path) == names
