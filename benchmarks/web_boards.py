"""`tared web` as a process, and boards that report to it, for benchmarks/web.py and web_pictures.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint, MqttClient
from agent.mqtt.message import Message
from benchmarks.peers import ROOT

FLEET = "default"
_START_S = 60.0
_PACE_S = 0.003  # the client's mailbox is bounded


@contextmanager
def pages(endpoint: Endpoint, *options: str) -> Iterator[tuple[str, int]]:
    """Run `tared web` at a broker; the address of its pages and the process's id. options: more of the command's."""
    command = [sys.executable, "-m", "fleet.cli", "web", "--host", endpoint.host, "--port", str(endpoint.port)]
    command += ["--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as web:
        try:
            assert web.stderr is not None
            found = re.search(r"http://\S+", web.stderr.readline())
            if found is None:
                raise SystemExit("error: tared web does not serve")
            yield found[0], web.pid
        finally:
            web.terminate()


class Boards:
    """A context manager that publishes documents of boards."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = MqttClient(endpoint, "benchmark-boards")

    def __enter__(self) -> Boards:
        self._client.__enter__()
        if not self._client.wait_connected(_START_S):
            raise SystemExit("error: no connection to the broker")
        return self

    def __exit__(self, *_: object) -> None:
        self._client.__exit__(None, None, None)

    def say(self, board: str, topic: str, **document: Any) -> None:
        payload = json.dumps(document).encode()
        self._client.publish(Message(Topics(FLEET, board).below(topic), payload, retain=topic != "event"))
        time.sleep(_PACE_S)

    def introduce(self, board: str, state: str = "online", engine: str = "13aef3747cad4ee6", **status: Any) -> None:
        """Status and birth."""
        self.say(board, "status", state=state, session="s", boot_id="elsewhere", ts=time.time(), **status)
        facts = {"precision": "int8", "int8_macs_share": 0.981, "regimes": [engine, "30fad8dca106f9ac"]}
        runtimes = {"runtime": "openvino", "version": "2026.4.1"}
        self.say(board, "birth", agent_version="0.2.0", engine=engine, runtimes=runtimes, **facts)

    def report(self, board: str, fidelity: float, gain_db: float = 0.4, drift: str = "calm", **more: Any) -> None:
        """Telemetry."""
        spread = 0.03 if fidelity > 0.8 else 0.08
        camera = {
            "fps": 29.97,
            "latency_ms": {"p50": 8.4, "p99": 12.1},
            "dropped": {"stale": 3},
            "drift": {"state": drift, "gain_db": gain_db, "tolerance_db": 3.0},
            "fidelity": {"estimate": fidelity, "low": fidelity - spread, "high": min(1.0, fidelity + spread), "n": 212},
            "accuracy": {"estimate": 0.93, "low": 0.91, "high": 0.95, "n": 800},
        }
        health = {"rss_bytes": 2.1e8, "memory_available_bytes": 3.4e9, "load_1min": 1.2}
        health |= {"temperature_cpu_c": 54.0, "power_w": 7.4}
        document = {"cameras": {"yard": camera}, "health": health, **more}
        self.say(board, "telemetry", epoch=1, seq=1, ts=time.time(), **document)
