"""A daemon to which something happens at a chosen line of a job, and the daemon that comes after it."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import psutil
import yaml
from brokers import RealBroker, eventually
from daemon_life import LIMIT_S, TOPICS, Life, living
from kept import records_in
from onnx import numpy_helper
from worlds import World

from agent.contract.commands import CommandResult
from agent.jobs.job import JobRecord
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.message import Message
from engines.store.artefact import read_artefact
from fleet import operator

FIRST_COMMIT = "event=job trigger=first-start step=COMMITTED"


@dataclass
class Case:
    """One world with its camera and broker. answers: by command, the results at its sender."""

    world: World
    scene: Path
    broker: RealBroker
    stack: ExitStack
    listeners: dict[str, MqttClient] = field(default_factory=dict)
    senders: list[threading.Thread] = field(default_factory=list)
    answers: dict[str, list[CommandResult]] = field(default_factory=dict)

    @contextmanager
    def living(self, name: str, driver: str = "") -> Iterator[Life]:
        """The daemon, alive until the end of the block at most. driver: Python that its process runs before it."""
        with living(self.world, self.scene, self.broker, name, driver) as life:
            yield life

    def give_no_time(self) -> None:
        """No job comes to its end in time."""
        self.world.config["calibration"]["within_s"] = 0.001
        self.world.config["recalibration"]["timeout_s"] = 0.002

    def output(self, name: str) -> Path:
        """Where what a life prints lies."""
        return self.world.folder / f"{name}.out"

    def send(self, op: str, **arguments: str) -> str:
        """A command, which its sender repeats until its result comes; the id."""
        command = operator.new_command(op, arguments, time.time(), valid_s=LIMIT_S * 3)

        def follow() -> None:
            for answer in operator.send(self.broker.endpoint, TOPICS, command, silence_s=LIMIT_S * 3):
                self.answers.setdefault(command.id, []).append(answer)

        self.listeners[command.id] = self.stack.enter_context(
            MqttClient(
                self.broker.endpoint,
                f"listener-{command.id}",
                SessionOptions(subscriptions=[TOPICS.result(command.id)]),
            )
        )
        assert self.listeners[command.id].wait_connected(LIMIT_S)
        self.senders.append(threading.Thread(target=follow))
        self.senders[-1].start()
        return command.id

    def outcome(self, command_id: str) -> CommandResult:
        """Return the final result at its sender; fail where other final results were published than that one."""
        for sender in self.senders:
            sender.join(LIMIT_S)
            assert not sender.is_alive(), f"no result; received {self.answers}"
        end = Message(TOPICS.result(command_id), b"end")  # after which nothing is on its way
        self.listeners[command_id].publish(end)
        received = []
        while (payload := self.listeners[command_id].inbox.get(timeout=LIMIT_S).payload) != b"end":
            received.append(CommandResult.from_json(payload))
        finals = {str(each.to_json()): each for each in received if each.final}
        assert len(finals) == 1, finals
        (final,) = finals.values()
        assert final == self.answers[command_id][-1]
        return final

    def records(self, trigger: str) -> list[JobRecord]:
        return [record for record in records_in(self.world.state_dir) if record.trigger == trigger]

    def check_killed(self, life: Life) -> None:
        assert life.process.wait(LIMIT_S) == -signal.SIGKILL, life.log.read_text()

    def check_sound(self, life: Life) -> None:
        """The daemon serves; nothing half lies about."""
        life.wait(lambda: life.status()["frames"] > 0)
        self.check_store()
        assert not life.said("state\\.damaged")
        assert not life.said("Traceback")

    def check_store(self) -> None:
        """Check that the store is whole; nothing half written stays in the state directory, and no job's frames but a
        running one's."""
        for artefact in (self.world.state_dir / "artefacts").iterdir():
            read_artefact(artefact)
        eventually(lambda: self._leftovers() == [], LIMIT_S)  # a daemon that lives may be writing a file just now

    def _leftovers(self) -> list[Path]:
        state_dir = self.world.state_dir
        half_written = [path for ending in ("new", "old", "gone") for path in state_dir.rglob(f".*.{ending}")]
        frames = list((state_dir / "jobs").glob("*"))
        records = records_in(state_dir)
        running = {record.id for record in records if not record.state.is_finished}
        return [*half_written, *(path for path in frames if path.name not in running)]

    @property
    def current(self) -> str:
        return (self.world.state_dir / "current").readlink().name

    def children(self) -> list[int]:
        """The processes that work on a job of this world."""
        jobs = str(self.world.state_dir / "jobs")
        found = psutil.process_iter(["cmdline"])
        return [each.pid for each in found if any(word.startswith(jobs) for word in each.info["cmdline"] or [])]


def live_world(world: World, port: int) -> World:
    """The same with a camera that is a live one to the daemon, and a broker; nothing starts there by itself."""
    world.change(
        camera={"source": "rtsp://camera"},
        observe={"period_s": 0.05, "alert_period_s": 0.05},
        recalibration={"cooldown_s": 0.0, "automatic": False, "max_loss": 1.0, "max_slowdown": 100.0},
        mqtt={"host": "127.0.0.1", "port": port},
    )
    (world.folder / "scene").write_text(str(world.folder / "clip.avi"))
    return world


@contextmanager
def in_world(world: World, broker: RealBroker) -> Iterator[Case]:
    """A case of its own; its listeners go with the block."""
    with ExitStack() as stack:
        yield Case(world, world.folder / "scene", broker, stack)


def copied(world: World, folder: Path, broker: RealBroker) -> World:
    """A world of its own, from one that a daemon has lived in."""
    shutil.copytree(world.folder, folder, symlinks=True)
    config = yaml.safe_load(yaml.safe_dump(world.config))
    config["mqtt"].update(host=broker.host, port=broker.port)
    return World(folder, config)


def make_decided(world: World) -> None:
    """Let the model prefer one class by so much that no quantisation makes it waver: whatever is built is good."""
    path = world.folder / "model.onnx"
    model = onnx.load(path)
    name = model.graph.node[-1].input[2]
    (bias,) = (each for each in model.graph.initializer if each.name == name)
    values = numpy_helper.to_array(bias).copy()
    values[2] += 100.0
    bias.CopyFrom(numpy_helper.from_array(values, name))
    onnx.save(model, path)


def put_other_model(world: World) -> None:
    """One with other weights, in the place of the one that is served."""
    path = world.folder / "model.onnx"
    model = onnx.load(path)
    weights = model.graph.initializer[0]
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * 1.5, weights.name))
    new = path.with_name("new.onnx")
    onnx.save(model, new)
    new.replace(path)
