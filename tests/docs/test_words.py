"""The judge of the words of tests and comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools import words


@pytest.mark.parametrize(
    ("source", "line", "fault"),
    [
        ("def test_who_waits(): ...", 1, "begins with 'who'"),
        ("class Told: ...\n\ndef _operator_told(): ...", 3, "_operator_told: 'told'"),
        ('"""A fine line.\n\nWhat the board says."""', 3, "begins with What"),
        ('def test_a_board():\n    """The operator is told."""', 2, "'told'"),
        (f'"""{" ".join(["Word"] * 26)}."""', 1, "a sentence of 26 words; at most 25"),
        ('mark.skipif(True, reason="nobody has it")', 1, "'nobody'"),
        ('case("a", id="a board is told")', 1, "'told'"),
    ],
)
def test_words_of_tests_are_judged(source: str, line: int, fault: str) -> None:
    ((at, found),) = set(words.test_faults(source))
    assert at == line
    assert fault in found


@pytest.mark.parametrize(
    "source",
    [
        '"""What is drift?"""',
        "def test_an_alarm_starts_one_job():\n    return 'whoever is told'",
        "def test_a_storyteller_is_heartless(): ...",
    ],
)
def test_questions_statements_and_other_strings_are_no_faults(source: str) -> None:
    assert list(words.test_faults(source)) == []


def test_a_fault_ends_with_exit_code_1_and_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "product"
    folder.mkdir()
    (folder / "age.py").write_text("# Seconds.\nage = 3.0  # of the newest frame\n")
    assert words.main([str(folder)]) == 1
    assert "age.py:2: begins with 'of': # of the newest frame" in capsys.readouterr().out
    (folder / "age.py").write_text("age = 3.0  # seconds since the newest frame\n")
    assert words.main([str(folder)]) == 0
