"""The pages of `tared web` in a browser: how soon they show what a board reports, how much they weigh, what they cost.

    python -m benchmarks.web [--boards 1000] [--messages 60]

Chromium, `tared web` as users start it, mosquitto, and boards that are documents. `python -m benchmarks.loop --parts
preview` has what an open page costs the frame path.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import psutil
from selenium import webdriver

from agent.mqtt.client import Endpoint
from benchmarks.browser import MISSING, is_installed, opened
from benchmarks.recalibration import broker
from benchmarks.report import Bar, Section, add_output_option, at_most, bars_section, publish
from benchmarks.web_boards import Boards, pages

_PERIOD_S, _WAIT_S = 0.7, 60.0
_MOST_S, _MOST_MIB, _MOST_WEIGHT_MB, _MOST_MS = 1.0, 80.0, 1.0, 200.0
_MIB = 1 << 20

# Notes when each fidelity is first seen in the page.
_WATCH = """
window.seen = {};
const note = () => {
  for (const each of document.querySelectorAll("dd")) {
    if (/^0\\.\\d{3}$/.test(each.textContent)) window.seen[each.textContent] ??= Date.now();
  }
};
new MutationObserver(note).observe(document.body, { childList: true, subtree: true, characterData: true });
"""
_WEIGHT = """
return performance.getEntriesByType("navigation").concat(performance.getEntriesByType("resource"))
  .reduce((sum, each) => sum + each.encodedBodySize, 0);
"""
FILTER = """
const field = document.querySelector("input[data-filters]"), begun = performance.now();
field.value = arguments[0];
field.dispatchEvent(new Event("input", { bubbles: true }));
document.body.offsetHeight;
return performance.now() - begun;
"""
_SORT = """
const begun = performance.now();
document.querySelectorAll("#boards th button")[arguments[0]].click();
document.body.offsetHeight;
return performance.now() - begun;
"""
SCROLL = """
const done = arguments[0], gaps = [];
let last = performance.now();
function step() {
  gaps.push(performance.now() - last);
  last = performance.now();
  window.scrollBy(0, 500);
  if (gaps.length < 120) requestAnimationFrame(step); else done(gaps);
}
requestAnimationFrame(step);
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="How soon do the pages show what a board reports, and at what cost?")
    parser.add_argument("--boards", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=60)
    add_output_option(parser)
    options = parser.parse_args()
    if not is_installed():
        raise SystemExit(f"error: {MISSING}")
    with tempfile.TemporaryDirectory() as kept, broker(Path(kept)) as endpoint:
        one, one_bars = _one_board(Path(kept), endpoint, options.messages)
        many, many_bars = _fleet(Path(kept), endpoint, options.boards)
    bars = [*one_bars, *many_bars]
    publish([one, many, bars_section(bars)], options)


def _one_board(folder: Path, endpoint: Endpoint, messages: int) -> tuple[Section, list[Bar]]:
    """A page of one board: from the moment that telemetry is published to the moment that it is on the page."""
    table = Section("The page of a board", ("what", "p50", "p99", "most"))
    with pages(endpoint) as (url, pid), Boards(endpoint) as boards, opened(folder / "one") as browser:
        boards.introduce("gate")
        boards.report("gate", 0.5)
        _open(browser, f"{url}/boards/gate")
        weight = browser.execute_script(_WEIGHT) + _first_event(f"{url}/live/gate")
        browser.execute_script(_WATCH)
        said_ms: dict[str, float] = {}
        for number in range(messages):
            said_ms[f"{0.6 + number / 1000:.3f}"] = 1000.0 * time.time()
            boards.report("gate", 0.6 + number / 1000)
            time.sleep(_PERIOD_S)
        seen_ms = browser.execute_script("return window.seen")
        late_s = [(seen_ms[each] - said_ms[each]) / 1000.0 for each in said_ms if each in seen_ms]
        rss = psutil.Process(pid).memory_info().rss / _MIB
    p50, p99, most = np.percentile(late_s, [50.0, 99.0, 100.0])
    table.rows.append((f"telemetry to page, {len(late_s)} of {messages}, s", f"{p50:.2f}", f"{p99:.2f}", f"{most:.2f}"))
    table.rows.append(("what the page loads, kB", "", "", f"{weight / 1000:.0f}"))
    table.rows.append(("memory of tared web, MiB", "", "", f"{rss:.0f}"))
    return table, [
        at_most("a page shows telemetry within", _MOST_S, most, " s"),
        at_most("a board's page loads", _MOST_WEIGHT_MB, weight / 1e6, " MB"),
        at_most("memory of tared web, one board", _MOST_MIB, rss, " MiB"),
    ]


def _fleet(folder: Path, endpoint: Endpoint, count: int) -> tuple[Section, list[Bar]]:
    """The fleet's table, while all boards report every ten seconds."""
    table = Section(f"The table of {count} boards", ("what", "median", "most"))
    with pages(endpoint) as (url, pid), Boards(endpoint) as boards, opened(folder / "many") as browser:
        names = [f"board-{number:04d}" for number in range(count)]
        for name in names:
            boards.introduce(name)
            boards.report(name, 0.9)
        ends_s = time.monotonic() + _WAIT_S
        while urlopen(url).read().count(b"<tr data-key") < count and time.monotonic() < ends_s:
            time.sleep(0.5)
        _open(browser, url)
        mark = browser.execute_script("return document.body.dataset.live")
        weight = browser.execute_script(_WEIGHT) + _first_event(f"{url}{mark}")
        figures: dict[str, list[float]] = {"filter, ms": [], "sort, ms": [], "a frame while it scrolls, ms": []}
        for turn in range(10):
            for name in names[turn * 10 :: 100]:  # as many as report in a second
                boards.report(name, 0.9 - turn / 100)
            figures["filter, ms"].append(browser.execute_script(FILTER, ("board-0042", "board-00", "")[turn % 3]))
            figures["sort, ms"].append(browser.execute_script(_SORT, turn % 4))
        browser.execute_script(FILTER, "")
        figures["a frame while it scrolls, ms"] = browser.execute_async_script(SCROLL)
        rss = psutil.Process(pid).memory_info().rss / _MIB
    for what, values in figures.items():
        table.rows.append((what, f"{np.median(values):.0f}", f"{max(values):.0f}"))
    table.rows.append(("what the page loads, kB", "", f"{weight / 1000:.0f}"))
    table.rows.append(("memory of tared web, MiB", "", f"{rss:.0f}"))
    bars = [at_most(what.partition(",")[0], _MOST_MS, max(values), " ms") for what, values in figures.items()]
    bars.append(at_most("the table's page loads", _MOST_WEIGHT_MB, weight / 1e6, " MB"))
    bars.append(at_most(f"memory of tared web, {count} boards", _MOST_MIB, rss, " MiB"))
    return table, bars


def _open(browser: webdriver.Chrome, page: str) -> None:
    ends_s = time.monotonic() + _WAIT_S
    while time.monotonic() < ends_s:
        browser.get(page)
        if browser.execute_script("return document.getElementById('now') !== null"):
            return
    raise SystemExit(f"error: nothing at {page}")


def _first_event(stream: str) -> int:
    """The bytes that an open page is sent at once."""
    with urlopen(stream, timeout=_WAIT_S) as answer:
        answer.readline()
        return len(answer.readline())


if __name__ == "__main__":
    main()
