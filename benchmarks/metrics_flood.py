"""What scrapes and strangers at the metrics' port cost the frame path: `python -m benchmarks.metrics_flood`.

One daemon serves a clip as fast as it can. In turn, nobody comes, one client scrapes without a pause, and strangers
connect without a pause, send half a request, and stay.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from agent.mqtt.client import Endpoint
from agent.mqtt.embedded_broker import EmbeddedBroker
from benchmarks.loop_daemon import UNOBSERVED, Daemon, endless, spec

_MOST_HELD = 900  # connections of the strangers' side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="yolox_nano")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, EmbeddedBroker() as broker:
        folder = Path(name)
        camera = {"source": str(endless(folder)), "speed": 0}
        config = {"model": spec(options.model), "camera": camera, **UNOBSERVED}
        endpoint = Endpoint(broker.host, broker.port, protocol="3.1.1")
        with Daemon(folder / "board", endpoint, config) as daemon:
            _compare(daemon, options.seconds, options.rounds)


def _compare(daemon: Daemon, seconds: float, rounds: int) -> None:
    process = psutil.Process(daemon.process.pid)
    cases = {"nobody": _nobody, "scrapes": _scrape, "strangers": _strangers}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    counts, most = dict.fromkeys(cases, 0), dict.fromkeys(cases, (0, 0))
    with ThreadPoolExecutor(1) as pool:
        for _ in range(rounds):
            for name, come in cases.items():
                ending = threading.Event()
                coming = pool.submit(come, daemon, ending)
                rates[name].append(daemon.fps(seconds))
                most[name] = max(most[name], (process.num_threads(), process.num_fds()))
                ending.set()
                counts[name] += coming.result()
    for name in cases:
        shares = [rate / quiet for rate, quiet in zip(rates[name], rates["nobody"], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4)
        print(
            f"{name}: {statistics.median(rates[name]):.1f} frames/s, {middle:.3f} ({low:.3f} to {high:.3f}) of those "
            f"while nobody comes; {counts[name] / seconds / rounds:.0f} connections/s; "
            f"{most[name][0]} threads, {most[name][1]} descriptors"
        )


def _nobody(_daemon: Daemon, ending: threading.Event) -> int:
    ending.wait()
    return 0


def _scrape(daemon: Daemon, ending: threading.Event) -> int:
    return _count(ending, daemon.frames)


def _strangers(daemon: Daemon, ending: threading.Event) -> int:
    with ExitStack() as held:
        number = 0

        def come() -> None:
            nonlocal number
            number += 1
            if number % _MOST_HELD == 0:
                held.close()
            with suppress(OSError):
                held.enter_context(socket.create_connection(daemon.metrics, 1.0)).sendall(b"GET /metrics HTTP/1.1\r\n")

        return _count(ending, come)


def _count(ending: threading.Event, act: Callable[[], object]) -> int:
    done = 0
    while not ending.is_set():
        act()
        done += 1
        time.sleep(0)
    return done


if __name__ == "__main__":
    main()
