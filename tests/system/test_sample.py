"""The bundled sample end to end, as `make run` runs it: summary and page show the whole story."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from brokers import eventually
from chromium import require_chromium
from places import ROOT

from benchmarks.browser import is_installed, opened

NIGHT_ENDS_S, MORNING_SURE_S = 100.0, 140.0  # dawn lies between; see examples/street
LOOK_S = 60.0
STEPS = ("collecting", "calibrating", "planning", "building", "validating", "probation")

# Notes what the page shows whenever that changes. A page that was loaded anew would have forgotten it.
NOTE = """
window.story = [];
const canvas = Object.assign(document.createElement("canvas"), { width: 16, height: 9 });
const titles = () => [...document.querySelectorAll("dt")];
const tile = (name) => titles().find((each) => each.textContent === name)?.nextElementSibling;
function light() {
  const image = document.querySelector("#live:not([hidden]) img"), paper = canvas.getContext("2d");
  if (!image?.naturalWidth) return null;
  paper.drawImage(image, 0, 0, 16, 9);
  const { data } = paper.getImageData(0, 0, 16, 9);
  return Math.round(data.filter((_, at) => at % 4 < 3).reduce((sum, each) => sum + each) / (0.75 * data.length));
}
setInterval(() => {
  const engine = tile("engine"), shown = {
    engine: engine?.textContent, precision: engine?.nextElementSibling?.textContent,
    drift: tile("drift")?.textContent, step: document.querySelector("#job .now")?.textContent ?? null,
    events: [...document.querySelectorAll("#events td:nth-child(2)")].map((each) => each.textContent), light: light(),
  };
  if (JSON.stringify(shown) !== JSON.stringify(window.story.at(-1))) window.story.push(shown);
}, 200);
"""


@dataclass(frozen=True)
class Story:
    """A run of the sample. summary: of `tared run --json`. url, page: Address and states of its page."""

    summary: dict[str, Any]
    url: str
    page: list[dict[str, Any]] | None


def played(folder: Path) -> Story:
    """Render the video, run the daemon on it as `make run` does, and watch its page."""
    render = [sys.executable, "-m", "examples.street.render", "-o", str(folder)]
    subprocess.run(render, cwd=ROOT, check=True, capture_output=True, timeout=300)
    sample = ROOT / "examples/street"
    config = yaml.safe_load((sample / "config.yaml").read_text())
    config["model"] = str(sample / config["model"])
    config["state_dir"] = str(folder / "state")
    config["camera"]["source"] = str(folder / Path(config["camera"]["source"]).name)
    # Beside four other tests on two cores its jobs have to end before the video does.
    config["camera"]["speed"] = 1
    config["recalibration"] = {**config.get("recalibration", {}), "nice": 0}
    config["camera"]["labels"] = str(folder / Path(config["camera"]["labels"]).name)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (options,) = re.findall(r"tared run -c examples/street/config.yaml (.*)", (ROOT / "Makefile").read_text())
    command = [sys.executable, "-m", "fleet.cli", "run", "--json", "-c", str(folder / "config.yaml"), *options.split()]
    with (folder / "said").open("wb") as said, (folder / "out").open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=said)
        try:
            url = page_address(folder / "said")
            page = watched(f"{url}/boards/street-sample", folder, process) if is_installed() else None
            assert process.wait(450.0) == 0, (folder / "said").read_text()
        finally:
            process.kill()
            process.wait()
    return Story(json.loads((folder / "out").read_text()), url, page)


def page_address(said: Path) -> str:
    """The address that the daemon says, before it serves the first frames."""
    found: list[str] = []

    def is_there() -> bool:
        text = said.read_text()
        found[:] = re.findall(r"^watch it in a browser: (http://127\.0\.0\.1:\d+)$", text, re.MULTILINE)
        assert "event=swap" not in text
        return bool(found)

    eventually(is_there, LOOK_S)
    return found[0]


def watched(url: str, folder: Path, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """The states of the page until the daemon ends."""

    def is_served() -> bool:
        with contextlib.suppress(OSError), urlopen(url, timeout=10.0):
            return True
        return False

    eventually(is_served, LOOK_S)
    with opened(folder / "profile") as browser:
        browser.get(url)
        browser.execute_script(NOTE)
        process.wait(450.0)
        eventually(lambda: "lost; trying again" in browser.page_source, LOOK_S)
        shown: list[dict[str, Any]] = browser.execute_script("return window.story")
        return shown


def in_order(values: Sequence[Any]) -> list[Any]:
    """Each value once, in the order of its first appearance."""
    return list(dict.fromkeys(value for value in values if value))


@pytest.mark.trial
@pytest.mark.timeout(900)
def test_the_sample_recovers_in_the_morning_and_its_page_shows_it(tmp_path: Path) -> None:
    """One test: a run takes minutes, and each worker would make one for a test of its own."""
    story = played(tmp_path)
    check_that_recalibration_restores_the_accuracy(story.summary)
    with pytest.raises(OSError, match="refused"):
        urlopen(story.url, timeout=5.0)
    if story.page is None:
        require_chromium()
        return
    check_that_the_page_shows_night_alarm_job_and_swap(story.page, story.summary)


def check_that_recalibration_restores_the_accuracy(summary: dict[str, Any]) -> None:
    """The scales of the night fail in the morning."""
    assert summary["frames"] >= 2700
    assert summary["dropped"] == {}

    (alarm,) = summary["alarms"]
    assert NIGHT_ENDS_S < alarm["onset_ts"] < MORNING_SURE_S
    assert alarm["onset_ts"] < alarm["ts"] < alarm["onset_ts"] + 120.0
    assert [swap["trigger"] for swap in summary["swaps"]] == ["first-start", "alarm"], summary["jobs"]
    assert summary["swaps"][0]["ts"] < NIGHT_ENDS_S
    assert summary["swaps"][1]["ts"] > alarm["ts"]

    night, morning = summary["accuracy"]["first light"], summary["accuracy"]["last light"]
    first, second = (swap["artefact"] for swap in summary["swaps"])
    assert night["reference"]["f1"] > 0.8
    assert night[first]["f1"] > night["reference"]["f1"] - 0.02
    assert morning["reference"]["f1"] > 0.8
    assert morning[first]["f1"] < morning["reference"]["f1"] - 0.2
    assert morning[second]["f1"] > morning["reference"]["f1"] - 0.02
    assert summary["swaps"][1]["fidelity"] > summary["swaps"][1]["fidelity_before"] + 0.1
    assert summary["fidelity"]["estimate"] > 0.9


def check_that_the_page_shows_night_alarm_job_and_swap(page: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Without a reload: see NOTE."""
    swaps = [swap["artefact"] for swap in summary["swaps"]]
    assert in_order([shown["engine"] for shown in page])[-2:] == swaps
    assert in_order([shown["precision"] for shown in page])[0] == "float, FP32"
    first, second = ([shown for shown in page if shown["engine"] == artefact] for artefact in swaps)
    assert "calm" in in_order([shown["drift"] for shown in first])
    assert "alarm" in in_order([shown["drift"] for shown in first])
    assert second[-1]["drift"] == "calm"
    steps = in_order([shown["step"] for shown in page if "alarm" in shown["events"]])
    assert [step for step in steps if step in STEPS] == [step for step in STEPS if step in steps]
    assert {"collecting", "probation"} <= set(steps)  # the others may take less time than the page between two changes
    assert {"alarm", "job", "swap", "commit"} <= set(second[-1]["events"])
    night, morning = (
        median(shown["light"] for shown in part if shown["light"] is not None)
        for part in (page[: len(page) // 5], second)
    )
    assert night < 0.6 * morning
