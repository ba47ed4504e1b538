"""Rollouts at a simulated fleet: a collector, a controller, and a client that records all commands."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from brokers import RealBroker, eventually
from collector_bench import collecting
from simulator_bench import FLEET, simulating, topics, wait_for_collector
from stored import Reports

from agent.contract.signing import Signer
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.receive_queue import ReceiveQueue
from fleet.devices.devices import Devices
from fleet.rollout import controller, stepper
from fleet.rollout.controller import Controller
from fleet.rollout.register import Overview, RolloutRegister
from fleet.rollout.rows import BoardStage
from fleet.rollout.spec import RolloutSpec
from fleet.simulator.simulation import Simulation
from fleet.store.opening import open_store

PATIENCE_S = 60.0


@contextmanager
def a_fleet(broker: RealBroker, where: str, devices: int, **overrides: Any) -> Iterator[Simulation]:
    """Simulate a fleet, once the store has telemetry of each board."""
    with collecting(broker, where):
        wait_for_collector(broker)
        with simulating(broker, devices, **overrides) as simulation:
            with open_store(where) as store:
                eventually(lambda: sum(bool(each.telemetry) for each in Devices(store).all(FLEET)) == devices, 30.0)
            yield simulation


@contextmanager
def controlling(broker: RealBroker, where: str, signer: Signer | None = None) -> Iterator[Controller]:
    """Run a controller that claims and judges more often than usual."""
    stopping = threading.Event()
    made = Controller(broker.endpoint, open_store(where), "controller", signer, lease_s=5.0)
    thread = threading.Thread(target=made.run, args=(stopping.is_set,), name="controller")
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(stepper, "_JUDGE_EVERY_S", 0.5)
        quick.setattr(controller, "_IDLE_S", 0.25)
        thread.start()
        try:
            yield made
        finally:
            stopping.set()
            thread.join(20.0)
            assert not thread.is_alive()


class Commands:
    """All that is sent to boards: `ids` by device and op."""

    def __init__(self, broker: RealBroker) -> None:
        self.ids: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._intake = ReceiveQueue(16 << 20)
        self._client = MqttClient(
            broker.endpoint, "spy", SessionOptions(subscriptions=["tared/v1/+/+/cmd"], receive_queue=self._intake)
        )

    def __enter__(self) -> Commands:
        self._client.__enter__()
        assert self._client.wait_connected(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def sent_ids(self, op: str) -> dict[str, set[str]]:
        """Return the ids of all commands of this op so far, by device."""
        for topic, payload, _ in self._intake.pop(1 << 30, 0.2, 0.0):
            document = json.loads(payload)
            self.ids[topic.decode().split("/")[3], document["op"]].add(document["id"])
        return {device: ids for (device, each), ids in self.ids.items() if each == op}


def begin(where: str, spec: RolloutSpec, why: str = "") -> str:
    """Create a rollout; return its id."""
    with open_store(where) as store:
        register = RolloutRegister(store, "operator")
        return register.create(FLEET, spec, register.plan(FLEET, spec), why)


def overview(where: str, identity: str) -> Overview:
    with open_store(where) as store:
        return RolloutRegister(store, "operator").show(identity)[0]


def ended(where: str, identity: str, within_s: float = PATIENCE_S) -> Overview:
    """Return the rollout once it is over."""
    eventually(lambda: overview(where, identity).rollout.state.is_finished, within_s)
    return overview(where, identity)


def boards(where: str, identity: str, *states: BoardStage) -> set[str]:
    """Return the names of the boards in these states."""
    with open_store(where) as store:
        return {each.name for each in RolloutRegister(store, "").show(identity)[1] if each.state in states}


def names_of(*numbers: int) -> set[str]:
    """Return the names of the boards of these numbers."""
    return {topics(number).device for number in numbers}


def swaps(where: str, number: int) -> list[str]:
    """Return the engines that a board has gone to, in order; "rollback:" precedes those that it went back to."""
    with open_store(where) as store:
        found = Reports(store).reports_of(FLEET, topics(number).device)
        sent = [(each.kind, json.loads(each.document)) for each in found if each.kind in ("swap", "rollback")]
    return [f"{'rollback:' if kind == 'rollback' else ''}{document['artefact']}" for kind, document in sent]
