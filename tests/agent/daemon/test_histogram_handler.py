"""Uploads of a board's histograms: with the owner's permission only, and never those of other boards."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import cast

import pytest
from device import carry_out
from merge_bench import calibration_of, counted, frames_of, merged_calibration, service_with

from agent.common.errors import CommandError
from agent.config import PrivacyConfig
from agent.contract.commands import CommandResult, HistogramsArgs
from agent.contract.histograms import Upload, read_facts, read_upload
from agent.daemon.handlers import HistogramUpload
from agent.uplink.link import MqttLink, OnChunk
from engines.calibration import Calibration

CALIBRATION = calibration_of(counted(frames_of(0)))


class Board:
    """A board whose link keeps what is sent."""

    def __init__(self, calibration: Calibration | None = CALIBRATION) -> None:
        self.sent: list[tuple[Upload, list[int], OnChunk]] = []
        self.results: list[CommandResult] = []
        posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        link = SimpleNamespace(send_histograms=self._send)
        self._service = service_with(calibration)
        self._handlers = HistogramUpload(self._service, cast(MqttLink, link), posted.put)
        self._posted = posted

    def ask(self, **args: object) -> CommandResult:
        args_of = HistogramsArgs.model_validate(args)
        carry_out(self._handlers, "histograms", args_of, self.results.append, f"c{len(self.results)}")
        return self.results[-1]

    def report(self, left: int, refusal: str = "") -> CommandResult:
        self.sent[-1][2](left, refusal)
        self._posted.get()()
        return self.results[-1]

    def _send(self, upload: Upload, numbers: Iterable[int], on_chunk: OnChunk) -> None:
        self.sent.append((upload, list(numbers), on_chunk))


def test_all_of_it_is_sent_and_nothing_but_counts() -> None:
    board = Board()
    assert board.ask().step == "SENDING"
    upload, numbers, _ = board.sent[0]
    assert numbers == list(range(upload.total))
    assert dict(read_upload(upload.content)) == dict(CALIBRATION.histograms)
    assert read_facts(upload.content).frames == CALIBRATION.frames
    assert b"a board's camera" not in upload.content
    final = board.report(0)
    assert (final.status, final.result) == (
        "SUCCEEDED",
        {"upload": upload.name, "sha256": upload.sha256, "total": upload.total, "bytes": len(upload.content)},
    )


def test_only_what_is_missing_of_the_same_upload_is_sent_again() -> None:
    board = Board(calibration_of(counted(frames_of(0, values=200_000))))
    board.ask()
    upload = board.sent[0][0]
    board.report(0)
    board.ask(upload=upload.sha256, missing=[0, 99])
    assert board.sent[1][1] == [0]
    board.report(0)
    board.ask(upload="0" * 64, missing=[0])
    assert board.sent[2][1] == list(range(upload.total)), "of another one all are missing"
    board.report(0)
    assert board.ask(upload=upload.sha256, missing=[99]).status == "SUCCEEDED"
    assert len(board.sent) == 3


@pytest.mark.parametrize(
    ("board", "code"),
    [
        (Board(None), "command.histograms"),
        (Board(merged_calibration(CALIBRATION)), "command.histograms"),
    ],
)
def test_an_upload_that_is_not_allowed_is_refused(board: Board, code: str) -> None:
    with pytest.raises(CommandError) as caught:
        board.ask()
    assert caught.value.code == code
    assert board.sent == []


def test_a_second_upload_at_the_same_time_is_refused() -> None:
    board = Board()
    board.ask()
    with pytest.raises(CommandError, match=r"command\.busy"):
        board.ask()
    assert board.results[0].status == "ACCEPTED"
    assert board.report(0, "its longest message").error is not None
    assert board.ask().step == "SENDING", "after its end another"


def test_off_is_the_default_and_no_command_sets_it() -> None:
    assert PrivacyConfig().histograms is False
