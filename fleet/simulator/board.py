"""One simulated board: the agent's link, outbox, command desk and settings, with a scene in the place of a camera."""

from __future__ import annotations

import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from agent.authority import Authority
from agent.clock import unix_s
from agent.command_log import CommandLog
from agent.commands import CommandDesk, Mandate
from agent.errors import AgentError
from agent.link import MqttLink
from agent.messages import Ack, Birth
from agent.outbox import Outbox
from agent.publishing import Message, Reply
from agent.remote import admit_desired, check_expiry, parse_desired
from agent.reporting import Reporter
from agent.requests import CommandResult
from agent.settings import Settings
from agent.topics import Topics
from agent.wire import MessageError
from fleet.simulator.client import LightClient
from fleet.simulator.engines import Engines
from fleet.simulator.faults import rubbish
from fleet.simulator.loop import Loop, Timer
from fleet.simulator.orders import Orders
from fleet.simulator.scene import Scene, drift_state
from fleet.simulator.wishes import Plan

AGENT_VERSION = "simulated"
_IN_MEMORY = Path(":memory:")


class _Reporter(Reporter):
    """Health is told of a board, not of the machine that simulates it."""

    def health(self) -> Mapping[str, JsonValue]:
        return {"rss_bytes": 4.0e8, "memory_available_bytes": 2.0e9, "load_1min": 1.0, "power_mode": "15W"}


class Board:
    """`start` it once; from then on the loop drives it. number: from 0. made: how many rows it has made; confirmed:
    how many of them a collector has said to have, as far as it is known; results: final ones of commands, by status.
    """

    def __init__(self, number: int, plan: Plan, loop: Loop, on_admitted: Callable[[], None]) -> None:
        """on_admitted: called each time a broker has admitted it."""
        self.number = number
        self.topics = Topics(plan.wishes.fleet, board_name(number))
        self.starts = 0
        self.results: Counter[str] = Counter()
        self._plan, self._loop, self._on_admitted = plan, loop, on_admitted
        self._attempts = 0  # of clients before the present one
        self._rng = random.Random(f"{plan.wishes.seed}/{number}")
        self._folder = plan.folder / self.topics.device
        self._skew_s = self._rng.gauss(0.0, plan.wishes.clock_skew_s)
        faults, rng = plan.wishes.faults, self._rng
        self._restores, self._no_clock = rng.random() < faults.restore, rng.random() < faults.no_clock
        self._crashes = self._restores or rng.random() < faults.crash
        self._hostile = rng.random() < faults.hostile
        self._scene = Scene(plan.wishes.drift, number % plan.wishes.drift.groups, rng)
        self._engines: Engines | None = None
        self._confirmed: dict[int, int] = {}
        self._drift = "calm"
        self._timers: list[Timer] = []
        self._outbox_timer: Timer | None = None
        self._client: LightClient | None = None

    @property
    def files(self) -> int:
        """How many stay open: three of an outbox on the disk, and a socket."""
        return 4 if self._crashes else 1

    @property
    def connected(self) -> bool:
        """Whether it is on the air."""
        return self._client is not None and self._client.connected

    @property
    def over(self) -> bool:
        """Whether it has left, after `stop`."""
        return self._client is None or self._client.over

    @property
    def attempts(self) -> int:
        """To connect, so far."""
        return self._attempts + (self._client.attempts if self._client is not None else 0)

    @property
    def last(self) -> tuple[int, int]:
        """The present epoch, and its greatest number so far."""
        return self._outbox.last

    @property
    def made(self) -> int:
        """Rows of the present epoch."""
        return self.last[1]

    @property
    def confirmed(self) -> int:
        """Rows of the present epoch that a collector has, as far as is known."""
        return self._confirmed.get(self._outbox.epoch, 0)

    @property
    def settled(self) -> bool:
        """Whether nothing is waited for: a collector has all of the present epoch, or there never was one; a board
        whose power is off has nothing to wait with."""
        return not self.confirmed or self.confirmed >= self.made or self.over

    def start(self) -> None:
        """Power on."""
        plan, boot_s = self._plan, time.monotonic()
        self.starts += 1

        def clock() -> float:
            return (time.monotonic() - boot_s) if self._no_clock else unix_s() + self._skew_s

        if self._crashes:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        path = self._folder / "outbox.sqlite" if self._crashes else _IN_MEMORY
        self._outbox = Outbox(path, self.topics, plan.config.mqtt.outbox, clock)
        birth = Birth(
            agent_version=AGENT_VERSION,
            hardware={"board": "simulated", "number": self.number, "group": self.number % plan.wishes.drift.groups},
            runtimes={"simulation": "1"},
        )
        boot_id = str(uuid.UUID(int=self._rng.getrandbits(128)))
        self._link = MqttLink(
            plan.endpoint, self.topics, birth, self._outbox, client=self._new_client, clock=clock, boot_id=boot_id
        )
        self._reporter = _Reporter(self._link, birth, clock)
        self._begin_service()
        self._begin_desk()
        self._link.__enter__()
        self._every(self._telemetry, self._rng.uniform(0.0, self._settings.config.mqtt.telemetry_period_s))
        if self._crashes:
            self._every(self.crash, self._rng.expovariate(1.0 / plan.wishes.faults.every_s))
        if self._hostile:
            self._every(self._send_rubbish, self._rng.expovariate(1.0 / plan.wishes.faults.every_s))

    def hush(self) -> None:
        """No more rows, faults or jobs from now on; see `settled`."""
        self._cancel_timers()
        self._pump()

    def stop(self) -> None:
        """Say goodbye; see `over`."""
        self._cancel_timers()
        if not self.over:
            self._link.close()

    def crash(self) -> None:
        """The power fails; it is back after a while."""
        self._cancel_timers()
        if self._client is not None:
            self._client.abandon()
        self._outbox.close()
        self._every(self._come_back, self._rng.uniform(*self._plan.wishes.down_s))

    def cut(self) -> None:
        """Its connection, as when the network or the broker has gone."""
        if self._client is not None:
            self._client.cut()

    def close(self) -> None:
        """At the end of the simulation, after `stop`."""
        self._outbox.close()

    def _come_back(self) -> None:
        aside = self._folder.with_suffix(".backup")
        if self._restores and aside.exists():
            shutil.rmtree(self._folder)
            shutil.copytree(aside, self._folder)
        elif self._restores:
            shutil.copytree(self._folder, aside)
        self.start()

    def _begin_service(self) -> None:
        """Engines survive a start; what was set does where there is a disk."""
        plan, rng = self._plan, self._rng
        if self._engines is None:
            self._engines = Engines(
                self._loop, self._scene, self._reporter, self._now_s, plan.wishes.job_s, plan.wishes.failures, rng
            )
        else:
            self._engines.adopt(self._reporter)
        serving = self._engines.serving
        self._reporter.serves(serving.id, f"cal-{serving.id}")
        self._link.set_state("online")
        self._settings = Settings(
            plan.config, self._folder / "settings.json", lambda _: True, lambda _: None, self._reporter.error
        )

    def _begin_desk(self) -> None:
        assert self._engines is not None, "the service begins first"
        commands, journal = self._plan.config.commands, None
        self._authority = Authority(commands, self.topics, local=True, synchronised=lambda: True)
        if self._crashes:
            journal = CommandLog(self._folder / "commands.sqlite", self._reporter.error)
        self._journal = journal

        def hits(asked: object) -> bool:
            return self._plan.wishes.bad.hits(self.number, asked)

        orders = Orders(self._engines, self._scene, self._settings, self._folder, self._now_s, hits, self._restart)
        self._desk = CommandDesk(
            orders.handlers, self._answer, journal=journal, authority=self._authority, reply=self._link.reply
        )
        self._desk.recall([])
        self._link.send(self._settings.reported())

    def _new_client(self, *arguments: Any, **wishes: Any) -> LightClient:
        """As MqttLink wants one."""
        self._attempts = self.attempts
        self._client = client = LightClient(self._loop, *arguments, **wishes)
        client.on_turn, client.on_admitted = self._tick, self._on_admitted
        faults = self._plan.wishes.faults
        if faults.duplicate or faults.delay:
            client.garbles = lambda: faults.garbled(self._rng)
        return client

    def _now_s(self) -> float:
        return time.monotonic() - self._plan.started_s

    def _every(self, action: Callable[[], None], after_s: float) -> None:
        """Once, after so long, unless the board's power fails before; an action asks for its own next time."""
        self._timers = [timer for timer in self._timers if timer.action is not None and timer.at_s > time.monotonic()]
        self._timers.append(self._loop.at(time.monotonic() + after_s, action))

    def _cancel_timers(self) -> None:
        if self._engines is not None:
            self._engines.power_off()
        for timer in [*self._timers, *([self._outbox_timer] if self._outbox_timer is not None else [])]:
            timer.cancel()

    def _restart(self) -> None:
        """The daemon's: it says goodbye, and is back at once. What lies in memory alone is not to be lost by that."""
        if not self._crashes and 0 < self.confirmed < self.made:
            self._every(self._restart, 1.0)
            return
        self._cancel_timers()
        self._link.close()
        self._every(self._start_again, 1.0)

    def _start_again(self) -> None:
        if not self.over:
            self._every(self._start_again, 0.5)
            return
        self._outbox.close()
        self.start()

    def _tick(self) -> None:
        """Take what came, and move the outbox on."""
        link = self._link
        while not link.acks.empty():
            self._acknowledge(link.acks.get_nowait())
        while not link.inbox.empty():
            message = link.inbox.get_nowait()
            reply = Reply(message.reply_to, message.correlation) if message.reply_to is not None else None
            self._desk.receive(message.payload, self._clock(), message.retain, reply)
        while not link.desired.empty():
            self._take_desired(link.desired.get_nowait().payload)
        while not link.answered.empty():
            command_id = link.answered.get_nowait()
            if self._journal is not None:
                self._journal.delivered([command_id])
        self._pump()

    def _acknowledge(self, message: Message) -> None:
        try:
            ack = Ack.from_json(message.payload)
        except MessageError:
            return
        self._outbox.acknowledge(ack.epoch, ack.upto)
        self._confirmed[ack.epoch] = max(ack.upto, self._confirmed.get(ack.epoch, 0))

    def _take_desired(self, payload: bytes) -> None:
        if not payload:
            return
        try:
            document, key = admit_desired(payload, self._authority)
            desired = parse_desired(document, key)
            if desired.version == self._settings.version:
                return
            check_expiry(desired, self._clock(), self._authority)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._settings.set(desired.values, Mandate(desired.version, key), whole=True)
            self._link.send(self._settings.reported())
        except AgentError as error:
            self._link.send(self._settings.reported(error))

    def _answer(self, result: CommandResult) -> None:
        if result.final:
            self.results[result.status] += 1
        self._link.send(result)

    def _pump(self) -> None:
        """What the outbox's thread does, where it has one."""
        outbox = self._outbox
        while outbox.is_due:
            outbox.turn()
        if self._outbox_timer is not None:
            self._outbox_timer.cancel()
        self._outbox_timer = self._loop.at(time.monotonic() + outbox.patience_s, self._turn_outbox)

    def _turn_outbox(self) -> None:
        self._outbox.turn()
        self._pump()

    def _telemetry(self) -> None:
        assert self._engines is not None, "it was started"
        t_s, engines = self._now_s(), self._engines
        self._look(t_s, engines)
        self._reporter.telemetry({"camera": self._scene.sample(engines.serving, engines.since_s, t_s)})
        self._pump()
        self._every(self._telemetry, self._settings.config.mqtt.telemetry_period_s)

    def _look(self, t_s: float, engines: Engines) -> None:
        """What the board does by itself: it switches to the engine of another light, it answers an alarm."""
        light = self._scene.light(t_s)
        if engines.job is None and light != engines.serving.light and light in engines.other_lights:
            engines.switch(engines.other_lights[light], "switch")
        gain_db = self._scene.gain_db(engines.serving, t_s)
        state = drift_state(gain_db)
        if state != self._drift:
            self._drift = state
            detail: dict[str, Any] = {"capture_ts": t_s, "gain_db": round(gain_db, 2), "e_value": 10.0**gain_db}
            if state == "alarm":
                self._reporter.event("alarm", onset_ts=t_s, **detail, clipping_share=0.1)
            else:
                self._reporter.event("drift", state=state, **detail, clipping_share=0.1)
        if state == "alarm" and engines.job is None and self._settings.config.recalibration.automatic:
            engines.begin("alarm", self._plan.wishes.bad.hits(self.number, None))

    def _send_rubbish(self) -> None:
        victim = Topics(self._plan.wishes.fleet, board_name(self._rng.randrange(self.number + 1)))
        if self._client is not None:
            for message in rubbish(self.topics, victim, self._outbox.epoch, self._rng):
                self._client.publish(message)
        self._every(self._send_rubbish, self._rng.expovariate(1.0 / self._plan.wishes.faults.every_s))


def board_name(number: int) -> str:
    """Of the board of this number: names sort as numbers do."""
    return f"sim-{number:06d}"
