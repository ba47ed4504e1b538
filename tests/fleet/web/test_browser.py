"""The pages in a real browser, Debian's Chromium: live without a reload, buttons, a thousand boards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from brokers import RealBroker, eventually
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from web_bench import Board, serving

DONE = ({"status": "ACCEPTED"}, {"status": "SUCCEEDED"})
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


def shows(browser: webdriver.Chrome, words: set[str]) -> bool:
    return words <= set(text_of(browser).split())


def test_a_page_lives_without_a_reload_and_its_buttons_end_in_answers(
    any_broker: RealBroker, browser: webdriver.Chrome
) -> None:
    with serving(any_broker.endpoint) as site, Board(any_broker.endpoint, "gate", *DONE) as board:
        board.say("status", True, state="online", session="s", boot_id="b", ts=1.0)
        board.report(0.5)
        eventually(lambda: site.boards.get("gate") is not None)
        browser.get(f"http://127.0.0.1:{site.port}/boards/gate")
        eventually(lambda: "live" in text_of(browser))
        browser.execute_script("window.untouched = true")
        for estimate, step in ((0.875, "COLLECTING"), (0.25, "VALIDATING")):
            board.report(estimate)
            board.say("event", epoch=1, seq=1, ts=1.0, kind="job", trigger="alarm", step=step, percent=10)
            expected = {f"{estimate:.3f}", step.lower()}
            eventually(partial(shows, browser, expected))
        browser.find_element(By.CSS_SELECTOR, "button[value=recalibrate]").send_keys(Keys.ENTER)  # by keyboard
        eventually(lambda: "SUCCEEDED" in text_of(browser))
        assert browser.execute_script("return window.untouched") is True
        assert [command["op"] for command in board.commands] == ["recalibrate"]
        assert complaints(browser) == []


def test_a_thousand_boards_are_sorted_and_filtered_at_once(any_broker: RealBroker, browser: webdriver.Chrome) -> None:
    with serving(any_broker.endpoint) as site, Board(any_broker.endpoint, "gate") as board:
        for number in range(1000):
            board.say_of(f"b{number:04d}", "status", state="online", session="s", boot_id="b", ts=1.0)
        eventually(lambda: len(site.boards.names()) == 1000, 60.0)
        browser.get(f"http://127.0.0.1:{site.port}/")
        assert len(browser.find_elements(By.CSS_SELECTOR, "#boards tbody tr")) == 1000
        took_ms = browser.execute_script(
            "const field = document.querySelector('input[data-filters]'), begun = performance.now();"
            "field.value = 'b0042'; field.dispatchEvent(new Event('input', { bubbles: true }));"
            "document.body.offsetHeight; return performance.now() - begun;"
        )
        shown = [row for row in browser.find_elements(By.CSS_SELECTOR, "#boards tbody tr") if row.is_displayed()]
        assert [row.text.split()[0] for row in shown] == ["b0042"]
        assert took_ms < 200.0
        browser.find_element(By.CSS_SELECTOR, "#boards th button").click()
        board.say_of("b0042", "status", state="degraded", session="s", boot_id="b", ts=2.0)
        eventually(lambda: "degraded" in text_of(browser))
        shown = [row for row in browser.find_elements(By.CSS_SELECTOR, "#boards tbody tr") if row.is_displayed()]
        assert len(shown) == 1  # the filter holds for what comes anew
        assert complaints(browser) == []
