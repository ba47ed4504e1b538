"""Ten thousand simulated boards, and a rollout in four waves at them: once all is well, once the third wave is bad.

    python -m benchmarks.fleet_rollout [--devices 10000] [--period 60] [--db URL] [--json | --markdown]

mosquitto, the collector, the controller and the simulation are a process each. The first rollout runs to its end. The
boards of the second one's third wave make a bad engine of what they are told, which only fidelity and latency show:
that wave is to be stopped and to go back, and no board beyond it to be told anything. Who was told what is heard at
the broker, not read in the controller's tables.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from agent.common.console import set_up_logging
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.receive_queue import ReceiveQueue
from benchmarks.fleet_storm import Broker, wait_for_collector
from benchmarks.report import Bar, Section, add_output_option, bars_section, publish
from fleet.devices.devices import Devices
from fleet.rollout.register import RolloutRegister
from fleet.rollout.rows import BoardStage, RolloutState
from fleet.rollout.spec import RolloutSpec
from fleet.simulator.options import BadEngines, SimulationOptions
from fleet.simulator.simulation import Simulation, allow_files
from fleet.store.opening import open_existing

_FLEET = "rollout"
_GATES = "fidelity>=0.8,latency_p99<=1.25x,failures<=5%"
_BAD_METHOD = "percentile:99.9"  # what the second rollout asks for, so that the first one's engines are good
_PATIENCE_S = 1500.0
_COMING_S = 400.0


@dataclass
class Course:
    """What came of one rollout. told: commands by op and board. took_s: from its creation to its end."""

    state: RolloutState | None
    waves: list[dict[str, int]]
    gates: int
    took_s: float
    told: dict[str, dict[str, set[str]]] = field(default_factory=dict)


class Listener:
    """Commands as they pass the broker."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._intake = ReceiveQueue(256 << 20)
        self._client = MqttClient(
            endpoint, "listener", SessionOptions(subscriptions=["tared/v1/+/+/cmd"], receive_queue=self._intake)
        )

    def __enter__(self) -> Listener:
        self._client.__enter__()
        self._client.wait_connected(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def told(self) -> dict[str, dict[str, set[str]]]:
        """Ids by op and board, since it was asked last."""
        found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        while arrivals := self._intake.pop(64 << 20, 1.0, 0.0):
            for topic, payload, _ in arrivals:
                document = json.loads(payload)
                found[document["op"]][topic.decode().split("/")[3]].add(document["id"])
        return found


def carried_out(where: str, spec: RolloutSpec, listener: Listener) -> Course:
    """A rollout from its creation to its end, by a controller that runs."""
    began_s = time.monotonic()
    with open_existing(where) as store:
        book = RolloutRegister(store, "benchmark")
        identity = book.create(_FLEET, spec, book.plan(_FLEET, spec), "")
        while True:
            overview, _, _ = book.show(identity)
            if overview.rollout.state.is_finished or time.monotonic() - began_s > _PATIENCE_S:
                break
            time.sleep(2.0)
    waves = [{each.value: n for each, n in overview.counts[wave].items() if n} for wave in sorted(overview.counts)]
    gates = sum(len(json.loads(each.document)["gates"]) for each in overview.records if each.what.startswith("gate"))
    for each in overview.records:
        print(f"{each.at:.0f} {each.what}: {each.why}", file=sys.stderr)
    state = overview.rollout.state if overview.rollout.state.is_finished else None
    return Course(state, waves, gates, time.monotonic() - began_s, listener.told())


def rollouts(
    devices: int,
    period_s: float,
    where: str,
    folder: Path,
    job_s: float = 20.0,
    failures: float = 0.01,
    gates: str = _GATES,
) -> list[Course]:
    """Both of them, at one fleet. job_s: what a job takes there, in the median. failures: how many of them fail."""
    broker = Broker(folder)
    process = broker.start()
    endpoint = Endpoint("127.0.0.1", broker.port)
    tared = [sys.executable, "-m", "fleet.cli", "fleet"]
    at = ["--port", str(broker.port), "--db", where]

    def start(*command: str) -> psutil.Popen:
        return psutil.Popen([*tared, *command, *at], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    collector = start("collect")
    wait_for_collector(broker, _FLEET)
    controller = start("rollout", "run")
    first, last = round(0.05 * devices), round(0.25 * devices) - 1
    bad = BadEngines(_BAD_METHOD, first, last)
    wishes = SimulationOptions(
        devices, fleet=_FLEET, period_s=period_s, commit_s=5.0, bad=bad, job_s=job_s, failures=failures, settle_s=60.0
    )
    simulation, found = Simulation(endpoint, wishes), list[Course]()

    def operate() -> None:
        by_s = time.monotonic() + _COMING_S
        with open_existing(where) as store:
            while sum(bool(each.telemetry) for each in Devices(store).all(_FLEET)) < devices:
                if time.monotonic() > by_s:
                    return
                time.sleep(5.0)
        with Listener(endpoint) as listener:
            for method in ("percentile:99.99", _BAD_METHOD):
                arguments = {"frames": "64", "method": method}
                spec = RolloutSpec(
                    "recalibrate", arguments, gates=gates, soak_s=1.2 * period_s, at_once=1000, order="name"
                )
                found.append(carried_out(where, spec, listener))

    operator = threading.Thread(target=operate, name="operator")
    operator.start()
    try:
        simulation.run(lambda: not operator.is_alive())
    finally:
        for each in (controller, collector, process):
            each.terminate()
            each.wait()
        operator.join()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A rollout at simulated boards, a good one and a bad one.")
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--period", type=float, default=60.0, help="of telemetry, in seconds")
    parser.add_argument("--db", help="postgresql://...; an SQLite file otherwise")
    add_output_option(parser)
    options = parser.parse_args()
    set_up_logging("error")
    allow_files(options.devices)
    with tempfile.TemporaryDirectory() as folder:
        where = options.db or str(Path(folder) / "fleet.sqlite")
        courses = rollouts(options.devices, options.period, where, Path(folder))
    publish([told(courses), bars_section(bars(courses, options.devices))], options)


def told(courses: list[Course]) -> Section:
    """What became of the boards of each wave."""
    rows: list[Sequence[str]] = [
        (name, str(number), ", ".join(f"{count} {state}" for state, count in sorted(wave.items())))
        for name, course in zip(("good", "third wave bad"), courses, strict=False)
        for number, wave in enumerate(course.waves, 1)
    ]
    took = ", ".join(f"{course.took_s:.0f} s" for course in courses)
    return Section("Boards by wave", ("rollout", "wave", "boards"), rows, f"from creation to end: {took}")


def bars(courses: list[Course], devices: int) -> list[Bar]:
    """What was asked for."""
    if len(courses) < 2:
        return [Bar("both rollouts carried out", "2", str(len(courses)), False)]
    good, bad = courses
    once = Counter(len(ids) for course in courses for ids in course.told.get("recalibrate", {}).values())
    third = round(0.25 * devices)
    beyond = [board for board in bad.told.get("recalibrate", {}) if int(board[4:]) >= third]
    done = bad.waves[2].get(BoardStage.UNDONE.value, 0)
    left = {key: n for key, n in bad.waves[2].items() if key not in ("UNDONE", "FAILED")}
    return [
        Bar(
            "a good one runs to its end",
            "COMPLETED",
            str(good.state and good.state.value),
            good.state is RolloutState.COMPLETED,
        ),
        Bar("gates evaluated of four waves", "12", str(good.gates), good.gates == 12),
        Bar(
            "a bad wave is stopped",
            "ROLLED_BACK",
            str(bad.state and bad.state.value),
            bad.state is RolloutState.ROLLED_BACK,
        ),
        Bar("its boards went back", f"all of {sum(bad.waves[2].values())}", f"{done}, left {left}", not left),
        Bar("boards beyond it that were told anything", "0", str(len(beyond)), not beyond),
        Bar("commands that a board was told, at most", "1", str(max(once, default=0)), set(once) == {1}),
    ]


if __name__ == "__main__":
    main()
