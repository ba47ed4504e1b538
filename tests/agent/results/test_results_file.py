"""Results in a file: whole lines over rotation, crashes and full disks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench import fill, small_file_system
from results_bench import detections, frames_of, line
from turned_clock import TurnedClock

from agent.results.file_output import ResultsFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "results.jsonl"


def write(file: ResultsFile, *frames: int) -> None:
    for number in frames:
        file.add(line(number))
    file.flush()


def test_lines_are_appended_over_restarts(path: Path) -> None:
    for first in (0, 2):
        file = ResultsFile(path)
        write(file, first, first + 1)
        file.close()
    assert frames_of(path) == [0, 1, 2, 3]


def test_a_line_waits_for_a_second_at_most(path: Path) -> None:
    clock = TurnedClock()
    file = ResultsFile(path, clock)
    file.add(line(0))
    file.tick()
    assert frames_of(path) == [0]
    file.add(line(1))
    assert file.tick() == 1.0
    assert frames_of(path) == [0]
    clock.turn(1.0)
    file.tick()
    assert frames_of(path) == [0, 1]


def test_many_lines_are_written_before(path: Path) -> None:
    file = ResultsFile(path)
    for number in range(1000):
        file.add(line(number))
    assert len(frames_of(path)) > 500


def test_a_renamed_file_is_left_for_a_new_one(path: Path) -> None:
    file = ResultsFile(path)
    write(file, 0)
    rotated = path.rename(path.with_suffix(".1"))
    write(file, 1)
    path.unlink()
    write(file, 2)
    path.parent.rename(path.parent.with_name("gone"))
    write(file, 3)
    assert frames_of(path.parent.with_name("gone") / rotated.name) == [0]
    assert frames_of(path) == [3]


def test_a_copied_and_truncated_file_goes_on_from_its_beginning(path: Path) -> None:
    file = ResultsFile(path)
    write(file, 0)
    os.truncate(path, 0)
    write(file, 1)
    assert frames_of(path) == [1]


@pytest.mark.parametrize(("boxes", "kept"), [(0, 1), (0, 30), (5000, -1)])
def test_half_a_line_of_a_crash_is_cut_off(path: Path, boxes: int, kept: int) -> None:
    """That of 5000 boxes is longer than what is read at once."""
    path.parent.mkdir()
    path.write_bytes(line(0).encoded + line(1, detections(*[0.5] * boxes)).encoded[:kept])
    write(ResultsFile(path), 2)
    assert frames_of(path) == [0, 2]


def test_text_of_other_programs_is_kept(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"somebody's notes")
    write(ResultsFile(path), 2)
    assert path.read_bytes() == b"somebody's notes\n" + line(2).encoded


def test_a_full_disk_costs_the_oldest_lines_and_leaves_no_half_one(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk") as disk:
        file = ResultsFile(disk / "results.jsonl")
        write(file, 0)
        fill(disk / "ballast")
        for number in range(1, 20_000):
            file.add(line(number))
        file.flush()
        assert file.trouble is not None
        assert file.trouble.code == "results.write"
        assert "No space left" in str(file.trouble)
        full = frames_of(disk / "results.jsonl")
        assert full == list(range(len(full)))
        assert len(full) < 100

        (disk / "ballast").unlink()
        for number in range(20_000, 20_100):  # what was kept is more than the disk holds: some of it goes
            file.add(line(number))
        file.flush()
        assert file.dropped > 0
        os.truncate(disk / "results.jsonl", 0)
        file.close()
        after = frames_of(disk / "results.jsonl")
        assert after == list(range(after[0], after[0] + len(after)))


def test_a_pipe_without_a_reader_is_refused_without_waiting(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    file = ResultsFile(path)
    write(file, 0)
    assert file.trouble is not None
    assert "not a regular file" in str(file.trouble)
    file.close()
    assert file.dropped == 1


def test_a_folder_in_the_place_of_the_file_is_reported(path: Path) -> None:
    path.mkdir(parents=True)
    file = ResultsFile(path)
    write(file, 0)
    assert "Is a directory" in str(file.trouble)
