"""One run of a simulated board's daemon: the agent's link, outbox, command desk and settings, a scene for a camera."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import JsonValue

from agent.commands.authority import Authority
from agent.commands.dispatcher import Authorisation, CommandDispatcher
from agent.commands.log import CommandLog
from agent.commands.settings import Settings, admit_desired, check_expiry, parse_desired
from agent.common.errors import AgentError
from agent.config import Config
from agent.contract.commands import CommandResult
from agent.contract.messages import Ack, Birth
from agent.contract.wire import MessageError
from agent.mqtt.client import Endpoint, SessionOptions
from agent.mqtt.message import Message, Reply
from agent.uplink.link import MqttLink
from agent.uplink.outbox import Outbox
from agent.uplink.reporter import Reporter
from fleet.simulator.client import LightClient
from fleet.simulator.context import BoardContext
from fleet.simulator.engines import Engines
from fleet.simulator.event_loop import Timer
from fleet.simulator.handlers import SimulatedHandlers
from fleet.simulator.scene import CAMERA, drift_state

AGENT_VERSION = "simulated"
_IN_MEMORY = Path(":memory:")


class _Reporter(Reporter):
    """Health is told of a board, not of the machine that simulates it."""

    def health(self) -> Mapping[str, JsonValue]:
        return {"rss_bytes": 4.0e8, "memory_available_bytes": 2.0e9, "load_1min": 1.0, "power_mode": "15W"}


class Daemon:
    """`start` it once; then the loop drives it until `stop` or `power_off`, and after that `close` is due."""

    def __init__(self, site: BoardContext, clock: Callable[[], float], restart: Callable[[], None]) -> None:
        """clock: Unix time as the board has it. restart: an operator wants another daemon."""
        plan, self._context, self._loop, self._clock = site.options, site, site.loop, clock
        if site.on_disk:
            site.folder.mkdir(parents=True, exist_ok=True)
        path = site.folder / "outbox.sqlite" if site.on_disk else _IN_MEMORY
        self.outbox = Outbox(path, site.topics, plan.config.mqtt.outbox, clock)
        hardware: dict[str, JsonValue] = {"board": "simulated", "number": site.number}
        hardware["group"] = site.number % plan.simulation.drift.groups
        birth = Birth(agent_version=AGENT_VERSION, hardware=hardware, runtimes={"simulation": "1"})
        self._link = MqttLink(
            plan.endpoint,
            site.topics,
            birth,
            self.outbox,
            client=self._new_client,
            clock=clock,
            boot_id=str(uuid.UUID(int=site.rng.getrandbits(128))),
        )
        self._reporter = _Reporter(self._link, birth, clock)
        self._settings = Settings(
            plan.config, site.folder / "settings.json", lambda _: True, self._tell_settings, self._reporter.error
        )
        self._journal = CommandLog(site.folder / "commands.sqlite", self._reporter.error) if site.on_disk else None
        self._authority = Authority(plan.config.commands, site.topics, local=True, synchronised=lambda: True)
        orders = SimulatedHandlers(site, self._settings, restart)
        self._desk = CommandDispatcher(
            orders.handlers, self._answer, command_log=self._journal, authority=self._authority, reply=self._link.reply
        )
        self._telemetry_timer: Timer | None = None
        self._outbox_timer: Timer | None = None

    @property
    def connected(self) -> bool:
        """Whether it is on the air."""
        return self.client.connected

    @property
    def made(self) -> int:
        """Rows so far."""
        return self.outbox.last[1]

    @property
    def confirmed(self) -> int:
        """How many of them a collector has, as far as is known."""
        return self._context.confirmed.get(self.outbox.epoch, 0)

    def start(self) -> None:
        """What a daemon says and does at its start."""
        self._context.engines.attach_reporter(self._reporter)
        self._desk.restore([])
        self._link.send(self._settings.reported())
        self._link.set_state("online")
        self._link.__enter__()
        self._telemetry_after(self._context.rng.uniform(0.0, self._settings.config.mqtt.telemetry_period_s))

    def stop_producing(self) -> None:
        """Make nothing any more, but hear and send."""
        self._fall_silent()
        self._pump()

    def stop(self) -> None:
        """Say goodbye; see the client's `over`."""
        self.stop_producing()
        self._link.close()

    def power_off(self) -> None:
        """Nobody hears of it but by the will."""
        self._fall_silent()
        self.client.abandon()

    def close(self) -> None:
        """Nothing is written any more."""
        if self._outbox_timer is not None:
            self._outbox_timer.cancel()
        self.outbox.close()

    def _fall_silent(self) -> None:
        self._context.engines.power_off()
        if self._telemetry_timer is not None:
            self._telemetry_timer.cancel()

    def _new_client(self, endpoint: Endpoint, client_id: str, options: SessionOptions) -> LightClient:
        """As MqttLink wants one."""
        site = self._context
        self.client = LightClient(self._loop, endpoint, client_id, options)
        self.client.on_turn, self.client.on_admitted = self._tick, site.on_admitted
        self.client.on_dial = site.on_dial
        faults = site.options.simulation.faults
        if faults.duplicate or faults.delay:
            self.client.draw_delivery = lambda: faults.draw_delivery(site.rng)
        return self.client

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
        while not link.delivered_results.empty():
            command_id = link.delivered_results.get_nowait()
            if self._journal is not None:
                self._journal.mark_delivered([command_id])
        self._pump()

    def _acknowledge(self, message: Message) -> None:
        try:
            ack = Ack.from_json(message.payload)
        except MessageError:
            return
        self.outbox.acknowledge(ack.epoch, ack.upto)
        confirmed = self._context.confirmed
        confirmed[ack.epoch] = max(ack.upto, confirmed.get(ack.epoch, 0))

    def _take_desired(self, payload: bytes) -> None:
        if not payload:
            return
        try:
            document, key = admit_desired(payload, self._authority)
            desired = parse_desired(document, key)
            if desired.version == self._settings.version:
                return
            check_expiry(desired, self._clock(), self._authority)
            self._context.folder.mkdir(parents=True, exist_ok=True)
            self._settings.set(desired.values, Authorisation(desired.version, key), whole=True)
        except AgentError as error:
            self._link.send(self._settings.reported(error))

    def _tell_settings(self, _config: Config) -> None:
        self._link.send(self._settings.reported())

    def _answer(self, result: CommandResult) -> None:
        if result.final:
            self._context.results[result.status] += 1
        self._link.send(result)

    def _pump(self) -> None:
        """What the outbox's thread does, where it has one."""
        while self.outbox.is_due:
            self.outbox.turn()
        at_s = time.monotonic() + self.outbox.patience_s
        if self._outbox_timer is None or at_s < self._outbox_timer.at_s:
            if self._outbox_timer is not None:
                self._outbox_timer.cancel()
            self._outbox_timer = self._loop.call_at(at_s, self._turn_outbox)

    def _turn_outbox(self) -> None:
        self._outbox_timer = None
        self.outbox.turn()
        self._pump()

    def _telemetry_after(self, seconds: float) -> None:
        self._telemetry_timer = self._loop.call_at(time.monotonic() + seconds, self._telemetry)

    def _telemetry(self) -> None:
        site = self._context
        t_s, engines = site.options.now_s(), site.engines
        self._look(t_s, engines)
        self._reporter.telemetry({CAMERA: site.scene.sample(engines.serving, engines.since_s, t_s)})
        self._pump()
        self._telemetry_after(self._settings.config.mqtt.telemetry_period_s)

    def _look(self, t_s: float, engines: Engines) -> None:
        """What the board does by itself: it switches to the engine of another light, it answers an alarm."""
        site = self._context
        light, automatic = site.scene.light(t_s), self._settings.config.recalibration.automatic
        if automatic and engines.job is None and light != engines.serving.light and light in engines.other_lights:
            engines.switch(engines.other_lights[light], "switch")
        gain_db = site.scene.gain_db(engines.serving, t_s)
        state = drift_state(gain_db)
        if state != site.drift:
            site.drift = state
            figures = site.scene.drift(engines.serving, t_s)
            told = {key: figures[key] for key in ("gain_db", "e_value", "clipping_share")}
            kind, detail = ("alarm", {"onset_ts": t_s}) if state == "alarm" else ("drift", {"state": state})
            self._reporter.event(kind, camera=CAMERA, capture_ts=t_s, **detail, **told)
        if state == "alarm" and engines.job is None and automatic:
            engines.start_job("alarm", site.options.simulation.bad.includes(site.number, None))
