"""The outbox and time: how old a row is after the clock was set, and how often the disk is written to."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from brokers import eventually
from outbox_bench import opened, put, stored, taken

from agent.uplink import outbox as outbox_module
from agent.uplink import outbox_store
from agent.uplink.outbox import TELEMETRY
from agent.uplink.outbox_store import SAMPLE

pytestmark = pytest.mark.usefixtures("no_thread_left")

YEAR_S = 365 * 86_400.0
WRONG = 1_750_000_000.0  # a clock that was set, once: nobody can tell by looking at it


def walls(folder: Path) -> list[float]:
    with closing(sqlite3.connect(folder / "outbox.sqlite")) as db:
        return [wall for (wall,) in db.execute("SELECT wall FROM rows ORDER BY epoch, seq")]


@pytest.mark.parametrize("written", [True, False])
def test_rows_from_before_the_clock_was_set_get_their_age_by_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """written: before that, or together with what comes after it."""
    ahead = [WRONG - time.monotonic()]

    def now() -> float:
        return ahead[0] + time.monotonic()

    monkeypatch.setattr(outbox_store.time, "time", now)
    monkeypatch.setattr(outbox_store, "_AGED_EVERY_S", 0.0)
    monkeypatch.setattr(outbox_store, "_SETTLES_S", 0.0)
    with opened(tmp_path, confirm="collector", days=1.0, commit_s=60.0) as outbox:
        put(outbox, 2, TELEMETRY, SAMPLE)
        if written:
            outbox.hurry()
            eventually(lambda: len(walls(tmp_path)) == 2)
        ahead[0] += YEAR_S
        put(outbox, 1)
        eventually(lambda: len(walls(tmp_path)) == 3)
        assert walls(tmp_path) == pytest.approx([now()] * 3, abs=60.0)
        assert outbox.dropped.total() == 0


def test_a_clock_that_goes_on_changes_no_age(tmp_path: Path) -> None:
    with opened(tmp_path, confirm="collector") as outbox:
        before = time.time()
        for count in range(1, 4):
            put(outbox, 1)
            eventually(lambda count=count: len(walls(tmp_path)) == count)  # type: ignore[misc]  # mypy infers no lambda with a default
        assert walls(tmp_path) == sorted(walls(tmp_path))
        assert before <= walls(tmp_path)[0] <= walls(tmp_path)[-1] <= time.time()


def test_waiting_for_a_collector_writes_no_sooner_than_it_was_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_SILENCE_S", 0.1)
    with opened(tmp_path, confirm="collector", commit_s=0.6) as outbox:
        put(outbox, 1, TELEMETRY, SAMPLE)
        taken(outbox, 1)
        confirmed_s = time.monotonic()
        outbox.acknowledge(outbox.epoch, 1)
        eventually(lambda: stored(tmp_path) == [])
        assert time.monotonic() - confirmed_s > 0.5


def test_a_start_with_a_clock_that_is_years_ahead_drops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, confirm="collector", days=1.0) as outbox:
        put(outbox, 3)
        eventually(lambda: len(stored(tmp_path)) == 3)
    ahead_s = [10 * YEAR_S]
    true_time = time.time
    monkeypatch.setattr(outbox_store.time, "time", lambda: true_time() + ahead_s[0])
    with opened(tmp_path, confirm="collector", days=1.0) as outbox:
        put(outbox, 1)
        eventually(lambda: len(stored(tmp_path)) == 4)
        ahead_s[0] = 0.0  # a time server is heard
        put(outbox, 1)
        eventually(lambda: len(stored(tmp_path)) == 5)
        assert outbox.dropped.total() == 0
