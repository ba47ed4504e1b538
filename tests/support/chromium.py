"""A real Chromium, Debian's, without a window; a fixture."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

_CHROMIUM, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--window-size=1280,900",
)  # fmt: skip


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    if _CHROMIUM is None or _DRIVER is None:
        missing = "no Chromium: apt-get install chromium chromium-driver"
        assert "TARED_REQUIRE_BROWSER" not in os.environ, missing
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    try:
        yield chrome
    finally:
        chrome.quit()


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the page's policy refuses, and errors of its scripts."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def text_of(browser: webdriver.Chrome) -> str:
    return str(browser.find_element(By.TAG_NAME, "body").text)
