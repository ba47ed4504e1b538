"""Take pictures of pages by Chromium: a board while the sample runs, a fleet, the labels, a report."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver import ActionChains

from benchmarks.browser import MISSING, is_installed, opened, picture, prefer, resize
from benchmarks.loop_daemon import Daemon
from benchmarks.peers import ROOT
from benchmarks.recalibration import broker
from benchmarks.web_boards import pages
from docs.tools.figures.picture import WIDTH_PX, save_small
from docs.tools.figures.street_run import StreetRun

_FLEET = (
    "--devices", "14", "--period", "1", "--seed", "3", "--job", "25",
    "--drift", "db=7,after_s=5,spread_s=60,ramp_s=20,groups=7",
)  # fmt: skip
_HEIGHT_PX, _REPORT_HEIGHT_PX = 640, 900
_WAIT_S, _RUN_S = 60.0, 400.0
_COMMITS = (
    "return [...document.querySelectorAll('#events td:nth-child(2)')].filter(e => e.textContent == 'commit').length"
)
_LIVE = "return (document.querySelector('#live:not([hidden]) img')?.naturalWidth ?? 0) > 0"
_FRAME = "return document.querySelector('#picture').hasAttribute('aria-label')"
_BOXES = "return /, [1-9]/.test(document.querySelector('#picture').getAttribute('aria-label'))"
_STATES = "return [...new Set([...document.querySelectorAll('td')].map(e => e.textContent.trim()))]"


def require_browser() -> None:
    """Raise SystemExit without Chromium."""
    if not is_installed():
        raise SystemExit(f"error: {MISSING}")


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """A browser in light colours, as wide as the pictures."""
    with tempfile.TemporaryDirectory() as profile, opened(Path(profile) / "chromium") as chrome:
        prefer(chrome, "light")
        resize(chrome, WIDTH_PX, _HEIGHT_PX)
        chrome.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        yield chrome


def take_board(path: Path, url: str, daemon: Daemon) -> None:
    """Write the page of the sample's board, once the recalibrated engine has served for some seconds."""
    with browser() as chrome:
        chrome.get(url)
        _wait(
            lambda: chrome.execute_script(_COMMITS) >= 2, "second committed engine on the board's page", _RUN_S, daemon
        )
        time.sleep(4.0)  # so that the charts show the recovery
        _wait(lambda: chrome.execute_script(_LIVE), "live picture", _WAIT_S, daemon)
        _save(chrome, path)


def take_fleet(path: Path) -> None:
    """Write the list of a simulated fleet, whose boards drift one group after the other."""
    with tempfile.TemporaryDirectory() as folder, broker(Path(folder)) as endpoint, pages(endpoint) as (url, _):
        boards = [sys.executable, "-m", "fleet.cli", "fleet", "simulate", *_FLEET]
        boards += ["--host", endpoint.host, "--port", str(endpoint.port)]
        with subprocess.Popen(boards, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT) as simulated:
            try:
                with browser() as chrome:
                    chrome.get(url)
                    _wait(
                        lambda: {"alarm", "calm"} <= set(chrome.execute_script(_STATES)), "alarm in the fleet", _WAIT_S
                    )
                    time.sleep(20.0)
                    _save(chrome, path)
            finally:
                simulated.kill()


def take_labels(run: StreetRun, path: Path) -> None:
    """Write the page on which the sample's frames are labelled."""
    command = [sys.executable, "-m", "fleet.cli", "label", "-c", str(run.folder / "config.yaml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT) as page:
        try:
            assert page.stderr is not None
            said = page.stderr.readline()
            found = re.search(r"http://\S+", said)
            if found is None:
                raise SystemExit(f"error: tared label does not serve: {said.strip()}")
            with browser() as chrome:
                chrome.get(found[0])
                _wait(lambda: chrome.execute_script(_FRAME), "frame on the page for labels", _WAIT_S)
                ActionChains(chrome).send_keys("m").perform()
                _wait(lambda: chrome.execute_script(_BOXES), "box of the model", _WAIT_S)
                save_small(chrome.get_screenshot_as_png(), path)
        finally:
            page.kill()


def take_report(run: StreetRun, path: Path) -> None:
    """Write the top of the report on the board's state."""
    report = run.folder / "report.html"
    command = [sys.executable, "-m", "fleet.cli", "report", run.state_dir.name, "-o", report.name]
    subprocess.run(command, check=True, capture_output=True, cwd=run.folder)  # the page names the folder as it is given
    with browser() as chrome:
        chrome.get(report.as_uri())
        _save(chrome, path, _REPORT_HEIGHT_PX)


def _save(chrome: webdriver.Chrome, path: Path, most_height_px: int = 1240) -> None:
    """Write the page from its top on, as small as a manual wants it."""
    picture(chrome, path, most_height_px)
    save_small(path.read_bytes(), path)


def _wait(is_there: Callable[[], object], what: str, seconds: float, daemon: Daemon | None = None) -> None:
    ends_s = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > ends_s or (daemon is not None and daemon.process.poll() is not None):
            raise SystemExit(f"error: no {what}; expected one within {seconds:g} s; run it again on a calmer machine")
        time.sleep(0.2)
