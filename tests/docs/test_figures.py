"""The pictures of the manual: each is made by a script, is small, and is where a page shows it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from places import ROOT

from docs.tools.figures.__main__ import IMAGES, NAMES, main
from docs.tools.figures.picture import MOST_BYTES, WIDTH_PX, new_figure, save, save_small

MOST_BYTES_TOGETHER = 900_000
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)[^)]*\)|<img\s[^>]*?src=\"([^\"]+)\"[^>]*>")


def size(picture: Path) -> tuple[int, int]:
    """Height and width in pixels."""
    image = cv2.imread(str(picture))
    assert image is not None
    height, width, _ = image.shape
    return height, width


def test_each_committed_picture_is_made_by_a_script_and_is_small() -> None:
    pictures = sorted(IMAGES.iterdir())
    assert [path.name for path in pictures] == sorted(f"{name}.png" for name in NAMES)
    for path in pictures:
        assert path.stat().st_size <= MOST_BYTES, path
        assert size(path)[1] == WIDTH_PX, path
    assert sum(path.stat().st_size for path in pictures) <= MOST_BYTES_TOGETHER


def test_each_picture_that_a_page_shows_is_there_and_has_words_for_who_cannot_see_it() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for words, linked, tagged in SHOWN.findall(page.read_text(encoding="utf-8")):
            where = linked or tagged
            if "://" in where:
                continue
            assert (page.parent / where).exists(), f"{page}: {where}"
            assert words or tagged, f"{page}: {where} without words"


def test_a_picture_is_written_with_a_palette_and_one_that_is_too_large_is_refused(tmp_path: Path) -> None:
    figure = new_figure(400)
    figure.add_subplot().plot([0.0, 1.0], [0.0, 1.0])
    save(figure, tmp_path / "line.png")
    assert size(tmp_path / "line.png") == (400, WIDTH_PX)
    few_colours = np.random.default_rng(0).integers(0, 4, (600, WIDTH_PX, 3), np.uint8) * 80
    with pytest.raises(SystemExit, match=r"bytes; expected at most 200000"):
        save_small(cv2.imencode(".png", few_colours)[1].tobytes(), tmp_path / "noise.png")


def test_without_a_browser_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["figures", "fleet", "-o", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^error: no .*install.*$"):
        main()
    assert list(tmp_path.iterdir()) == []
