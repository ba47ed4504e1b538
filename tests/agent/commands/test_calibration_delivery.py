"""A merged calibration that comes to a board: checked before a job tries it, judged as any candidate."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import pytest
from brokers import eventually
from candidate_bench import backend, collected, frames, model, observed, request, run_child
from job_bench import JobDeskBench, ScriptedChild, job_desk, two_engines
from worlds import SPEC
from zoo import residual_net

from agent.commands.deliveries import FileReceiver, StagedCalibration, calibration_admission
from agent.commands.dispatcher import CommandProgress
from agent.common.errors import AgentError, CommandError
from agent.contract.commands import MODEL_CHUNK_BYTES, CalibrationArgs, CommandResult
from agent.contract.histograms import Facts, write_upload
from agent.jobs.child_process import JobOutcome
from agent.jobs.request import write_job
from agent.models.model import Model, calibrate, open_model
from agent.vision.spec import ModelSpec
from calibrate.histogram import AbsHistogram
from calibrate.plan import PrecisionPlan, Repairs
from engines.calibration import load_calibration
from engines.interface import Backend

__all__ = ["backend", "job_desk", "model", "two_engines"]  # fixtures


def merged_by_a_fleet(of: Model, histograms: dict[str, AbsHistogram], **changes: object) -> bytes:
    facts = Facts(
        model=of.sha256, observed=of.observed_id, method="max", frames=64, merged={"boards": 4, "excluded": 1}
    )
    return write_upload(facts.model_copy(update=changes), histograms)


@dataclass
class Board:
    """A delivered calibration is added to `tried`."""

    folder: Path
    model: Model
    tried: list[StagedCalibration] = field(default_factory=list)
    results: list[CommandResult] = field(default_factory=list)
    posted: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        admit = calibration_admission(lambda: self.model)
        self.delivery = FileReceiver(
            self.folder / "incoming", self.reserve_bytes, self.posted.put, admit, self.tried.append
        )

    def begin(self, content: bytes) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        args = CalibrationArgs(sha256=sha256, size=len(content))
        self.delivery.start(args, CommandProgress(f"c{len(self.results)}", self.results.append))
        return sha256

    def deliver(self, content: bytes) -> str:
        """The code of what is wrong with it; empty where a job may try it."""
        sha256 = self.begin(content)
        for number in range(-(-len(content) // MODEL_CHUNK_BYTES)):
            piece = content[number * MODEL_CHUNK_BYTES :][:MODEL_CHUNK_BYTES]
            self.delivery.receive(f"tared/v1/fleet/board/model/{sha256}/{number}", piece)
        eventually(self._has_ended)
        error = self.results[-1].error
        return error.code if error is not None else ""

    def _has_ended(self) -> bool:
        while not self.posted.empty():
            self.posted.get()()
        return bool(self.tried) or self.results[-1].final


@pytest.fixture
def board(tmp_path: Path, model: Model) -> Board:
    return Board(tmp_path, model)


def test_a_calibration_that_fits_goes_to_a_job(board: Board, backend: Backend) -> None:
    content = merged_by_a_fleet(board.model, observed(board.model, backend, frames(4)))
    assert board.deliver(content) == ""
    (staged,) = board.tried
    assert staged.path.read_bytes() == content
    assert staged.facts().merged == {"boards": 4, "excluded": 1}


def test_a_calibration_that_does_not_fit_is_refused_by_name(board: Board, backend: Backend) -> None:
    histograms = observed(board.model, backend, frames(4))
    sound = merged_by_a_fleet(board.model, histograms)
    for content, code in (
        (merged_by_a_fleet(board.model, histograms, model="ab" * 32), "calibration.model"),
        (merged_by_a_fleet(board.model, histograms, observed="ab" * 8), "calibration.model"),
        (merged_by_a_fleet(board.model, histograms, merged=None), "calibration.own"),
        (b"garbage", "histograms.unreadable"),
        (sound[:-10], "histograms.unreadable"),
        (merged_by_a_fleet(board.model, {}), "histograms.unreadable"),
    ):
        assert board.deliver(content) == code
    assert board.tried == []


def test_calibrations_come_singly_need_room_and_can_be_cancelled(board: Board, tmp_path: Path) -> None:
    board.begin(b"first")
    with pytest.raises(CommandError, match=r"command\.busy"):
        board.begin(b"second")
    assert board.delivery.end("the operator cancels it")
    assert board.results[-1].status == "FAILED"
    with pytest.raises(AgentError, match=r"command\.calibration: .* more than store\.reserve_bytes"):
        Board(tmp_path, board.model, reserve_bytes=2**60).begin(b"third")


def test_a_failed_transfer_of_a_calibration_names_the_calibration(board: Board) -> None:
    sha256 = board.begin(b"first")
    (board.folder / "incoming" / f"{sha256}.part").mkdir()
    board.delivery.receive(f"tared/v1/fleet/board/model/{sha256}/0", b"first")
    error = board.results[-1].error
    assert error is not None
    assert (error.code, error.message.partition(":")[0]) == ("command.calibration", "IsADirectoryError")


def test_the_child_takes_its_scales_and_says_of_how_many_boards(model: Model, backend: Backend, tmp_path: Path) -> None:
    here, elsewhere = frames(24), frames(24, 0.7)
    histograms = observed(model, backend, elsewhere)
    merged = tmp_path / "merged"
    merged.write_bytes(merged_by_a_fleet(model, histograms))
    own = collected(model, backend, here[:4], here[16:])
    write_job(tmp_path / "job", request(model, tmp_path, method="entropy"), own, merged)
    outcome = JobOutcome.from_message(run_child(tmp_path / "job")[-1])
    assert outcome.artefact is not None, outcome.error
    found = load_calibration(outcome.artefact / "calibration.json")
    expected = calibrate(model, histograms, "max", 64, "")
    assert (found.amax, found.method, found.frames) == (expected.amax, "max", 64)
    assert found.merged == {"boards": 4, "excluded": 1}


def test_a_job_has_it_before_another_delivery_can_take_its_place(job_desk: JobDeskBench, tmp_path: Path) -> None:
    path = tmp_path / "staged.part"
    path.write_bytes(b"merged")
    results: list[CommandResult] = []

    def staged(command: str) -> StagedCalibration:
        return StagedCalibration(path, job_desk.service.model, CommandProgress(command, results.append))

    job_desk.executor.try_calibration(staged("c1"))
    job_desk.executor.try_calibration(staged("c2"))
    assert results[-1].error is not None
    assert (results[-1].id, results[-1].error.code) == ("c2", "command.busy")
    for _ in range(3):
        job_desk.executor.tick({"camera": job_desk.state})
    assert (ScriptedChild.latest.directory / "merged.upload").read_bytes() == b"merged"
    path.unlink()
    ScriptedChild.latest.on_progress("BUILDING", 50)
    ScriptedChild.latest.on_progress("VALIDATING", 80)
    ScriptedChild.latest.ends_with(JobOutcome(artefact=job_desk.other.path))
    assert [each.status for each in results if each.id == "c1" and each.final] == ["SUCCEEDED"]
    (job,) = job_desk.journal.records()
    assert (job.trigger, job.request["op"]) == ("command", "calibration")


def test_repairs_that_change_what_tensors_hold_are_another_observation(tmp_path: Path) -> None:
    onnx.save(residual_net((1, 3, 8, 8)), tmp_path / "model.onnx")
    model = open_model(ModelSpec.model_validate({**SPEC, "path": tmp_path / "model.onnx"}))
    layer = next(node.name for node in model.master.graph.node if node.op_type == "Conv")
    divided = model.with_plan(PrecisionPlan(repairs=Repairs(divisors={layer: (1.0, 2.0, 4.0)})))
    left_float = model.with_plan(PrecisionPlan(floats={layer: "by hand"}))
    assert divided.observed_id != model.observed_id
    assert left_float.observed_id == model.observed_id
