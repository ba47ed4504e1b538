"""Carry rollouts out: claim those that nobody holds, receive what boards answer, and take their steps.

Several controllers may run on one store. Each rollout is held by one of them, by a lease of half a minute. If that one
dies, another goes on where it stood, and sends the recorded commands again under their ids. A board carries out each
command once, however often and by whomever it is sent.
"""

from __future__ import annotations

import logging
import math
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError, CommandError
from agent.common.timing import Backoff
from agent.contract.commands import CommandResult, Reported
from agent.contract.messages import Status
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from agent.contract.wire import MessageError
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.receive_queue import ReceiveQueue
from fleet.devices.records import audit
from fleet.operator import file_arguments, may_answer_forged_command, requested_chunks
from fleet.rollout import rows
from fleet.rollout.board_steps import parse_result
from fleet.rollout.rows import Rollout, RolloutState
from fleet.rollout.sender import CommandSender
from fleet.rollout.spec import RolloutSpec, check_zone
from fleet.rollout.stepper import RolloutStepper
from fleet.store.transaction import FleetStore, Transaction

log = logging.getLogger(__package__)

LEASE_S = 30.0

_STEP_EVERY_S = 0.25
_QUEUE_BYTES = 16 << 20
_BATCH_BYTES = 1 << 20
_DOUBTED = 3  # so many refusals that may answer a forged command are needed before one is believed
_RETRY_S = 2.0
_IDLE_S = 1.0
_UNABLE_S = 60.0
_SAME_CHUNKS_S = 1.0  # before chunks that are requested again are sent again
_LEFT = "left to another controller"
_NO_KEY = CommandError(
    "rollout.unsigned",
    "a controller without a key",
    "a controller that signs, as this rollout demands",
    "run a controller with --sign KEY",
)


class Controller:
    """Carry out the rollouts of a store.

    rollouts: those that it holds, as they were after the last step. ended: those that it has finished.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        store: FleetStore,
        who: str,
        signer: Signer | None = None,
        lease_s: float = LEASE_S,
        fleet: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare a controller.

        Args:
            store: The controller's own from now on; `run` closes it.
            who: Its name in records.
            signer: The operator's key, with which each command is signed.
            lease_s: How long others wait for it after its death.
            fleet: Carry out the rollouts of this fleet; None: of all.
        """
        self.rollouts: dict[str, Rollout] = {}
        self.ended: list[Rollout] = []
        self._has_claimed = False
        self._fleet, self._clock = fleet, clock
        self._store, self._who, self._signer, self._lease_s = store, who, signer, lease_s
        self._owner = f"{socket.gethostname()}/{uuid.uuid4().hex[:12]}"
        self._settings: dict[tuple[str, str], Reported] = {}
        self._results: dict[str, CommandResult] = {}
        self._doubts: Counter[str] = Counter()
        self._unsignable: set[str] = set()  # left to others for lack of a key
        self._unable: dict[str, float] = {}  # until when they are left to others; monotonic
        self._chunks: dict[str, tuple[str, float]] = {}  # by command, the last request and when it was served
        self._sender = CommandSender(clock)
        self._stepper = RolloutStepper(store, self._sender, self._owner, who, signer, self._settings, lease_s, clock)
        self._queue = ReceiveQueue(_QUEUE_BYTES)
        topics = [f"tared/v1/{fleet or '+'}/+/{path}" for path in ("status", "reported", "cmd/+/result")]
        session = SessionOptions(
            subscriptions=topics, backoff=Backoff(0.2, 5.0), sources=[self._sender], receive_queue=self._queue
        )
        self._client = MqttClient(endpoint, f"tared-rollout-{uuid.uuid4().hex}", session)

    @property
    def connected(self) -> bool:
        """Return whether the broker has admitted this controller."""
        return self._client.connected

    @property
    def outcome(self) -> str:
        """The state of the connection, in words."""
        return self._client.outcome

    @property
    def is_done(self) -> bool:
        """True if it has tried to claim rollouts, and holds none."""
        return self._has_claimed and not self.rollouts

    def run(self, stopping: Callable[[], bool]) -> None:
        """Carry rollouts out until `stopping` returns True; it is called several times a second.

        At the end the leases are released, so that another controller can go on at once.
        """
        claim_s = step_s = -math.inf
        with self._store, self._client:
            while not stopping():
                self._receive(_STEP_EVERY_S)
                try:
                    if self._clock.monotonic_s() >= claim_s:
                        self._claim()
                        claim_s = self._clock.monotonic_s() + self._lease_s / 10.0
                    if self._results or self._clock.monotonic_s() >= step_s:
                        step_s = self._clock.monotonic_s() + (_STEP_EVERY_S if self._step() else _IDLE_S)
                except AgentError as error:
                    log.error("rollouts=waiting error=%r retry_s=%.0f", str(error), _RETRY_S)
                    self._clock.sleep(_RETRY_S)
            # Otherwise the leases end by themselves.
            with suppress(AgentError), self._store.transaction("write") as transaction:
                rows.release_leases(transaction, self._owner, self.rollouts)

    def _claim(self) -> None:
        now = self._clock.wall_s()
        unable = {each for each, until_s in self._unable.items() if until_s > self._clock.monotonic_s()}
        with self._store.transaction("write") as transaction:
            free = rows.free_rollouts(transaction, self._owner, now, self._fleet)
            if self._signer is None:
                self._leave_signed(transaction, {each.id for each in free if each.is_signed})
            mine = [each for each in free if each.id not in unable | self._unsignable]
            rows.lease(transaction, mine, self._owner, now + self._lease_s)
        for rollout in mine:
            if rollout.lease_owner != self._owner or rollout.id not in self.rollouts:  # others may have moved it
                self._lose(rollout.id)
                self._adopt(rollout)
        self._has_claimed = True

    def _leave_signed(self, transaction: Transaction, demanding: Set[str]) -> None:
        """Record once for each rollout that demands signatures that this controller cannot carry it out."""
        for identity in demanding - self._unsignable:
            audit(transaction, self._who, _LEFT, str(_NO_KEY), identity, "{}")
            log.error("rollout=%s step=%r error=%r", identity, _LEFT, str(_NO_KEY))
        self._unsignable |= demanding

    def _adopt(self, rollout: Rollout) -> None:
        """Hold a claimed rollout, unless it cannot be carried out here for now; then release it, and record why.

        Reasons: it is of another tared, the file that boards will request is missing, or a time zone is unknown.
        """
        identity = rollout.id
        try:
            with self._store.transaction("read") as transaction:
                zones = rows.waiting_zones(transaction, identity, (0, rollout.waves))
            for zone in zones:
                check_zone(zone)
            spec = rollout.spec
            # While it is undone, no board will request the file.
            file = None if rollout.state is RolloutState.UNDOING else spec.file
            if file is not None and file_arguments(Path(file))["sha256"] != spec.arguments["sha256"]:
                remedy = "restore the file, or create another rollout"
                raise CommandError(
                    "rollout.file", f"changed content in {file}", "the SHA-256 that the rollout names", remedy
                )
        except CommandError as error:
            is_new, self._unable[identity] = identity not in self._unable, self._clock.monotonic_s() + _UNABLE_S
            with self._store.transaction("write") as transaction:
                rows.release_leases(transaction, self._owner, [identity])
                if is_new:
                    audit(transaction, self._who, _LEFT, str(error), identity, "{}")
            log.error("rollout=%s step=%r error=%r", identity, _LEFT, str(error))
        else:
            self._unable.pop(identity, None)
            self.rollouts[identity] = rollout

    def _step(self) -> bool:
        """Step each rollout; return True if more is to be done at once. Raises AgentError after all are done."""
        more, failed = False, None
        for identity in list(self.rollouts):
            try:
                rollout, has_more = self._stepper.step(identity, self._results)
            except AgentError as error:
                failed = error
                continue
            more |= has_more
            if rollout is None or rollout.state.is_finished:
                self.ended += [rollout] if rollout is not None else []
                self._lose(identity)
            else:
                self.rollouts[identity] = rollout
        if failed is not None:
            raise failed
        self._results.clear()
        return more

    def _lose(self, identity: str) -> None:
        self._stepper.forget(identity)
        self.rollouts.pop(identity, None)

    def _receive(self, wait_s: float) -> None:
        for topic, payload, _ in self._queue.pop(_BATCH_BYTES, wait_s, 0.0):
            try:
                _, _, fleet, device, kind, *rest = topic.decode().split("/")
                if not payload:  # a retained message is cleared
                    continue
                if kind == "status":
                    is_there = Status.from_json(payload).state in ("online", "degraded")
                    self._sender.report_presence(fleet, device, is_there)
                elif kind == "reported":
                    self._settings[fleet, device] = Reported.from_json(payload)
                else:
                    self._receive_result(fleet, device, parse_result(rest[0], payload))
            except (MessageError, ValueError) as error:
                log.warning("rollouts=refused topic=%r error=%r", topic[:200], str(error))

    def _receive_result(self, fleet: str, device: str, result: CommandResult) -> None:
        if not self._sender.has(fleet, device, result.id):
            return
        if self._signer is not None and may_answer_forged_command(result):
            self._doubts[result.id] += 1
            if self._doubts[result.id] < _DOUBTED:
                return
        previous = self._results.get(result.id)
        if previous is None or not previous.final:
            self._results[result.id] = result
        self._sender.note_answer(result.id)
        for rollout in self.rollouts.values():
            if rollout.spec.file is not None and self._stepper.has_open_command(rollout.id, result.id):
                self._send_file(rollout.spec, Path(rollout.spec.file), Topics(fleet, device), result)

    def _send_file(self, spec: RolloutSpec, path: Path, topics: Topics, result: CommandResult) -> None:
        """Send the chunks that the board requests. The same ones are repeated after a second: they may be lost."""
        request, now_s = str((result.result or {}).get("next")), self._clock.monotonic_s()
        previous, since_s = self._chunks.get(result.id, ("", -math.inf))
        if result.final or (request == previous and now_s - since_s < _SAME_CHUNKS_S):
            return
        self._chunks[result.id] = request, now_s
        try:
            for chunk in requested_chunks(topics, spec.args, path, result):
                self._client.publish(chunk)
        except OSError as error:
            log.error("file=%s error=%r", path, str(error))
