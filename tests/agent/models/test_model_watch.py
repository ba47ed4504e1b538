"""A changed model is reported once, when its file is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from turned_clock import TurnedClock
from zoo import residual_net

from agent.models.external_data import external_names_apart
from agent.models.model_watch import POLL_S, ModelWatch, _files, content_of


class Watched:
    """A model's file, the reports of its watch, and the clock that the watch polls by."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.onnx"
        self.put(1.0)
        self.first = content_of(self.path)
        self.reports: list[str] = []
        self.clock = TurnedClock()
        self.watch = ModelWatch(self.path, self.first, self.reports.append, self.clock)

    def put(self, factor: float) -> None:
        """Write another model, in one rename."""
        model = residual_net()
        weights = model.graph.initializer[0]
        weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * np.float32(factor), weights.name))
        new = self.path.with_name("new.onnx")
        onnx.save(model, new)
        new.replace(self.path)

    def poll(self, polls: int = 4) -> list[str]:
        """Let so many polls pass, and return the reports since the last call."""
        for _ in range(polls):
            self.clock.until_waiting()
            self.clock.turn(POLL_S)
        self.clock.until_waiting()
        reports = self.reports.copy()
        self.reports.clear()
        return reports


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr("agent.models.model_watch._files", lambda path, *_: [path])  # else a process reads each content
    made = Watched(tmp_path)
    made.watch.start()
    assert made.poll() == []
    yield made
    made.watch.stop()


def test_new_content_is_reported_once(watched: Watched) -> None:
    watched.put(2.0)
    assert watched.poll() == [content_of(watched.path)] != [watched.first]
    assert watched.poll() == []


def test_a_file_that_was_only_touched_is_no_news(watched: Watched) -> None:
    os.utime(watched.path)
    watched.put(1.0)
    assert watched.poll() == []


def test_a_return_to_the_served_content_is_reported_without_a_name(watched: Watched) -> None:
    watched.put(2.0)
    assert watched.poll() != [""]
    watched.put(1.0)
    assert watched.poll() == [""]


def test_a_file_that_is_gone_for_a_while_is_waited_for(watched: Watched) -> None:
    watched.path.unlink()
    assert watched.poll() == []
    watched.put(2.0)
    assert watched.poll() == [content_of(watched.path)]


def test_a_file_that_is_being_written_is_waited_for(watched: Watched) -> None:
    with watched.path.open("ab") as file:
        for _ in range(5):
            file.write(b"x")
            file.flush()
            assert watched.poll(1) == []
    assert watched.poll() == [content_of(watched.path)]


def test_tensors_in_a_file_beside_it_count(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = residual_net()
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    before, reports = content_of(path), list[str]()
    watch = ModelWatch(path, before, reports.append)
    for _ in range(4):
        watch._poll()
    assert reports == []
    content = bytearray((tmp_path / "weights.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "weights.bin").write_bytes(content)
    for _ in range(4):
        watch._poll()
    assert reports == [content_of(path)] != [before]


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
