"""The fleet's pages of `tared web` at a store of 1,000 devices and thirty days: memory, weight and time of each page.

    python -m benchmarks.web_fleet [--devices 1000] [--days 30] [--live 1000] [--db FILE] [--pictures FOLDER]

`tared web` is a process of its own, at a mosquitto to which as many boards report as --live says. The first load of a
page is over once it shows what was read; ten more follow, half a second apart. With --db the store is kept, and one
that is there is used. With --pictures Chromium takes pictures of the pages, wide and narrow, light and dark.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil

from agent.contract.messages import Birth, Status
from benchmarks.browser import opened, picture, prefer, resize
from benchmarks.recalibration import broker
from benchmarks.report import Section, add_output_option, at_most, bars_section, publish
from benchmarks.web_boards import Boards, pages
from fleet.devices.devices import Devices
from fleet.devices.reports import Report, Reports, Stream
from fleet.rollout.register import RolloutRegister
from fleet.rollout.spec import RolloutSpec
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore

FLEET = "default"
_DAY_S = 86_400.0
_PER_DAY = 4  # telemetry rows of a device
_SITES = ("berlin", "lyon", "porto", "turku")
_MOST_MIB, _MOST_BYTES = 80.0, 1_000_000
_PAGES = {
    "live": "/",
    "devices": "/devices",
    "devices, selected": "/devices?where=fidelity_low%3C0.8",
    "distributions": "/overview",
    "rollouts": "/rollouts",
    "a rollout": "/rollouts/{id}",
    "thirty days": "/days",
}
_TURNS = 10


@dataclass(frozen=True)
class Loaded:
    """A page: its weight, and how long the first and the later loads took."""

    size: int
    first_s: float
    later_s: Sequence[float]


def fill(store: FleetStore, devices: int, days: int, seed: int = 0) -> str:
    """Store a fleet that drifts and recovers over these days; return the id of a rollout in it."""
    chance, now = random.Random(seed), time.time()
    known, reports = Devices(store), Reports(store)
    names = [(FLEET, f"board-{number:05d}") for number in range(devices)]
    engines = [f"{chance.getrandbits(64):016x}" for _ in range(20)]
    births = {
        name: Birth(agent_version=chance.choice(("0.1.0", "0.2.0", "0.2.1")), engine=chance.choice(engines))
        for name in names
    }
    statuses = {
        name: Status(state="degraded" if chance.random() < 0.05 else "online", session="s", boot_id="b", ts=now)
        for name in names
    }
    sequence = dict.fromkeys(names, 0)
    for turn in range(days * _PER_DAY):
        at = now - (days - (turn + 1) / _PER_DAY) * _DAY_S
        entries = []
        for number, name in enumerate(names):
            if turn == days * _PER_DAY - 1 and number % 50 == 7:  # these were heard of last some hours ago
                continue
            lost = max(0.0, chance.gauss(0.02, 0.02)) + (0.3 if (turn + number) % 40 < 3 else 0.0)
            for kind, document in _documents(chance, lost):
                sequence[name] += 1
                entries.append(Report(Stream(*name, 1), sequence[name], kind, at, json.dumps(document)))
        with store.transaction() as transaction:
            ids = known.ids(transaction, set(names), at)
            reports.insert(transaction, entries, ids, at)
    with store.transaction() as transaction:
        documents = {name: (birth, json.dumps(birth.model_dump(exclude_none=True))) for name, birth in births.items()}
        known.apply_births(transaction, documents, now)
        known.apply_statuses(transaction, statuses, now)
    everybody = list(known.all(FLEET))
    for index, site in enumerate(_SITES):
        known.tag(everybody[index :: len(_SITES)], {"site": site}, [], "ann")
    register, spec = RolloutRegister(store, "ann"), RolloutSpec("recalibrate", {"frames": "512"})
    return register.create(FLEET, spec, register.plan(FLEET, spec, "seed"), "the lamps were changed")


def _documents(chance: random.Random, lost: float) -> list[tuple[str, dict[str, object]]]:
    estimate = max(0.0, 1.0 - lost)
    camera = {
        "fps": round(chance.gauss(30.0, 0.5), 2),
        "latency_ms": {"p50": 6.0, "p99": round(chance.gauss(9.0, 0.7), 2)},
        "dropped": {"stale": 0},
        "drift": {"state": "alarm" if lost > 0.25 else "calm", "gain_db": round(40.0 * lost, 2)},
        "fidelity": {
            "estimate": estimate,
            "low": max(0.0, estimate - 0.06),
            "high": min(1.0, estimate + 0.06),
            "n": 90,
        },
    }
    found: list[tuple[str, dict[str, object]]] = [("telemetry", {"cameras": {"gate": camera}})]
    if lost > 0.25 and chance.random() < 0.5:
        found.append(("alarm", {"camera": "gate"}))
        if chance.random() < 0.7:
            found.append(("swap", {"artefact": f"{chance.getrandbits(64):016x}"}))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--live", type=int, default=1000, help="boards that report to the broker")
    parser.add_argument("--db", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    add_output_option(parser)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tared-web-")))
        db = options.db or folder / "fleet.sqlite"
        with open_store(db) as store:
            rollouts = RolloutRegister(store, "").all(FLEET)
            identity = rollouts[0].rollout.id if rollouts else fill(store, options.devices, options.days)
        endpoint = stack.enter_context(broker(folder))
        boards = stack.enter_context(Boards(endpoint))
        url, pid = stack.enter_context(pages(endpoint, "--db", str(db)))
        for number in range(options.live):
            boards.introduce(f"board-{number:05d}")
            boards.report(f"board-{number:05d}", 0.9)
        sections = _measure(url, psutil.Process(pid), identity)
        if options.pictures is not None:
            _take_pictures(url, identity, options.pictures, folder / "profile")
    publish(sections, options)
    return 0


def _measure(url: str, process: psutil.Process, identity: str) -> list[Section]:
    pages, grown_mib = {}, {}
    for name, path in _PAGES.items():
        pages[name] = _load(url + path.format(id=identity))
        grown_mib[name] = process.memory_info().rss / 2**20
    table = Section("The fleet's pages", ["page", "kB", "first, ms", "later, median, ms", "MiB after it"])
    for name, page in pages.items():
        later = 1000.0 * statistics.median(page.later_s)
        cells = f"{page.size / 1000:.0f}", f"{1000.0 * page.first_s:.0f}", f"{later:.0f}", f"{grown_mib[name]:.0f}"
        table.rows.append([name, *cells])
    bars = [
        at_most("memory of the process", _MOST_MIB, max(grown_mib.values()), " MiB"),
        at_most("the heaviest page", _MOST_BYTES / 1000, max(page.size for page in pages.values()) / 1000, " kB"),
    ]
    return [table, bars_section(bars)]


def _load(url: str) -> Loaded:
    took_s, text = [], b""
    for _ in range(_TURNS + 1):
        begun_s = time.monotonic()
        while not text or b"is being read" in text:
            with urlopen(url, timeout=60.0) as answer:
                text = answer.read()
        took_s.append(time.monotonic() - begun_s)
        size, text = len(text), b""
        time.sleep(0.5)
    return Loaded(size, took_s[0], took_s[1:])


def _take_pictures(url: str, identity: str, folder: Path, profile: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pages = {**_PAGES, "new rollout": "/rollouts/new"}
    with opened(profile) as browser:
        for scheme in ("light", "dark"):
            prefer(browser, scheme)
            for width in (390, 1440):
                resize(browser, width)
                for name, path in pages.items():
                    browser.get(url + path.format(id=identity))
                    picture(browser, folder / f"{name.replace(',', '').replace(' ', '-')}-{width}-{scheme}.png", 2400)


if __name__ == "__main__":
    sys.exit(main())
