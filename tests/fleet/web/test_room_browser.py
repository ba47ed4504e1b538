"""The fleet's pages in a real browser: a rollout by keyboard, on a telephone, without a reload; a thousand devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from brokers import RealBroker, eventually
from chromium import browser as browser
from chromium import complaints, text_of
from chromium import one_browser as one_browser
from rollout_bench import a_fleet, controlling, overview
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from simulator_bench import FLEET
from web_bench import serving

from benchmarks.web_fleet import FLEET as FILLED
from benchmarks.web_fleet import fill
from fleet.store.opening import open_store

pytestmark = [pytest.mark.broker, pytest.mark.trial]


def type_into(browser: webdriver.Chrome, name: str, text: str) -> None:
    field = browser.find_element(By.NAME, name)
    field.clear()
    field.send_keys(text)


def press(browser: webdriver.Chrome, selector: str) -> None:
    """Press an element by the keyboard."""
    browser.find_element(By.CSS_SELECTOR, selector).send_keys(Keys.ENTER)


def is_wide(browser: webdriver.Chrome) -> bool:
    """Return True if the page has to be pushed sideways."""
    return bool(browser.execute_script("return document.documentElement.scrollWidth > window.innerWidth"))


def test_a_rollout_by_keyboard_on_a_telephone(mosquitto: RealBroker, browser: webdriver.Chrome, tmp_path: Path) -> None:
    where = str(tmp_path / "db")
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    with (
        a_fleet(mosquitto, where, 4),
        serving(mosquitto.endpoint, fleet=FLEET, db=where) as site,
        controlling(mosquitto, where),
    ):
        browser.get(f"http://127.0.0.1:{site.port}/rollouts/new")
        for name, text in (("waves", "1,100%"), ("gates", "failures<=5%"), ("soak", "6s"), ("why", "<b>season</b>")):
            type_into(browser, name, text)
        press(browser, "button[value=plan]")
        eventually(lambda: browser.find_elements(By.CSS_SELECTOR, "#plan tbody tr") != [])
        assert not is_wide(browser)
        press(browser, "button[value=create]")
        eventually(lambda: "under way" in text_of(browser) or "soaking" in text_of(browser), 120.0)
        browser.execute_script("window.untouched = true")
        assert not browser.find_element(By.CSS_SELECTOR, "button[value=resume]").is_displayed()
        eventually(lambda: "1 of 2 passed" in text_of(browser), 120.0)
        assert browser.execute_script("return window.untouched") is True
        press(browser, "button[value=pause]")
        eventually(lambda: "PAUSED" in text_of(browser), 120.0)
        assert not browser.find_element(By.CSS_SELECTOR, "button[value=pause]").is_displayed()
        press(browser, "button[value=resume]")
        eventually(lambda: "RUNNING" in text_of(browser), 120.0)
        browser.execute_script("window.untouched = true")
        eventually(lambda: "COMPLETED" in text_of(browser), 120.0)
        assert browser.execute_script("return window.untouched") is True
        assert "<b>season</b>" in text_of(browser)
        assert not browser.find_element(By.CSS_SELECTOR, ".steer").is_displayed()
        assert not is_wide(browser)
        identity = browser.current_url.rpartition("/")[2]
        assert overview(where, identity).rollout.state.is_finished
        assert complaints(browser) == []


SHOWN = """
const rows = [...document.querySelectorAll('#devices tbody tr')];
return rows.filter((row) => row.offsetParent !== null).map((row) => row.cells[0].textContent);
"""
FILTERED = """
const field = document.querySelector('input[data-filters]');
field.value = arguments[0]; field.dispatchEvent(new Event('input', { bubbles: true }));
"""
SCROLLED = """
const done = arguments[0];
window.scrollTo(0, 0);
window.scrollTo(0, document.body.scrollHeight);
requestAnimationFrame(() => requestAnimationFrame(() => done(window.scrollY)));
"""


def test_a_thousand_devices_of_the_store_are_filtered_and_scrolled(
    any_broker: RealBroker, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    where = str(tmp_path / "db")
    with open_store(where) as store:
        fill(store, 1000, 1)
    with serving(any_broker.endpoint, fleet=FILLED, db=where) as site:
        browser.get(f"http://127.0.0.1:{site.port}/devices")
        eventually(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#devices tbody tr")) == 1000, 30.0)
        assert browser.execute_async_script(SCROLLED) > 1000
        browser.execute_script(FILTERED, "board-00044")
        shown = browser.execute_script(SHOWN)
        assert shown == ["board-00044"]
        browser.execute_script(FILTERED, "")
        begun_with = len(browser.execute_script(SHOWN))

        def more_rows_are_shown() -> bool:
            browser.execute_async_script(SCROLLED)
            return len(browser.execute_script(SHOWN)) > begun_with

        eventually(more_rows_are_shown, 30.0)  # the next ones come where the end is near
        assert complaints(browser) == []
