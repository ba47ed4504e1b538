"""Costs that jobs keep: measured once for a model, a runtime and its groups, and never taken from a damaged file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from runtime_under_test import RUNTIME
from worlds import SPEC
from zoo import residual_net

import agent.planning.costs as costs
from agent.models.model import Model, open_model
from agent.planning.costs import GroupCosts, PlanBuilder
from agent.planning.kept_costs import KeptCosts
from agent.vision.spec import ModelSpec
from calibrate.plan import Repairs
from engines.calibration import Calibration
from engines.errors import EngineError
from engines.interface import BackendOptions, silent
from engines.quantise.costs import Costs, macs_costs
from engines.quantise.fusion import Grouping, fusion_groups
from engines.registry import open_backend
from engines.store.signing import sign

FRAMES = [np.zeros((1, 3, 8, 8), np.float32)]


class Board:
    """A board with a model, whose groups take half the time in INT8 and whose measurements are counted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        onnx.save(residual_net((1, 3, 8, 8)), folder / "model.onnx")
        self.folder = folder
        self.options = BackendOptions(1, folder / "cache")
        self.precision: dict[str, list[str]] = {}
        self.measured = 0
        self.spoil: Callable[[Costs], Costs] = lambda found: found
        self.warnings: list[str] = []
        monkeypatch.setattr(costs, "measure_costs", self._measure)

    def _measure(self, grouping: Grouping, *_: Any, **__: Any) -> Costs:
        self.measured += 1
        return self.spoil(replace(macs_costs(grouping), source="measured", noise=0.02, passes=1))

    @property
    def model(self) -> Model:
        path = self.folder / "model.onnx"
        return open_model(ModelSpec.model_validate({**SPEC, "path": path, "precision": self.precision}))

    def find(self) -> GroupCosts:
        """As a job does, in a process of its own."""
        model = self.model
        builder = PlanBuilder(model, Calibration(model.sha256, "max", 0, "", {}, {}), open_backend(RUNTIME))
        kept = KeptCosts(builder, FRAMES, self.options, self.warnings.append)
        grouping = fusion_groups(model.master, model.placement)
        return kept.find(grouping, Repairs(), silent, lambda _: True)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("cache/*"))


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    return Board(tmp_path, monkeypatch)


def test_costs_that_leave_doubt_are_used_once(board: Board) -> None:
    board.spoil = lambda found: replace(found, doubt="3 groups differ by less than the noise")
    assert [board.find().why for _ in range(2)] == ["", ""]
    assert (board.measured, board.files) == (2, [])


def test_a_runtime_that_fails_while_it_is_measured_costs_the_times_alone(board: Board) -> None:
    def fail(_: Costs) -> Costs:
        raise EngineError("engine.memory", "a GPU without memory", "room", "free some")

    board.spoil = fail
    assert board.find().why == "measuring failed: a GPU without memory"
    assert (len(board.warnings), board.files) == (1, [])


def test_a_file_in_the_place_of_another_does_not_count(board: Board) -> None:
    board.find()
    (first,) = board.files
    board.options = BackendOptions(2, board.options.cache)
    board.find()
    (second,) = set(board.files) - {first}
    second.write_bytes(first.read_bytes())
    board.find()
    assert (board.measured, len(board.warnings)) == (3, 1)


@pytest.mark.parametrize("values", [[1.0], [float("nan")] * 9, [-1.0] * 9])
def test_times_that_are_none_are_measured_again(board: Board, values: list[float]) -> None:
    board.find()
    (file,) = board.files
    known = {**json.loads(file.read_bytes().partition(b"\n")[2]), "int8_ms": values}
    content = json.dumps(known).encode()
    file.write_bytes(sign(b"", f"layer costs {file.stem}", content).encode() + b"\n" + content)
    board.find()
    assert board.measured == 2


def test_other_threads_rules_and_models_have_costs_of_their_own(board: Board) -> None:
    board.find()
    board.options = BackendOptions(2, board.options.cache)
    board.find()
    board.precision = {"keep_float": ["Gemm"]}
    board.find()
    onnx.save(residual_net((1, 3, 16, 16)), board.folder / "model.onnx")
    assert not board.find().kept
    assert (board.measured, len(board.files)) == (4, 4)
    assert board.find().kept


def changed(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize("spoil", [changed, lambda content: content[:100], lambda _: b"", lambda _: b"\xff{}"])
def test_a_damaged_file_is_reported_and_replaced(board: Board, spoil: Callable[[bytes], bytes]) -> None:
    board.find()
    (file,) = board.files
    whole = file.read_bytes()
    file.write_bytes(spoil(whole))
    assert not board.find().kept
    assert (board.measured, len(board.warnings)) == (2, 1)
    assert file.name in board.warnings[0]
    assert file.read_bytes() == whole
    assert board.find().kept


def test_a_file_of_another_key_does_not_count(board: Board) -> None:
    board.find()
    board.options = BackendOptions(1, board.options.cache, b"k" * 32)
    assert [board.find().kept, board.find().kept] == [False, True]
    assert len(board.warnings) == 1


def test_where_the_disk_refuses_the_next_job_measures_again(board: Board) -> None:
    (board.folder / "cache").write_text("in the way")
    board.options = BackendOptions(1, board.folder / "cache")
    assert [board.find().kept, board.find().kept] == [False, False]
    assert (board.measured, board.warnings) == (2, [])
