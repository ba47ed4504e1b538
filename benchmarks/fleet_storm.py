"""Ten thousand simulated boards at one broker on one machine, whose broker is killed; are they back, is anything lost?

    python -m benchmarks.fleet_storm [--devices 10000] [--period 60] [--down 10] [--json | --markdown]

mosquitto, the collector and the simulation are a process each. The broker gets SIGKILL and is started again, with what
it has saved by then, which by mosquitto's defaults is nothing: what it had acknowledged is gone with it. At the end no
board makes anything more, and what each has made is looked up in the collector's database, number by number.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from agent.common.console import set_up_logging
from agent.contract.topics import Topics
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.message import Message
from benchmarks.report import Bar, Section, add_output_option, at_most, bars_section, publish
from fleet.simulator.options import SimulationOptions
from fleet.simulator.simulation import Simulation, SimulationOutcome, allow_files
from fleet.store.opening import open_store

_FLEET = "storm"
_STEADY_S = 60.0
_PATIENCE_S = 400.0  # with boards that do not come, or do not come back
_BAR_WIDTH = 60


class Broker:
    """mosquitto in `folder`, which it keeps its database in."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._config = folder / "mosquitto.conf"
        # A collector that is behind is not to lose what boards then send again: 1000 is the default.
        lines = ["user root", f"listener {self.port} 127.0.0.1", "allow_anonymous true", "max_queued_messages 100000"]
        self._config.write_text("\n".join([*lines, "persistence true", f"persistence_location {folder}/"]) + "\n")

    def start(self) -> psutil.Popen:
        """Returns once it listens."""
        binary = shutil.which("mosquitto", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin") or "mosquitto"
        process = psutil.Popen([binary, "-c", str(self._config)], stderr=subprocess.DEVNULL)
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return process
            time.sleep(0.01)


class Usage:
    """What a process has taken since; memory as it is now."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._before_s = process, self._cpu_s(process)

    def seconds(self) -> float:
        """Of one core."""
        return self._cpu_s(self._process) - self._before_s

    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    @staticmethod
    def _cpu_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)


class Course:
    """Start, a steady while, the kill, the return, half as long again; the simulation's loop asks whether it is over.

    came_s: until all were connected; back_s: from the new broker's start until all were again. None: they were not.
    dials, arrivals: in s after the new broker's start, as of SimulationOutcome.
    """

    def __init__(
        self,
        broker: Broker,
        process: psutil.Popen,
        collector: psutil.Process,
        outcome: SimulationOutcome,
        steady_s: float,
        down_s: float,
    ) -> None:
        """process: the broker's."""
        self.outcome = outcome
        self.came_s: float | None = None
        self.back_s: float | None = None
        self.connected = 0
        self.restarted_s = math.inf
        self.steady: dict[str, float] = {}
        self._broker, self._steady_s, self._down_s = broker, steady_s, down_s
        self.process = process
        self._processes = {"simulation": psutil.Process(), "collector": collector}
        self._steps = iter([self._all_came, self._steady_over, self._down_over, self._all_back, self._calm_over])
        self._step = next(self._steps)
        self._since_s = self._begun_s = time.monotonic()

    def is_over(self) -> bool:
        """One step on where the present one is done; the end where it takes too long."""
        if self._passed_s > _PATIENCE_S:
            print(f"{self._step.__name__.strip('_')}: not within {_PATIENCE_S:.0f} s", file=sys.stderr)
            return True
        if not self._step():
            return False
        print(f"{self._step.__name__.strip('_')} after {self._passed_s:.1f} s", file=sys.stderr)
        self._since_s = time.monotonic()
        following = next(self._steps, None)
        self._step = following or self._step
        return following is None

    @property
    def dials(self) -> list[float]:
        return self._since_return(self.outcome.dials)

    @property
    def arrivals(self) -> list[float]:
        return self._since_return(self.outcome.arrivals)

    def _since_return(self, times: Sequence[float]) -> list[float]:
        return [at_s - self.restarted_s for at_s in times[bisect(times, self.restarted_s) :]]

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - self._since_s

    def _all_came(self) -> bool:
        if self.outcome.connected < self.outcome.devices:
            return False
        self.came_s, self.connected = self._passed_s, self.outcome.connected
        self._usages = {name: Usage(each) for name, each in {**self._processes, "mosquitto": self.process}.items()}
        self._rows_before = self.outcome.confirmed
        return True

    def _steady_over(self) -> bool:
        if self._passed_s < self._steady_s:
            return False
        self.steady = {f"{name} cores": usage.seconds() / self._passed_s for name, usage in self._usages.items()}
        self.steady |= {f"{name} bytes": usage.rss_bytes() for name, usage in self._usages.items()}
        self.steady["rows/s"] = (self.outcome.confirmed - self._rows_before) / self._passed_s
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return True

    def _down_over(self) -> bool:
        if self._passed_s < self._down_s or self.outcome.connected:
            return False
        self.restarted_s = time.monotonic() - self._begun_s
        self.process = self._broker.start()
        return True

    def _all_back(self) -> bool:
        if min(self.outcome.connected, len(self.arrivals)) < self.outcome.devices:
            return False
        self.back_s = self._passed_s
        return True

    def _calm_over(self) -> bool:
        return self._passed_s > self._steady_s / 2.0


def lost(database: Path, made: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """How many rows boards made, and how many of them are not in the collector's database."""
    missing = 0
    query = (
        "SELECT seq FROM reports r JOIN devices d ON d.id = r.device WHERE d.fleet = ? AND d.name = ? AND r.epoch = ?"
    )
    with open_store(database) as store, store.transaction("read") as transaction:
        for device, (epoch, last) in made.items():
            found = {seq for (seq,) in transaction.execute(query, (_FLEET, device, epoch))}
            missing += len(set(range(1, last + 1)) - found)
    return sum(last for _, last in made.values()), missing


def wait_for_collector(broker: Broker, fleet: str) -> None:
    """What a board reports before there ever was a collector, the broker's word is enough for."""
    topics = Topics(fleet, "probe")
    with MqttClient(Endpoint("127.0.0.1", broker.port), "probe", SessionOptions(subscriptions=[topics.ack])) as client:
        client.publish(Message(topics.status, b"{}", retain=True))
        client.inbox.get(timeout=_PATIENCE_S)


def histogram(dials: Sequence[float], arrivals: Sequence[float]) -> list[Sequence[str]]:
    """Second by second: how many boards wanted to connect, and how many were admitted; that as a bar too."""
    wanted, admitted = (Counter(int(at_s) for at_s in times) for times in (dials, arrivals))
    most = max(admitted.values(), default=1)
    return [
        (f"{second}", f"{wanted[second]}", f"{admitted[second]}", "#" * round(_BAR_WIDTH * admitted[second] / most))
        for second in range(max(admitted, default=-1) + 1)
    ]


def storm(
    devices: int, period_s: float, down_s: float, folder: Path, steady_s: float = _STEADY_S
) -> tuple[Course, int, int]:
    """Run it; the course that it took, rows made, rows lost."""
    broker, database = Broker(folder), folder / "fleet.sqlite"
    process = broker.start()
    command = [sys.executable, "-m", "fleet.cli", "fleet", "collect", "--port", str(broker.port), "--db", str(database)]
    with psutil.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as collector:
        wait_for_collector(broker, _FLEET)
        wishes = SimulationOptions(devices, fleet=_FLEET, period_s=period_s, settle_s=_PATIENCE_S)
        simulation = Simulation(Endpoint("127.0.0.1", broker.port), wishes)
        course = Course(broker, process, collector, simulation.outcome, steady_s, down_s)
        try:
            simulation.run(course.is_over)
        finally:
            collector.terminate()
            told, _ = collector.communicate()
            course.process.kill()
            course.process.wait()
    print("collector:", json.loads(told), file=sys.stderr)
    return course, *lost(database, simulation.made)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A reconnect storm of simulated boards.")
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--period", type=float, default=60.0, help="of telemetry, in seconds")
    parser.add_argument("--down", type=float, default=10.0, help="for so many seconds the broker is gone")
    add_output_option(parser)
    options = parser.parse_args()
    set_up_logging("error")
    allow_files(options.devices)
    with tempfile.TemporaryDirectory() as folder:
        course, made, missing = storm(options.devices, options.period, options.down, Path(folder))
    publish([constants(course), arrivals_section(course), bars_section(bars(course, made, missing))], options)


def constants(course: Course) -> Section:
    """What a board takes, here."""
    n, steady = course.outcome.devices, course.steady
    rows_s = max(steady.get("rows/s", 0.0), 1e-9)
    rows: list[Sequence[str]] = [
        (
            name,
            f"{steady.get(f'{name} bytes', 0) / n / 1024:.1f}",
            f"{steady.get(f'{name} cores', 0.0):.3f}",
            f"{1e3 * steady.get(f'{name} cores', 0.0) / rows_s:.2f}",
        )
        for name in ("simulation", "mosquitto", "collector")
    ]
    note = f"{n} boards, {rows_s:.0f} rows/s stored and confirmed; until all were connected: {course.came_s or 0:.0f} s"
    return Section("What it takes", ("process", "KiB per board", "cores", "core ms per row"), rows, note)


def arrivals_section(course: Course) -> Section:
    """The way back, also of those that are, where not all are."""
    note = (
        "wanted: by the boards' own jitter, an attempt that failed counts again; admitted: as the machine got to them"
    )
    rows = histogram(course.dials, course.arrivals)
    return Section("Arrivals after the broker's return", ("second", "wanted", "admitted", ""), rows, note)


def bars(course: Course, made: int, missing: int) -> list[Bar]:
    """What was asked for."""
    n = course.outcome.devices
    busiest = max(Counter(int(at_s) for at_s in course.arrivals).values(), default=0)
    back = len(course.arrivals) if course.back_s is not None else None
    return [
        Bar("connected at once, from this machine", f"{n}", f"{course.connected}", course.connected == n),
        Bar("back after the kill", f"{n}", f"{n if back else 0} in {course.back_s or 0:.0f} s", back is not None),
        at_most(f"rows lost, of {made}", 0.0, float(missing), ""),
        at_most("of the boards in the busiest second", 20.0, 100.0 * busiest / n, " %"),
    ]


if __name__ == "__main__":
    main()
