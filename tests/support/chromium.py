"""A real Chromium, Debian's, without a window; a fixture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from benchmarks.browser import MISSING, is_installed, opened


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    require_chromium()
    with opened(tmp_path / "profile") as chrome:
        yield chrome


def require_chromium() -> None:
    """Skip the test without a browser; TARED_REQUIRE_BROWSER turns that into a failure."""
    if not is_installed():
        assert "TARED_REQUIRE_BROWSER" not in os.environ, MISSING
        pytest.skip(MISSING)


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the page's policy refuses, and errors of its scripts."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def text_of(browser: webdriver.Chrome) -> str:
    """What can be read, with one space between two words; nothing while a page is being loaded."""
    return " ".join(browser.execute_script("return document.body?.innerText ?? ''").split())
