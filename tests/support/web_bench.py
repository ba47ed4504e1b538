"""A site of `tared web` in this process, boards that report to it, and one that answers commands."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import uvicorn
from brokers import eventually
from mqtt_clients import connected

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint, MqttClient
from agent.mqtt.message import Message
from fleet.web.boards import LiveBoards
from fleet.web.command import Listen, bound
from fleet.web.orders import Orders
from fleet.web.room import FleetRoom
from fleet.web.server import PageServer, WebOptions, create_app

BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass
class Site:
    """Pages at a port of the loopback interface. headers: of each request."""

    port: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
        """Return status, headers and text of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10.0)
        with contextlib.closing(connection):
            form = {"Content-Type": "application/x-www-form-urlencoded"} if body else {}
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body or None, {**self.headers, **form, **given})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode("utf-8", "replace")

    def page(self, path: str) -> str:
        status, _, text = self.ask("GET", path)
        assert status == 200, text
        return text

    def answers(self, path: str) -> bool:
        try:
            return self.ask("GET", path)[0] == 200
        except OSError:
            return False

    def token(self, board: str) -> str:
        (token, *_) = re.findall(r'name="token" value="([^"]+)"', self.page(f"/boards/{quote(board)}"))
        return str(token)

    def order(self, board: str, **fields: str) -> int:
        body = urlencode({"token": self.token(board), **fields})
        return self.ask("POST", f"/boards/{quote(board)}/orders", body)[0]

    def parts(self, path: str) -> Generator[str, None, None]:
        """Yield the changed parts of a page, as its stream sends them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30.0)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=dict(self.headers))
            answer = connection.getresponse()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            for line in answer:
                if line.startswith(b"data: "):
                    yield str(json.loads(line[6:]))


@dataclass
class OwnSite(Site):
    """A site that this process serves."""

    boards: LiveBoards = field(kw_only=True)


@contextlib.contextmanager
def serving(
    endpoint: Endpoint,
    signer: Signer | None = None,
    password: str = "",
    fleet: str = "f",
    port: int = 0,
    db: str | None = None,
    files: Path | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Iterator[OwnSite]:
    """Serve a site that follows a fleet at this broker, and shows its store where there is one."""
    options = WebOptions(password=password)
    with (
        LiveBoards(endpoint, fleet, clock) as boards,
        bound(Listen("127.0.0.1", port)) as listener,
        FleetRoom(db or "", fleet, files, clock=clock) as room,
    ):
        app = create_app(boards, Orders(endpoint, fleet, signer), options, room if db is not None else None, clock)
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        server = PageServer(config, options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            eventually(lambda: server.started)
            eventually(lambda: not boards.trouble)
            yield OwnSite(listener.getsockname()[1], boards=boards)
        finally:
            server.should_exit = True
            thread.join(10.0)


class Board:
    """A board that publishes documents, and answers each command with these results."""

    def __init__(self, endpoint: Endpoint, name: str, *answers: Mapping[str, Any], fleet: str = "f") -> None:
        self.topics = Topics(fleet, name)
        self.commands: list[dict[str, Any]] = []
        self._endpoint, self._answers = endpoint, answers
        self._stack = contextlib.ExitStack()
        self._ending = False

    def __enter__(self) -> Board:
        self._client: MqttClient = self._stack.enter_context(connected(self._endpoint, self.topics.command))
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._thread.join(5.0)
        self._stack.close()

    def say(self, topic: str, retain: bool = False, **document: Any) -> None:
        payload = json.dumps(document).encode()
        self._client.publish(Message(self.topics.below(topic), payload, retain=retain))

    def say_of(self, name: str, topic: str, **document: Any) -> None:
        """Publish a document of another board."""
        payload = json.dumps(document).encode()
        self._client.publish(Message(Topics(self.topics.fleet, name).below(topic), payload))

    def publish(self, message: Message) -> None:
        self._client.publish(message)

    def report(self, fidelity: float, gain_db: float = 0.5, **more: Any) -> None:
        camera = {
            "fps": 10.0,
            "latency_ms": {"p50": 3.0, "p99": 7.0},
            "dropped": {"stale": 2},
            "drift": {"state": "calm", "gain_db": gain_db, "tolerance_db": 3.0},
            "fidelity": {"estimate": fidelity, "low": fidelity - 0.1, "high": 1.0, "n": 50},
        }
        self.say("telemetry", epoch=1, seq=1, ts=time.time(), cameras={"yard": camera}, **more)

    def _answer(self) -> None:
        while not self._ending:
            with contextlib.suppress(Exception):
                command = json.loads(self._client.inbox.get(timeout=0.1).payload)
                self.commands.append(command)
                for answer in self._answers:
                    document = json.dumps({"id": command["id"], **answer}).encode()
                    self._client.publish(Message(self.topics.result(command["id"]), document))


@contextlib.contextmanager
def serving_gate(
    endpoint: Endpoint, *answers: Mapping[str, Any], signer: Signer | None = None
) -> Iterator[tuple[OwnSite, Board]]:
    """Serve pages, once a board called gate has reported a fidelity of 0.5."""
    with serving(endpoint, signer) as site, Board(endpoint, "gate", *answers) as board:
        board.report(0.5)
        eventually(lambda: site.boards.get("gate") is not None)
        yield site, board
