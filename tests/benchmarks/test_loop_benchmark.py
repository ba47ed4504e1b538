"""The loop's benchmark: its counts, its fair shares, and the limit of memory, which is tested here."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
from brokers import RealBroker

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.mqtt.client import Endpoint
from benchmarks.loop_cameras import camera, fair_shares
from benchmarks.loop_daemon import endless
from benchmarks.loop_memory import MIB, MOST_MIB, null_daemon
from benchmarks.workers.accounted_daemon import THREAD, Account
from benchmarks.workers.tally import Tally

pytestmark = pytest.mark.usefixtures("shared_data")


def spend(seconds: float) -> None:
    """Use so much CPU time of this thread."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_cpu_time_counts_to_its_part_and_else_to_its_thread() -> None:
    account = Account()
    timed = account.timed("engine", lambda: spend(0.05))
    done, seen = threading.Event(), threading.Event()

    def work() -> None:
        timed()
        spend(0.02)
        done.set()
        seen.wait()

    before = account.now()
    thread = threading.Thread(target=work, name="inference")
    thread.start()
    done.wait()
    after = account.now()
    seen.set()
    thread.join()
    spent = {part: after[part] - before[part] for part in after}
    engine_s, rest_s = spent["engine"], spent["the rest of thread inference"]
    assert engine_s >= 0.05
    assert rest_s >= 0.01  # the kernel counts a running thread with a delay of some milliseconds
    assert engine_s + rest_s == pytest.approx(spent[f"{THREAD}inference"])


def test_the_clip_plays_without_an_end(tmp_path: Path) -> None:
    frames = read_images(parse_source(str(endless(tmp_path, "vid_vehicle_surveillance_640x352.mp4"))))
    times = [ts for _, (ts, _) in zip(range(280), frames, strict=False)]  # of 265
    assert len(times) == 280
    assert all(later > earlier for earlier, later in itertools.pairwise(times))


def test_a_peer_is_not_counted_while_it_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: 1.0 + next(clock) / 10.0)
    tally = Tally(1.0, 2.0)
    frames = 0
    while tally.add(0.5 if frames < 11 else 0.01, 2):
        frames += 1
    result = tally.result()
    assert result["fps"] == pytest.approx(10.0)
    assert result["p99_ms"] == pytest.approx(10.0)
    assert result["found"] == 2.0


@pytest.mark.parametrize(
    ("asked", "total", "shares"),
    [
        ({"a": 10.0, "b": 10.0}, 30.0, {"a": 10.0, "b": 10.0}),
        ({"a": 50.0, "b": 10.0, "c": 30.0}, 50.0, {"a": 20.0, "b": 10.0, "c": 20.0}),
        ({"a": 50.0, "b": 40.0}, 50.0, {"a": 25.0, "b": 25.0}),
    ],
)
def test_fair_is_max_min_fair(asked: dict[str, float], total: float, shares: dict[str, float]) -> None:
    assert fair_shares(asked, total) == shares


@pytest.mark.trial
def test_the_daemon_with_a_null_engine_is_small(tmp_path: Path, mosquitto: RealBroker) -> None:
    """All its outputs are on: results in a file, on a socket and by MQTT, and metrics."""
    with camera(640, 480, 10.0) as url, null_daemon(tmp_path, Endpoint("127.0.0.1", mosquitto.port), url) as daemon:
        assert daemon.rss_bytes() / MIB <= MOST_MIB
