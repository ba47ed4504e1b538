"""A simulated fleet in a thread of its own, at a real broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from brokers import RealBroker, Watcher, eventually

from agent.contract.topics import Topics
from agent.mqtt.message import Message
from fleet.operator import new_command, send
from fleet.simulator.context import board_name
from fleet.simulator.options import SimulationOptions
from fleet.simulator.simulation import Simulation

FLEET = "simulated"


def topics(number: int) -> Topics:
    return Topics(FLEET, board_name(number))


@contextmanager
def simulating(broker: RealBroker, devices: int, **wishes: Any) -> Iterator[Simulation]:
    """Simulate boards, from when all are connected to the end of the block; the outcome is final then."""
    fast = {"period_s": 0.2, "job_s": 0.3, "failures": 0.0, "settle_s": 30.0, "commit_s": 0.1, **wishes}
    simulation = Simulation(broker.endpoint, SimulationOptions(devices, fleet=FLEET, **fast))
    stopping, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            simulation.run(stopping.is_set)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="simulation")
    thread.start()
    try:
        eventually(lambda: bool(failed) or simulation.outcome.connected == devices, 20.0)
        yield simulation
    finally:
        stopping.set()
        thread.join(60.0)
        assert not thread.is_alive()
        if failed:
            raise failed[0]


def ask(broker: RealBroker, number: int, op: str, **arguments: Any) -> Any:
    """Return the final result of a command to the board of this number."""
    command = new_command(op, arguments, time.time())
    *_, result = send(broker.endpoint, topics(number), command, silence_s=10.0)
    return result


def wait_for_collector(broker: RealBroker) -> None:
    """Wait until a collector is subscribed: without one, the broker's acknowledgement would be enough for a board."""
    probe = Topics(FLEET, "probe")
    with Watcher(broker.endpoint) as watcher:
        watcher._client.publish(Message(probe.status, b"{}", retain=True))
        watcher.expect(probe.ack)
