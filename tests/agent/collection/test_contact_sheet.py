"""The report on a selection: counts that fit an event, and a picture for the owner of the board alone."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from pydantic import JsonValue
from unexpected import unexpected

from agent.collection import report as selection_report
from agent.collection.report import MAX_THUMBNAILS, SelectionReport, Thumbnail, draw_sheet
from agent.collection.selection import DUPLICATE, NOTHING, OTHERS, TAKEN, SelectionCounts
from agent.common.errors import AgentError


def thumbnails(count: int) -> list[Thumbnail]:
    """Plain frames, each of the brightness that it says, of the newest first."""
    return [
        Thumbnail.from_image(60.0 * n, 4.0 * n, np.full((480, 640, 3), 4 * n, np.uint8)) for n in reversed(range(count))
    ]


def report(sheet: list[Thumbnail] | None, classes: dict[int, int] | None = None) -> SelectionReport:
    outcomes = Counter({TAKEN: 7, DUPLICATE: 2})
    counts = SelectionCounts(outcomes, 12.3456, (0, 0, 0, 7, 0, 0, 0, 0), classes or {0: 5, NOTHING: 2})
    return SelectionReport(counts, 1, lambda known: f"class {known}", sheet)


def read(png: bytes) -> np.ndarray:
    return np.asarray(cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR))


def test_a_sheet_shows_its_frames_in_order_of_time() -> None:
    sheet = read(draw_sheet(thumbnails(MAX_THUMBNAILS)))
    assert sheet.shape == (6 * 84, 8 * 96, 3)
    for place in range(MAX_THUMBNAILS):
        row, column = divmod(place, 8)
        assert (sheet[84 * row + 5, 96 * column + 5] == 4 * place).all()
        assert (
            sheet[84 * row + 72 : 84 * (row + 1), 96 * column : 96 * (column + 1)].max() > 150
        )  # something is written


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (72, 96), (73, 97), (2160, 3840), (3000, 10)])
def test_frames_of_any_size_fit(size: tuple[int, int]) -> None:
    made = Thumbnail.from_image(0.0, 200.0, np.full((*size, 3), 200, np.uint8))
    assert made.image.shape[0] <= 72
    assert made.image.shape[1] <= 96
    assert (read(draw_sheet([made]))[0, 0] == 200).all()


def test_a_thumbnail_is_a_copy() -> None:
    image = np.zeros((16, 16, 3), np.uint8)
    made = Thumbnail.from_image(0.0, 0.0, image)
    image[:] = 99
    assert not made.image.any()


def test_only_the_daemons_user_may_see_the_frames(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        report(thumbnails(3)).write(tmp_path, unexpected)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "selection.png").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["selection.json", "selection.png"]
    assert read((tmp_path / "selection.png").read_bytes()).shape == (84, 8 * 96, 3)


def test_where_the_owner_wants_no_sheet_an_old_one_goes(tmp_path: Path) -> None:
    report(thumbnails(3)).write(tmp_path, unexpected)
    report(None).write(tmp_path, unexpected)
    assert [path.name for path in tmp_path.iterdir()] == ["selection.json"]
    report(None).write(tmp_path, unexpected)  # and none needs to be there


def test_the_counts_are_an_events_detail(tmp_path: Path) -> None:
    made = report(None)
    detail: dict[str, JsonValue] = made.detail()
    assert detail == {
        "considered": 9, "taken": 7, "duplicate": 2, "early": 0, "brightness": 0, "class": 0, "held_out": 1,
        "span_s": 12.346, "brightness_bins": [0, 0, 0, 7, 0, 0, 0, 0], "classes": {"class 0": 5, "nothing": 2},
    }  # fmt: skip
    made.write(tmp_path, unexpected)
    assert json.loads((tmp_path / "selection.json").read_text()) == detail


def test_the_most_frequent_classes_are_listed() -> None:
    classes = {number: 100 - number for number in range(40)} | {OTHERS: 1000}
    listed = report(None, classes).detail()["classes"]
    assert list(listed)[:2] == ["others", "class 0"]
    assert len(listed) <= 17
    assert sum(listed.values()) == sum(classes.values())


def test_a_disk_that_refuses_is_reported_and_keeps_the_old_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(thumbnails(2)).write(tmp_path, unexpected)
    before = (tmp_path / "selection.png").read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    errors: list[AgentError] = []
    monkeypatch.setattr(selection_report, "replace_files", refuse)
    report(thumbnails(3)).write(tmp_path, errors.append)
    assert [error.code for error in errors] == ["state.write"]
    assert "No space left" in errors[0].found
    assert (tmp_path / "selection.png").read_bytes() == before
