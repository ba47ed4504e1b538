"""`python -m loss_processes device|collector PORT FOLDER`: what the tests of lost messages kill and start again.

The device reports as fast as it may until FOLDER/quiet is there, and notes in FOLDER/committed what its disk has.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from agent.common.timing import Backoff
from agent.contract.messages import Ack, Birth
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint
from agent.mqtt.config import OutboxConfig
from agent.uplink import outbox as outbox_module
from agent.uplink.link import MqttLink
from agent.uplink.outbox import TELEMETRY, Outbox
from agent.uplink.outbox_store import ALARM, EVENT, SAMPLE, Key, OutboxStore
from fleet.collector.collector import Collector
from fleet.store.opening import open_store

TOPICS = Topics("fleet", "board")
DATABASE, COMMITTED, QUIET, COLLECTED = "outbox.sqlite", "committed", "quiet", "fleet.sqlite"
_KINDS = (TELEMETRY, SAMPLE), (TELEMETRY, SAMPLE), ("job", EVENT), ("alarm", ALARM)
_PERIOD_S = 0.002


def document(epoch: int, seq: int, kind: str) -> bytes:
    """Telemetry or an event with a hash of its own number, so that none can replace another."""
    words = hashlib.sha256(f"{epoch} {seq}".encode()).hexdigest()
    fields: dict[str, Any] = {"epoch": epoch, "seq": seq, "ts": 0.0}
    fields |= {"cameras": {}, "health": {"words": words}} if kind == TELEMETRY else {"kind": kind, "words": words}
    return json.dumps(fields).encode()


def device(endpoint: Endpoint, folder: Path) -> None:
    """Report until killed."""
    log = os.open(folder / COMMITTED, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    class Noted(OutboxStore):
        def commit(self, work: Any, last: Key, again: bool = False) -> None:
            super().commit(work, last, again)
            os.write(log, f"{last[0]} {last[1]}\n".encode())

    vars(outbox_module)["OutboxStore"] = Noted  # the class that the outbox uses
    config = OutboxConfig(commit_s=0.05, backlog_per_s=10_000.0, confirm="collector")
    birth, backoff = Birth(agent_version="0"), Backoff(0.02, 0.2)
    with (
        Outbox(folder / DATABASE, TOPICS, config) as outbox,
        MqttLink(endpoint, TOPICS, birth, outbox, backoff) as link,
    ):
        number = 0
        while True:
            if not (folder / QUIET).exists():
                kind, rank = _KINDS[number % len(_KINDS)]
                outbox.put(kind, rank, partial(document, kind=kind))
                number += 1
            try:
                ack = Ack.from_json(link.acks.get_nowait().payload)
                outbox.acknowledge(ack.epoch, ack.upto)
            except queue.Empty:
                time.sleep(_PERIOD_S)


def collector(endpoint: Endpoint, folder: Path) -> None:
    """Collect until SIGTERM."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    Collector(endpoint, open_store(folder / COLLECTED)).run(stopping.is_set)


if __name__ == "__main__":
    role, port, place = sys.argv[1:]
    {"device": device, "collector": collector}[role](Endpoint("127.0.0.1", int(port), keepalive_s=2), Path(place))
