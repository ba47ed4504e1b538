"""The manual: links between its pages and the repository, its terms, and the judge of its prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools import prose, site


def test_links_lead_to_the_same_page_from_both_sides() -> None:
    text = "[drift](docs/concepts/drift.md#the-evidence) [outside](https://example.org) [gone](docs/none.md)"
    moved = site.relinked(text, "SECURITY.md", "security.md")
    assert moved == "[drift](concepts/drift.md#the-evidence) [outside](https://example.org) [gone](docs/none.md)"
    assert (
        site.relinked("[secure](../../SECURITY.md)", "docs/guides/web.md", "guides/web.md")
        == "[secure](../security.md)"
    )


def test_terms_of_several_lines_are_whole() -> None:
    assert site.terms()["fidelity"].endswith("the share of equal answers.")
    assert set(prose.TERMS) <= site.terms().keys()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("What a camera lacks is an error.", "begins with What"),
        ("The loss is told at once.", "'tell'"),
        ("It provably keeps it.", "'provably'"),
        (" ".join(["word"] * 41) + ".", "a sentence of 41 words"),
        ("a" * 60 + " " + "b" * 60, "a line of 121 characters"),
        (
            "One two three four. " * 3 + "\n\n" + (" ".join(["Word"] * 17) + ".\n\n") * 11,
            "the median sentence has 17 words",
        ),
    ],
)
def test_bad_prose_is_found(text: str, fault: str) -> None:
    assert fault in "\n".join(prose.read(Path("page.md"), text).faults())


@pytest.mark.parametrize(
    "text",
    [
        "What is drift? It is a change.",
        "```sh\nWhat is told here is code, " + "x" * 130 + "\n```",
        "| What | told |\n|---|---|\n| Who | " + "x" * 130 + " |",
        "See `" + "tared plan " * 12 + "`.",
    ],
)
def test_questions_code_and_tables_are_no_faults(text: str) -> None:
    assert list(prose.read(Path("page.md"), text).faults()) == []


def test_a_fault_ends_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nothing is wrong here.\n\nNobody is told this.\n")
    assert prose.main([str(page)]) == 1
    assert f"{page}:3: 'tell'" in capsys.readouterr().out
    page.write_text("Nothing is wrong here.\n")
    assert prose.main([str(page)]) == 0
