"""The page of `tared label` in a real browser, and what its server refuses."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from brokers import eventually
from chromium import browser as browser
from chromium import complaints, text_of
from chromium import one_browser as one_browser
from label_bench import CLASSES, HEIGHT, WIDTH, LabelBench
from places import ROOT
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.slow


@contextmanager
def serving(bench: LabelBench) -> Iterator[str]:
    """The address of the page, as the command prints it."""
    command = [sys.executable, "-m", "fleet.cli", "label", "--json", "-c", str(bench.config)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("label frames at http://127.0.0.1:"), line
            yield line.split()[3]
        finally:
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert json.loads(output)["drawn"] == len(bench.store.frames())


def press(browser: webdriver.Chrome, *keys: str) -> None:
    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def open_page(browser: webdriver.Chrome, address: str, words: str) -> None:
    browser.get(address)
    shows(browser, words)


def shows(browser: webdriver.Chrome, words: str) -> None:
    eventually(lambda: words in text_of(browser))


def has_label(bench: LabelBench, number: int) -> Callable[[], bool]:
    return lambda: not bench.store.frames()[number - 1].is_waiting


def near(boxes: list[Any], *expected: list[float]) -> bool:
    """Whether boxes are these, within what a mouse can hit."""
    return len(boxes) == len(expected) and all(
        a[0] == b[0] and all(abs(x - y) <= 1.0 for x, y in zip(a[1:], b[1:], strict=True))
        for a, b in zip(boxes, expected, strict=True)
    )


def test_classes_by_key_by_search_by_click_and_back(tmp_path: Path, browser: webdriver.Chrome) -> None:
    bench = LabelBench(tmp_path, "classify", 4)
    with serving(bench) as address:
        open_page(browser, address, "0 of 4")
        shows(browser, "frame 1, camera gate")
        press(browser, "2")
        shows(browser, "frame 2, camera gate")
        press(browser, "/", *"owl", Keys.ENTER)
        shows(browser, "frame 3, camera gate")
        press(browser, "s")
        shows(browser, "frame 4, camera gate")
        press(browser, "b")
        shows(browser, "This frame was skipped")
        press(browser, "b")
        shows(browser, "Labelled as owl")
        browser.find_element(By.XPATH, "//button[span='bus']").click()
        shows(browser, "frame 4, camera gate")
        press(browser, "3")
        shows(browser, "Every drawn frame is done")
        assert bench.labels() == [1, 3, "skipped", 2]
        bench.draw(4)
        shows(browser, "frame 5, camera gate")  # without a reload
        assert complaints(browser) == []


def test_boxes_by_mouse_with_undo(tmp_path: Path, browser: webdriver.Chrome) -> None:
    bench = LabelBench(tmp_path, "detect", 2)
    with serving(bench) as address:
        open_page(browser, address, "frame 1, camera gate")
        canvas = browser.find_element(By.ID, "picture")
        scale = canvas.size["width"] / WIDTH

        def drag(*path: tuple[float, float]) -> None:
            chain = ActionChains(browser, duration=20)
            for at, (x, y) in enumerate(path):
                offset = round((x - WIDTH / 2) * scale), round((y - HEIGHT / 2) * scale)
                chain.move_to_element_with_offset(canvas, *offset)
                if at == 0:
                    chain.click_and_hold()
            chain.release().perform()

        press(browser, Keys.ENTER)
        shows(browser, "press 0 if nothing is there")  # no label by mistake
        drag((40, 30), (70, 60), (100, 90))
        press(browser, "2")
        drag((100, 90), (110, 100))  # its corner
        drag((60, 60), (70, 50))  # it moves
        drag((5, 5), (20, 25))
        press(browser, Keys.DELETE, "u")
        press(browser, Keys.ENTER)
        eventually(has_label(bench, 1))
        assert near(bench.labels()[0], [1, 50, 20, 120, 90], [1, 5, 5, 20, 25]), bench.labels()
        shows(browser, "frame 2, camera gate")
        assert not bench.store.frames()[0].suggested
        assert complaints(browser) == []


def test_boxes_by_keyboard_alone_nothing_there_and_the_models_boxes(tmp_path: Path, browser: webdriver.Chrome) -> None:
    bench = LabelBench(tmp_path, "detect", 3)
    with serving(bench) as address:
        open_page(browser, address, "frame 1, camera gate")
        press(browser, "n", "/", *"light", Keys.ENTER, Keys.ARROW_RIGHT)
        ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_DOWN).key_up(Keys.SHIFT).perform()
        press(browser, Keys.ENTER)
        shows(browser, "frame 2, camera gate")
        press(browser, "0")
        shows(browser, "frame 3, camera gate")
        press(browser, "m")
        shows(browser, "These are the model’s boxes")
        press(browser, ".", Keys.DELETE, Keys.ENTER)
        eventually(has_label(bench, 3))
        assert bench.labels() == [[[2, 62, 45, 102, 77]], [], [[3, 2, 2, 20, 20]]]
        assert [frame.suggested for frame in bench.store.frames()] == [False, False, True]
        assert complaints(browser) == []


def test_frames_whose_shapes_are_drawn_elsewhere_are_empty_or_skipped(
    tmp_path: Path, browser: webdriver.Chrome
) -> None:
    bench = LabelBench(tmp_path, "instance", 3)
    with serving(bench) as address:
        open_page(browser, address, "0 of 3")
        shows(browser, "tared label --export")
        assert not browser.find_element(By.ID, "save").is_displayed()
        assert not browser.find_element(By.ID, "classes").is_displayed()
        press(browser, "1", Keys.ENTER, "m")
        assert bench.store.frames()[0].is_waiting
        press(browser, "0")
        eventually(has_label(bench, 1))
        shows(browser, "1 of 3")
        press(browser, "s")
        eventually(has_label(bench, 2))
        shows(browser, "2 of 3")
        assert complaints(browser) == []
    frames = bench.store.frames()
    assert bench.store.kind.is_nothing(frames[0].label)
    assert frames[1].skipped


def test_strange_names_are_text_and_a_picture_that_is_gone_can_be_skipped(
    tmp_path: Path, browser: webdriver.Chrome
) -> None:
    evil = "<img src=x onerror=window.hacked=1>"
    bench = LabelBench(tmp_path, "classify", 0, (evil, "owl"))
    bench.draw(0, camera=evil)
    bench.draw(1)
    (bench.store.folder / "00000002.jpg").unlink()
    with serving(bench) as address:
        open_page(browser, address, f"camera {evil}")
        press(browser, "1")
        shows(browser, "gone or damaged")
        press(browser, "1", "s")
        shows(browser, "Every drawn frame is done")
    assert bench.labels() == [0, "skipped"]
    assert browser.execute_script("return window.hacked ?? null") is None


def ask(
    address: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, token: bool = True
) -> tuple[int, dict[str, str], bytes]:
    url = urlsplit(address)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60.0)
    place = f"{url.path}{path}" if token else path
    try:
        connection.request("GET" if body is None else "POST", place, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    except (ConnectionError, http.client.HTTPException):
        return 0, {}, b""
    finally:
        connection.close()


def test_the_server_refuses_strangers_and_labels_that_are_wrong(tmp_path: Path) -> None:
    bench = LabelBench(tmp_path, "detect", 1)
    json_type = {"Content-Type": "application/json"}

    def post(document: object, path: str = "frames/1", **headers: str) -> int:
        return ask(address, path, json.dumps(document).encode(), {**json_type, **headers})[0]

    box = {"class": 0, "box": [1, 2, 30, 40]}
    with serving(bench) as address:
        status, headers, page = ask(address, "")
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
        assert (page.count(b"<style"), page.count(b"<script")) == (0, 1)
        for path in ("", "waiting", "pictures/00000001.jpg", "frames/1"):
            assert ask(address, path, headers={"Host": "evil.example"})[0] == 403
        for path in ("/", "/waiting", "/pictures/00000001.jpg", "/x/waiting", "/label.js"):
            assert ask(address, path, token=False)[0] == 403
        waiting = json.loads(ask(address, "waiting")[2])["frame"]
        assert {key for key, value in waiting.items() if isinstance(value, (list, dict))} == set()  # no suggestion
        assert post({"label": [box]}, **{"Host": "evil.example"}) == 403
        assert post({"label": [box]}, **{"Content-Type": "text/plain"}) == 415
        assert post({"label": [box]}, "frames/7") == post({"label": []}, "frames/../1") == 404
        wrong: list[object] = [
            {}, [], 3, {"label": 3}, {"label": [3]}, {"label": [box], "skip": True}, {"skip": "yes"},
            {"label": [{**box, "class": len(CLASSES)}]}, {"label": [{**box, "class": True}]},
            {"label": [{**box, "box": [1, 2, 3]}]}, {"label": [{**box, "box": [1, 2, float("nan"), 4]}]},
            {"label": [{**box, "box": [1, 2, 10**400, 4]}]}, {"label": [{**box, "box": [500, 2, 600, 4]}]},
            {"label": [box] * 1001},
        ]  # fmt: skip
        assert [post(each) for each in wrong] == [400] * len(wrong)
        assert ask(address, "frames/1", b"[" * 50_000, json_type)[0] == 400
        assert ask(address, "frames/1", b" " * 300_000, json_type)[0] == 0  # too long: the connection ends
        assert bench.labels() == [None]
        assert post({"label": [box]}) == 200
    assert bench.labels() == [[[0, 1, 2, 30, 40]]]
