"""Run a simulated board's daemon: the agent's own link, outbox, command dispatcher and settings, and a scene."""

from __future__ import annotations

import uuid
from asyncio import TimerHandle
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import JsonValue

from agent.commands.authority import Authority
from agent.commands.dispatcher import Authorisation, CommandDispatcher, bind
from agent.commands.log import CommandLog
from agent.commands.settings import Settings, admit_desired, check_expiry, parse_desired
from agent.common.clock import Clock
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult
from agent.contract.events import EventKind
from agent.contract.messages import Ack, Birth
from agent.contract.wire import MessageError
from agent.mqtt.client import Endpoint, SessionOptions
from agent.mqtt.message import Message, Reply
from agent.state.store import StateStore
from agent.uplink.link import MqttLink
from agent.uplink.outbox import Outbox
from agent.uplink.reporter import Reporter
from fleet.simulator.client import LightClient
from fleet.simulator.context import BoardContext
from fleet.simulator.engines import Engines
from fleet.simulator.handlers import SimulatedHandlers, Unsimulated
from fleet.simulator.scene import CAMERA, drift_state

AGENT_VERSION = "simulated"
_IN_MEMORY = Path(":memory:")


class _Reporter(Reporter):
    """Reports the health of a board, not of the machine that simulates it."""

    def health(self) -> Mapping[str, JsonValue]:
        return {"rss_bytes": 4.0e8, "memory_available_bytes": 2.0e9, "load_1min": 1.0, "power_mode": "15W"}


class Daemon:
    """One run of a daemon: call `start`; the loop drives it until `stop` or `power_off`; then call `close`."""

    def __init__(self, context: BoardContext, clock: Clock, restart: Callable[[], None]) -> None:
        """clock: the board's. restart: called when an operator restarts the daemon."""
        options, self._context, self._clock = context.options, context, clock
        self._loop = options.loop
        if context.on_disk:
            context.folder.mkdir(parents=True, exist_ok=True)
        path = context.folder / "outbox.sqlite" if context.on_disk else _IN_MEMORY
        self.outbox = Outbox(path, context.topics, options.config.mqtt.outbox, clock)
        hardware: dict[str, JsonValue] = {"board": "simulated", "number": context.number}
        hardware["group"] = context.number % options.simulation.drift.groups
        birth = Birth(agent_version=AGENT_VERSION, hardware=hardware, runtimes={"simulation": "1"})
        self._link = MqttLink(
            options.endpoint,
            context.topics,
            birth,
            self.outbox,
            client=self._new_client,
            clock=clock,
            boot_id=str(uuid.UUID(int=context.rng.getrandbits(128))),
        )
        self._reporter = _Reporter(self._link, birth, clock)
        state = StateStore(context.folder if context.on_disk else None)
        state.report_to(self._reporter.error)
        self._settings = Settings(
            options.config, state, lambda _: True, lambda _: self._link.send(self._settings.reported())
        )
        self._command_log = CommandLog(state, clock=clock) if context.on_disk else None
        self._authority = Authority(options.config.commands, context.topics, local=True, synchronised=lambda: True)
        self._dispatcher = CommandDispatcher(
            bind(lambda: self._settings.config, SimulatedHandlers(context, self._settings, restart), Unsimulated()),
            self._answer,
            command_log=self._command_log,
            authority=self._authority,
            reply=self._link.reply,
        )
        self._telemetry_timer: TimerHandle | None = None
        self._outbox_timer: TimerHandle | None = None

    @property
    def confirmed(self) -> int:
        """The number of its rows that a collector has confirmed."""
        return self._context.confirmed.get(self.outbox.epoch, 0)

    def start(self) -> None:
        """Connect, and report what a daemon reports at its start."""
        self._context.engines.attach_reporter(self._reporter)
        self._dispatcher.restore([])
        self._link.send(self._settings.reported())
        self._link.set_state("online")
        self._link.__enter__()
        self._telemetry_after(self._context.rng.uniform(0.0, self._settings.config.mqtt.telemetry_period_s))

    def stop_producing(self) -> None:
        """End jobs and telemetry; go on sending and receiving."""
        self._fall_silent()
        self._pump()

    def stop(self) -> None:
        """Leave the broker with a goodbye; see the client's `has_left`."""
        self.stop_producing()
        self._link.close()

    def power_off(self) -> None:
        """End without a goodbye, so that the broker publishes the will."""
        self._fall_silent()
        self.client.abandon()

    def close(self) -> None:
        """Close the outbox."""
        if self._outbox_timer is not None:
            self._outbox_timer.cancel()
        self.outbox.close()

    def _fall_silent(self) -> None:
        self._context.engines.power_off()
        if self._telemetry_timer is not None:
            self._telemetry_timer.cancel()

    def _new_client(self, endpoint: Endpoint, client_id: str, options: SessionOptions, clock: Clock) -> LightClient:
        """Make the client that MqttLink uses."""
        context, common = self._context, self._context.options
        self.client = LightClient(self._loop, endpoint, client_id, options, clock)
        self.client.on_turn = self._tick
        self.client.on_dial = lambda: common.dials.append(common.now_s())
        self.client.on_admitted = lambda: common.arrivals.append(common.now_s())
        faults = common.simulation.faults
        if faults.duplicate or faults.delay:
            self.client.draw_delivery = lambda: faults.draw_delivery(context.rng)
        return self.client

    def _tick(self) -> None:
        """Process everything that has arrived, then the outbox."""
        link = self._link
        while not link.acks.empty():
            self._receive_ack(link.acks.get_nowait())
        while not link.inbox.empty():
            message = link.inbox.get_nowait()
            reply = Reply(message.reply_to, message.correlation) if message.reply_to is not None else None
            self._dispatcher.receive(message.payload, self._clock.wall_s(), message.retain, reply)
        while not link.desired.empty():
            self._apply_desired(link.desired.get_nowait().payload)
        while not link.delivered_results.empty():
            command_id = link.delivered_results.get_nowait()
            if self._command_log is not None:
                self._command_log.mark_delivered([command_id])
        self._pump()

    def _receive_ack(self, message: Message) -> None:
        try:
            ack = Ack.from_json(message.payload)
        except MessageError:
            return
        self.outbox.acknowledge(ack.epoch, ack.upto)
        self._context.confirmed[ack.epoch] = max(ack.upto, self._context.confirmed.get(ack.epoch, 0))

    def _apply_desired(self, payload: bytes) -> None:
        if not payload:
            return
        try:
            document, key = admit_desired(payload, self._authority)
            desired = parse_desired(document, key)
            if desired.version == self._settings.version:
                return
            check_expiry(desired, self._clock.wall_s(), self._authority)
            self._context.folder.mkdir(parents=True, exist_ok=True)
            self._settings.set(desired.values, Authorisation(desired.version, key), whole=True)
        except AgentError as error:
            self._link.send(self._settings.reported(error))

    def _answer(self, result: CommandResult) -> None:
        if result.final:
            self._context.results[result.status] += 1
        self._link.send(result)

    def _pump(self) -> None:
        """Do the work that a thread of its own does for a real outbox."""
        while self.outbox.is_due:
            self.outbox.turn()
        at_s = self._loop.time() + self.outbox.patience_s
        if self._outbox_timer is None or at_s < self._outbox_timer.when():
            if self._outbox_timer is not None:
                self._outbox_timer.cancel()
            self._outbox_timer = self._loop.call_at(at_s, self._turn_outbox)

    def _turn_outbox(self) -> None:
        self._outbox_timer = None
        self.outbox.turn()
        self._pump()

    def _telemetry_after(self, seconds: float) -> None:
        self._telemetry_timer = self._loop.call_later(seconds, self._send_telemetry)

    def _send_telemetry(self) -> None:
        context = self._context
        t_s, engines = context.options.now_s(), context.engines
        self._act_by_itself(t_s, engines)
        self._reporter.telemetry({CAMERA: context.scene.sample(engines.serving, engines.since_s, t_s)})
        self._pump()
        self._telemetry_after(self._settings.config.mqtt.telemetry_period_s)

    def _act_by_itself(self, t_s: float, engines: Engines) -> None:
        """Switch to the engine of another light, report a change of drift, and answer an alarm."""
        context = self._context
        light, automatic = context.scene.light(t_s), self._settings.config.recalibration.automatic
        if automatic and engines.job is None and light != engines.serving.light and light in engines.other_lights:
            engines.switch(engines.other_lights[light], "switch")
        gain_db = context.scene.gain_db(engines.serving, t_s)
        state = drift_state(gain_db)
        if state != context.drift:
            context.drift = state
            figures = context.scene.drift(engines.serving, t_s)
            reported = figures.model_dump(include={"gain_db", "e_value", "clipping_share"})
            kind: EventKind = "alarm" if state == "alarm" else "drift"
            detail = {"onset_ts": t_s} if state == "alarm" else {"state": state}
            self._reporter.event(kind, camera=CAMERA, capture_ts=t_s, **detail, **reported)
        if state == "alarm" and engines.job is None and automatic:
            engines.start_job("alarm", context.options.simulation.bad.includes(context.number, None))
