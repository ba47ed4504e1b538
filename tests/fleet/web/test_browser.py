"""The pages in a real browser, Debian's Chromium: live without a reload, buttons, strangers, a thousand boards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import cv2
import numpy as np
import pytest
from brokers import RealBroker, eventually
from chromium import browser as browser
from chromium import complaints, text_of
from chromium import one_browser as one_browser
from preview_bench import Cameras, preview_config, previewed
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from web_bench import BOOT_ID, Board, OwnSite, serving

from agent.mqtt.config import MqttConfig
from agent.mqtt.message import Message
from benchmarks.web import FILTER

pytestmark = pytest.mark.slow

DONE = ({"status": "ACCEPTED"}, {"status": "SUCCEEDED"})
GREY = np.full((90, 160, 3), 128, np.uint8)
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}

TOO_WIDE = """
return document.documentElement.scrollWidth <= 390 ? [] : [...document.querySelectorAll("main *")]
  .filter((each) => each.getBoundingClientRect().right > 391 && !each.closest(".scroll"))
  .map((each) => each.outerHTML.slice(0, 80));
"""


def shows(browser: webdriver.Chrome, words: set[str]) -> bool:
    return words <= set(text_of(browser).split())


def open_page(browser: webdriver.Chrome, site: OwnSite, path: str) -> None:
    browser.get(f"http://127.0.0.1:{site.port}{path}")
    eventually(lambda: "live" in browser.find_element(By.ID, "connection").text)
    browser.execute_script("window.untouched = true")


def untouched(browser: webdriver.Chrome) -> bool:
    return browser.execute_script("return window.untouched") is True


@contextlib.contextmanager
def gate(broker: RealBroker, *answers: Mapping[str, object]) -> Iterator[tuple[OwnSite, Board]]:
    """Pages, and a board called gate that has reported."""
    with serving(broker.endpoint) as site, Board(broker.endpoint, "gate", *answers) as board:
        board.say("status", True, state="online", session="s", boot_id=BOOT_ID, ts=1.0)
        board.say("birth", True, agent_version="0.1", engine="e" * 16, regimes=["e" * 16, "f" * 16])
        board.report(0.5)
        eventually(lambda: (found := site.boards.get("gate")) is not None and found.version == 3)
        yield site, board


def test_a_page_lives_without_a_reload_and_keeps_its_reader_where_he_is(
    any_broker: RealBroker, browser: webdriver.Chrome
) -> None:
    with gate(any_broker) as (site, board):
        open_page(browser, site, "/boards/gate")
        board.say("event", epoch=1, seq=1, ts=1.0, kind="alarm", camera="yard")
        eventually(partial(shows, browser, {"alarm"}))
        link = browser.find_element(By.CSS_SELECTOR, "#events td")
        browser.execute_script("arguments[0].tabIndex = 0; arguments[0].focus()", link)
        for estimate, step in ((0.875, "COLLECTING"), (0.25, "VALIDATING")):
            board.report(estimate)
            board.say("event", epoch=1, seq=1, ts=1.0, kind="job", trigger="alarm", step=step, percent=10)
            eventually(partial(shows, browser, {f"{estimate:.3f}", step.lower()}))
        assert untouched(browser)
        assert complaints(browser) == []


@pytest.mark.parametrize("op", ["switch", "snapshot"])
def test_a_button_ends_in_the_answer_of_the_board(any_broker: RealBroker, browser: webdriver.Chrome, op: str) -> None:
    jpeg = cv2.imencode(".jpg", GREY)[1].tobytes()
    pictured = {"camera": "yard", "frame": 1, "ts": 1.0, "width": 160, "height": 90, "bytes": len(jpeg)}
    done = {"status": "SUCCEEDED", "result": pictured} if op == "snapshot" else {"status": "SUCCEEDED"}
    with gate(any_broker, {"status": "ACCEPTED"}, done) as (site, board):
        open_page(browser, site, "/boards/gate")
        if op == "switch":
            browser.find_element(By.NAME, "regime").send_keys("f" * 16)
            offered = browser.find_elements(By.CSS_SELECTOR, "#regimes option")
            assert [each.get_attribute("value") for each in offered] == ["f" * 16]  # the other one serves
        browser.find_element(By.CSS_SELECTOR, f"button[value={op}]").send_keys(Keys.ENTER)  # by keyboard
        eventually(lambda: bool(board.commands))
        if op == "snapshot":
            board.publish(Message(board.topics.snapshot, jpeg))
            shown = "return document.querySelector('#snapshot img')?.naturalWidth"
            eventually(lambda: browser.execute_script(shown) == 160)
        eventually(lambda: f"{op} SUCCEEDED" in text_of(browser))
        assert {command["op"] for command in board.commands} == {op}
        assert untouched(browser)
        assert complaints(browser) == []


def test_the_server_of_the_page_goes_and_comes_back(any_broker: RealBroker, browser: webdriver.Chrome) -> None:
    """Its page connects by itself, and its buttons work with the new server."""
    with gate(any_broker) as (site, _):
        open_page(browser, site, "/boards/gate")
        port = site.port
    eventually(lambda: "lost; trying again" in text_of(browser), 30.0)
    with (
        serving(any_broker.endpoint, port=port) as again,
        Board(any_broker.endpoint, "gate", *DONE) as board,
    ):
        board.report(0.75)
        eventually(lambda: again.boards.get("gate") is not None)
        eventually(partial(shows, browser, {"live", "0.750"}), 30.0)
        browser.find_element(By.CSS_SELECTOR, "button[value=cancel]").click()
        eventually(lambda: "cancel SUCCEEDED" in text_of(browser))
        assert untouched(browser)


def test_a_page_of_a_board_that_has_not_reported_waits_for_it(
    any_broker: RealBroker, browser: webdriver.Chrome
) -> None:
    with serving(any_broker.endpoint) as site, Board(any_broker.endpoint, "gate") as board:
        browser.get(f"http://127.0.0.1:{site.port}/boards/gate")
        assert "No board of this name" in text_of(browser)
        board.report(0.5)
        eventually(lambda: "0.500" in browser.page_source)


def test_the_live_picture_runs_while_somebody_looks(any_broker: RealBroker, browser: webdriver.Chrome) -> None:
    config = preview_config(names=("yard", "lane")).model_copy(update={"mqtt": MqttConfig(fleet="f", device="gate")})
    cameras = Cameras("yard", "lane")
    with gate(any_broker) as (site, board), previewed(config, cameras) as preview, cameras.running(GREY):
        open_page(browser, site, "/boards/gate")
        assert not browser.find_element(By.ID, "live").is_displayed()
        assert "preview.address is not set" in text_of(browser)
        board.say("telemetry", cameras={"yard": {}, "lane": {}}, health={"preview": {"address": preview.address}})
        asked = (
            "return performance.getEntriesByType('resource').filter((each) => each.name.includes('live.jpg')).length"
        )
        eventually(lambda: browser.execute_script(asked) >= 3)
        image = browser.find_element(By.CSS_SELECTOR, "#live img")
        assert image.is_displayed()
        eventually(lambda: browser.execute_script("return arguments[0].naturalWidth", image) == 160)
        browser.find_element(By.CSS_SELECTOR, "#live option[value=lane]").click()
        eventually(lambda: "camera=lane" in (image.get_attribute("src") or ""))
        assert complaints(browser) == []
        board.say("status", True, state="offline", session="s", boot_id=BOOT_ID, ts=2.0)
        eventually(lambda: not image.is_displayed())
        count = browser.execute_script(asked)
        board.report(0.875)
        eventually(partial(shows, browser, {"0.875"}))
        assert browser.execute_script(asked) <= count + 1  # none but what was under way
        assert preview.as_dict()["viewers"] == 0
        assert all("live.jpg" in each for each in complaints(browser))  # refused before the page knew


def test_strangers_words_are_text_and_break_no_page(any_broker: RealBroker, browser: webdriver.Chrome) -> None:
    evil, name = "<script>window.hacked=1</script>\u202e\"'`", "<img src=x onerror=hacked=1>\"'"
    long = evil + "W" * 10_000
    with serving(any_broker.endpoint) as site, Board(any_broker.endpoint, name) as board:
        board.say("status", state="degraded", session="s", boot_id=evil, ts=1.0, reason=long)
        board.say("birth", agent_version=long, engine=long, precision=long, regimes=[long, evil])
        camera = {"drift": {"state": long, "gain_db": 1.0}, "fidelity": {"estimate": 0.5, "low": 0.1, "high": 1.0}}
        board.say("telemetry", cameras={evil: camera, long: camera}, health={"preview": {"address": long}})
        board.say("event", kind=evil, message=long, ts=1.0)
        board.say("event", kind="job", trigger=long, step="BUILDING", ts=1.0)
        eventually(lambda: (found := site.boards.get(name)) is not None and found.version == 5)
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        open_page(browser, site, "/")
        assert name in text_of(browser)
        browser.find_element(By.CSS_SELECTOR, "#boards a").click()
        eventually(lambda: "building" in text_of(browser))
        board.report(0.5)
        eventually(lambda: "0.500" in text_of(browser))  # strangers' words come by the stream, too
        assert "\u202e" not in text_of(browser)
        assert browser.execute_script("return window.hacked ?? null") is None
        assert browser.execute_script(TOO_WIDE) == []
        assert complaints(browser) == []


@pytest.mark.trial
def test_a_thousand_boards_are_filtered_and_sorted(any_broker: RealBroker, browser: webdriver.Chrome) -> None:
    with serving(any_broker.endpoint) as site, Board(any_broker.endpoint, "gate") as board:
        for number in range(1000):
            board.say_of(f"b{number:04d}", "status", state="online", session="s", boot_id="b", ts=1.0)
        eventually(lambda: len(site.boards.names()) == 1000, 60.0)
        open_page(browser, site, "/")
        assert len(browser.find_elements(By.CSS_SELECTOR, "#boards tbody tr")) == 1000
        browser.execute_script(FILTER, "b0042")
        shown = browser.find_elements(By.CSS_SELECTOR, "#boards tbody tr:not([hidden])")
        assert [row.text.split()[0] for row in shown] == ["b0042"]
        browser.find_element(By.CSS_SELECTOR, "#boards th button").click()
        board.say_of("b0042", "status", state="degraded", session="s", boot_id="b", ts=2.0)
        eventually(lambda: "degraded" in text_of(browser))
        assert len(browser.find_elements(By.CSS_SELECTOR, "#boards tbody tr:not([hidden])")) == 1
        browser.execute_script(FILTER, "")
        rows = browser.find_elements(By.CSS_SELECTOR, "#boards tbody tr")
        names = [str(row.get_attribute("data-key")) for row in rows]
        assert names == sorted(names, reverse=True)  # a second press of the head that it was sorted by
        assert complaints(browser) == []


def test_a_page_prints_in_the_colours_of_paper(any_broker: RealBroker, browser: webdriver.Chrome) -> None:
    with gate(any_broker) as (site, _):
        open_page(browser, site, "/")
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        for media, shade in (("", "rgb(34, 39, 46)"), ("print", "rgb(240, 243, 246)")):
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": dark})
            head = browser.find_element(By.CSS_SELECTOR, "#boards th")
            assert browser.execute_script("return getComputedStyle(arguments[0]).backgroundColor", head) == shade
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
