"""Pictures of the pages of `tared web`, for people to look at: wide and narrow, light and dark.

    python -m benchmarks.web_pictures -o pictures/

Chromium, mosquitto, `tared web`, boards that are documents, one in each state that a page shows, and for live pictures
the daemon on the clip of the sample, which `make run` makes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

from selenium import webdriver

from agent.mqtt.client import Endpoint
from benchmarks.browser import MISSING, is_installed, opened, picture, prefer, resize
from benchmarks.loop_daemon import UNOBSERVED, Daemon
from benchmarks.peers import ROOT
from benchmarks.recalibration import broker
from benchmarks.web_boards import Boards, pages

_CLIP = ROOT / "var" / "sample" / "street.mp4"
_WIDTHS = {390: 844, 1440: 900}
_WAIT_S = 60.0
_REPORTS = 60
_HOSTILE = "<b>\"quoted\" & 'odd'"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pictures of the pages, for people to look at.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    folder: Path = parser.parse_args().output
    if not is_installed():
        raise SystemExit(f"error: {MISSING}")
    if not _CLIP.exists():
        raise SystemExit(f"error: no {_CLIP}; make it: make run")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as kept, broker(Path(kept)) as endpoint, opened(Path(kept) / "p") as browser:
        with pages(endpoint) as (url, _):
            _take(browser, folder, "no-boards", url)
            _take(browser, folder, "missing", f"{url}/boards/gate")
        with pages(endpoint) as (url, _), _camera(Path(kept), endpoint), Boards(endpoint) as boards:
            _tell(boards)
            _wait_for(f"{url}/boards/street", "data-cameras='[[")
            _take(browser, folder, "fleet", url)
            for board in ("street", "job", "alarm", "degraded", "offline", _HOSTILE):
                name = "hostile" if board == _HOSTILE else board
                _take(browser, folder, f"board-{name}", f"{url}/boards/{quote(board)}", board == "street")


def _camera(folder: Path, endpoint: Endpoint) -> Daemon:
    """The daemon on the sample, whose live picture is shown."""
    config = {
        "model": str(ROOT / "examples" / "street" / "model.yaml"),
        "camera": {"name": "street", "source": str(_CLIP), "loop": True},
        "preview": {"address": "127.0.0.1:0"},
        "privacy": {"preview": True},
        "mqtt": {"host": endpoint.host, "port": endpoint.port, "device": "street", "telemetry_period_s": 1.0},
        **UNOBSERVED,
    }
    return Daemon(folder / "street", endpoint, config)


def _tell(boards: Boards) -> None:
    """Let a board be in each state."""
    boards.introduce("job")
    boards.introduce("alarm")
    boards.introduce("degraded", "degraded", reason="no calibration yet: the scene is too dark; add light")
    boards.introduce(_HOSTILE)
    for number in range(_REPORTS):
        share = number / _REPORTS
        boards.report("job", 0.98 - 0.5 * share**2, 20.0 * share**2, "alarm" if share > 0.8 else "calm")
        boards.report("alarm", 0.97 - 0.4 * share, 12.0 * share, "alarm" if share > 0.5 else "calm")
    boards.report(_HOSTILE, 0.9, drift="<script>")
    boards.report("offline", 0.95)
    boards.introduce("offline", "offline")
    at = {"epoch": 1, "ts": time.time()}
    alarm = {"camera": "yard", "gain_db": 12.0, "onset_ts": 117.2, "capture_ts": 158.2}
    boards.say("alarm", "event", seq=2, kind="alarm", **at, **alarm)
    steps = ("REQUESTED", "COLLECTING", "CALIBRATING", "PLANNING", "BUILDING")
    boards.say("job", "event", seq=1, kind="swap", trigger="first-start", artefact="13aef3747cad4ee6", **at)
    boards.say("job", "event", seq=2, kind="alarm", **at, **alarm)
    for number, step in enumerate(steps):
        boards.say("job", "event", seq=3 + number, kind="job", trigger="alarm", step=step, percent=20 * number, **at)
    words = "the broker's host could not be reached, " * 8
    boards.say("alarm", "event", seq=3, kind="error", code="camera.lost", message=words, **at)


def _take(browser: webdriver.Chrome, folder: Path, name: str, url: str, live: bool = False) -> None:
    """live: wait for a live picture."""
    for scheme in ("light", "dark"):
        prefer(browser, scheme)
        for width, height in _WIDTHS.items():
            resize(browser, width, height)
            browser.get(url)
            ends_s = time.monotonic() + _WAIT_S
            seen = "return document.querySelector('#live img').naturalWidth > 0" if live else "return true"
            while not browser.execute_script(seen) and time.monotonic() < ends_s:
                time.sleep(0.1)
            file = folder / f"{name}-{width}-{scheme}.png"
            picture(browser, file)
            print(file)


def _wait_for(url: str, text: str) -> None:
    ends_s = time.monotonic() + _WAIT_S
    while time.monotonic() < ends_s:
        try:
            if text in urlopen(url).read().decode():
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"error: no '{text}' at {url}")


if __name__ == "__main__":
    main()
