"""A real Chromium, Debian's, without a window; fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver

from benchmarks.browser import MISSING, is_installed, opened


@pytest.fixture(scope="module")
def one_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """The browser of all tests of a module: its start takes longer than most of them."""
    require_chromium()
    with opened(tmp_path_factory.mktemp("chromium") / "profile") as chrome:
        yield chrome


@pytest.fixture
def browser(one_browser: webdriver.Chrome) -> webdriver.Chrome:
    """A new tab of the browser, which remembers nothing of the tests before."""
    before = one_browser.window_handles
    one_browser.switch_to.new_window("tab")
    new = one_browser.current_window_handle
    for each in before:
        one_browser.switch_to.window(each)
        one_browser.close()
    one_browser.switch_to.window(new)
    for forget in ("Network.clearBrowserCookies", "Network.clearBrowserCache"):
        one_browser.execute_cdp_cmd(forget, {})
    complaints(one_browser)
    return one_browser


def require_chromium() -> None:
    """Skip the test without a browser; TARED_REQUIRE_BROWSER turns that into a failure."""
    if not is_installed():
        assert "TARED_REQUIRE_BROWSER" not in os.environ, MISSING
        pytest.skip(MISSING)


def complaints(browser: webdriver.Chrome) -> list[str]:
    """Return the refusals of the page's policy, and errors of its scripts."""
    log: Any = browser.get_log  # selenium gives it no types
    return [entry["message"] for entry in log("browser") if entry["level"] == "SEVERE"]


def text_of(browser: webdriver.Chrome) -> str:
    """Return the visible text, with one space between two words; empty while a page is being loaded."""
    return " ".join(browser.execute_script("return document.body?.innerText ?? ''").split())
