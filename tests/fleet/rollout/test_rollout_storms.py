"""A rollout in a storm: controllers are killed, boards seem to flap, answers are repeated or forged, the store is held.

No board beyond a failed wave gets a command, and none gets one twice.
A client that may publish under a board's name can speak for it (SECURITY.md): true ids are not forged here.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import uuid
from collections.abc import Iterator

import pytest
from brokers import RealBroker
from databases import where as where
from rollout_bench import Commands, a_fleet, begin, boards, ended, overview
from simulator_bench import topics
from warm_start import WarmProcess

from agent.common.errors import AgentError
from agent.contract.messages import DeviceState, Status
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.message import Message
from fleet.rollout.rows import BoardStage, RolloutState
from fleet.rollout.spec import RolloutSpec
from fleet.simulator.options import BadEngines
from fleet.store.opening import open_store

BOARDS = 12
KILLS = 12
LEASE_S = 1.0
_STATES: tuple[DeviceState, ...] = ("online", "offline", "degraded", "stopping")

pytestmark = [pytest.mark.broker, pytest.mark.trial, pytest.mark.timeout(600)]


class Storm(threading.Thread):
    """Strangers that publish, and another process that holds the store, until the end of the context."""

    def __init__(self, broker: RealBroker, where: str) -> None:
        super().__init__(name="storm", daemon=True)
        self._where = where
        self._chance = random.Random(7)
        self._ending = threading.Event()
        options = SessionOptions(subscriptions=["tared/v1/+/+/cmd/+/result"])
        self._client = MqttClient(broker.endpoint, "stranger", options)

    def __enter__(self) -> Storm:
        self._client.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join()
        # A board that a stranger called offline is sent nothing until it is back.
        self._client.close(*(self._status(number, "online") for number in range(BOARDS)), timeout_s=60.0)

    def run(self) -> None:
        repeated: set[bytes] = set()  # the repetitions come back, too
        while not self._ending.wait(0.02):
            number = self._chance.randrange(BOARDS)
            board = topics(number)
            self._client.publish(self._status(number, self._chance.choice(_STATES)))
            name = uuid.uuid4().hex
            status = self._chance.choice(["SUCCEEDED", "FAILED", "ACCEPTED", "EXPIRED"])
            document = json.dumps({"id": name, "status": status}).encode()
            self._client.publish(Message(board.result(name), document))
            self._client.publish(Message(board.result(name), self._chance.randbytes(200)))
            while not self._client.inbox.empty():  # each answer three times
                answer = self._client.inbox.get()
                if answer.payload and answer.payload not in repeated:
                    repeated.add(answer.payload)
                    for _ in range(2):
                        self._client.publish(Message(answer.topic, answer.payload))
            if self._chance.random() < 0.01:
                self._hold_the_store()

    def _status(self, number: int, state: DeviceState) -> Message:
        there = Status(state=state, session=uuid.uuid4().hex, boot_id="b", ts=time.time())
        return Message(topics(number).status, there.to_json())

    def _hold_the_store(self) -> None:
        with contextlib.suppress(AgentError), open_store(self._where) as store, store.transaction("write") as held:
            held.execute("UPDATE devices SET epoch = epoch WHERE 1 = 0")
            self._ending.wait(self._chance.uniform(0.2, 1.5))


@contextlib.contextmanager
def controllers(broker: RealBroker, where: str) -> Iterator[list[WarmProcess]]:
    arguments = ["fleet", "rollout", "run", "--db", where, "--port", str(broker.port), "--lease", str(LEASE_S)]
    processes = [WarmProcess(arguments), WarmProcess(arguments)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_storm_commands_no_board_twice_and_none_beyond_a_failed_wave(mosquitto: RealBroker, where: str) -> None:
    chance, kills = random.Random(11), 0
    spec = RolloutSpec("recalibrate", gates="latency_p99<=1.25x", soak_s=0.5, order="name", waves="2,8,100%", at_once=3)
    arguments = ["fleet", "rollout", "run", "--db", where, "--port", str(mosquitto.port), "--lease", str(LEASE_S)]
    with a_fleet(mosquitto, where, BOARDS, bad=BadEngines(first=2, last=7), job_s=1.0), Commands(mosquitto) as commands:
        identity = begin(where, spec)
        with controllers(mosquitto, where) as processes:
            with Storm(mosquitto, where):
                while kills < KILLS and not overview(where, identity).rollout.state.is_finished:
                    time.sleep(chance.uniform(0.3, 2.0))
                    number = chance.randrange(2)
                    processes[number].kill()
                    processes[number].wait()
                    processes[number] = WarmProcess(arguments)
                    kills += 1
            rollout = ended(where, identity, 120.0).rollout
        sent, back = commands.sent_ids("recalibrate"), commands.sent_ids("rollback")
    assert rollout.state is RolloutState.ROLLED_BACK
    assert kills >= 3
    commanded = set(sent)
    assert commanded <= {topics(each).device for each in range(8)}, "no board beyond the bad wave"
    assert {len(ids) for ids in sent.values()} == {1}
    assert all(len(ids) == 1 for ids in back.values())
    assert set(back) <= commanded
    assert boards(where, identity, BoardStage.WAITING) >= {topics(each).device for each in range(8, BOARDS)}
