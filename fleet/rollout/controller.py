"""The process that carries rollouts out: it claims those that nobody holds, hears boards, and moves the rollouts on.

Several may run, on one store. Each rollout is held by one of them for half a minute at a time; where that one dies the
next takes over where it stood, and sends the commands that are on record, under the ids that they have: a board carries
each out once, however often and by whomever it is sent.
"""

from __future__ import annotations

import logging
import math
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agent.common.errors import AgentError, CommandError
from agent.common.timing import Backoff
from agent.contract.commands import CommandResult, FileArgs, Reported
from agent.contract.messages import Status
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from agent.contract.wire import MessageError
from agent.mqtt.bulk_receive import ReceiveQueue
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from fleet.devices.records import audit
from fleet.operator import file_arguments, may_answer_forged_command, requested_chunks
from fleet.rollout import board_rows, rollout_rows
from fleet.rollout.outcomes import parse_result
from fleet.rollout.rollout_rows import Rollout, RolloutState
from fleet.rollout.schedule import check_zone
from fleet.rollout.sender import CommandSender
from fleet.rollout.spec import RolloutSpec
from fleet.rollout.stepper import RolloutStepper
from fleet.store.transaction import FleetStore, Transaction

log = logging.getLogger(__package__)

LEASE_S = 30.0

_STEP_EVERY_S = 0.25
_INTAKE_BYTES = 16 << 20
_BATCH_BYTES = 1 << 20
_DOUBTED = 3  # refusals of what may be anybody's, before one is believed
_RETRY_S = 2.0
_IDLE_S = 1.0
_UNABLE_S = 60.0
_PIECES_S = 1.0
_SUBSCRIPTIONS = ("status", "reported", "cmd/+/result")
_LEFT = "left to another controller"
_NO_KEY = CommandError(
    "rollout.unsigned",
    "a controller without a key",
    "one that signs, as this rollout demands",
    "run one with --sign KEY",
)


class Controller:
    """signer: the operator's key, with which each command is signed. who: as the record names it. lease_s: for so long
    what it holds stays its own after its death. fleet: whose rollouts it carries out, None for all in the store.

    `rollouts` has those that it holds, as they were at the last step, `ended` those that came to their end with it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        store: FleetStore,
        who: str,
        signer: Signer | None = None,
        lease_s: float = LEASE_S,
        fleet: str | None = None,
    ) -> None:
        self.rollouts: dict[str, Rollout] = {}
        self.ended: list[Rollout] = []
        self._has_looked = False
        self._fleet = fleet
        self._store, self._who, self._signer, self._lease_s = store, who, signer, lease_s
        self._owner = f"{socket.gethostname()}/{uuid.uuid4().hex[:12]}"
        self._held: dict[tuple[str, str], Reported] = {}
        self._heard: dict[str, CommandResult] = {}
        self._doubts: Counter[str] = Counter()
        self._left: set[str] = set()  # for want of a key
        self._unable: dict[str, float] = {}  # until when, on the monotonic clock, only others can carry them out
        self._pieces: dict[str, tuple[str, float]] = {}  # by command: which were asked for last, and when
        self._sender = CommandSender()
        self._stepper = RolloutStepper(store, self._sender, self._owner, who, signer, self._held, lease_s)
        self._intake = ReceiveQueue(_INTAKE_BYTES)
        self._client = MqttClient(
            endpoint,
            f"tared-rollout-{uuid.uuid4().hex}",
            SessionOptions(
                subscriptions=[f"tared/v1/{fleet or '+'}/+/{path}" for path in _SUBSCRIPTIONS],
                backoff=Backoff(0.2, 5.0),
                sources=[self._sender],
                receive_queue=self._intake,
            ),
        )

    @property
    def outcome(self) -> str:
        """How far the connection is, in words."""
        return self._client.outcome

    @property
    def is_done(self) -> bool:
        """Whether it has looked, and there is nothing for it to carry out."""
        return self._has_looked and not self.rollouts

    def run(self, stopping: Callable[[], bool]) -> None:
        """Carry out all there is until it is time to stop, asked several times a second. What is under way then is
        anybody's to go on with at once."""
        claim_s = step_s = -math.inf
        with self._store, self._client:
            while not stopping():
                self._hear(_STEP_EVERY_S)
                try:
                    if time.monotonic() >= claim_s:
                        self._claim()
                        claim_s = time.monotonic() + self._lease_s / 10.0
                    if self._heard or time.monotonic() >= step_s:
                        step_s = time.monotonic() + (_STEP_EVERY_S if self._step() else _IDLE_S)
                except AgentError as error:
                    log.error("rollouts=waiting error=%r retry_s=%.0f", str(error), _RETRY_S)
                    time.sleep(_RETRY_S)
            with suppress(AgentError), self._store.transaction("write") as transaction:  # else the lease runs out
                rollout_rows.release(transaction, self._owner, self.rollouts)

    def _claim(self) -> None:
        now = time.time()
        unable = {each for each, until_s in self._unable.items() if until_s > time.monotonic()}
        with self._store.transaction("write") as transaction:
            can_sign = self._signer is not None
            if not can_sign:
                self._leave_signed(transaction, now)
            claimed = rollout_rows.claim(
                transaction, self._owner, now, now + self._lease_s, unable, self._fleet, can_sign
            )
        for identity, is_strange in claimed.items():
            if is_strange or identity not in self.rollouts:  # else it is as it is remembered here
                self._lose(identity)
                self._adopt(identity)
        self._has_looked = True

    def _leave_signed(self, transaction: Transaction, now: float) -> None:
        """Say once of each that waits for a controller with a key that this is none."""
        found = set(rollout_rows.waiting_for_signer(transaction, now, self._fleet))
        for identity in found - self._left:
            audit(transaction, self._who, _LEFT, str(_NO_KEY), identity, "{}")
            log.error("rollout=%s step=%r error=%r", identity, _LEFT, str(_NO_KEY))
        self._left |= found

    def _adopt(self, identity: str) -> None:
        """Unless it cannot be carried out here, now: another tared has made it, the file that boards will ask for is
        not there, or one of its time zones is not known."""
        try:
            with self._store.transaction("read") as transaction:
                rollout = rollout_rows.get(transaction, identity)
                zones = [
                    zone
                    for wave in range(rollout.waves)
                    for zone in board_rows.waiting_zones(transaction, identity, wave)
                ]
            for zone in dict.fromkeys(zones):
                check_zone(zone)
            if rollout.state is not RolloutState.UNDOING:  # else nobody will ask for it
                _check_file(rollout.spec)
        except CommandError as error:
            is_new, self._unable[identity] = identity not in self._unable, time.monotonic() + _UNABLE_S
            with self._store.transaction("write") as transaction:
                rollout_rows.release(transaction, self._owner, [identity])
                if is_new:
                    audit(transaction, self._who, _LEFT, str(error), identity, "{}")
            log.error("rollout=%s step=%r error=%r", identity, _LEFT, str(error))
        else:
            self._unable.pop(identity, None)
            self.rollouts[identity] = rollout

    def _step(self) -> bool:
        """Each of them. Whether more is to be done at once. Raises AgentError, once all have had their turn."""
        more, failed = False, None
        for identity in list(self.rollouts):
            try:
                rollout, has_more = self._stepper.step(identity, self._heard)
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
        self._heard.clear()
        return more

    def _lose(self, identity: str) -> None:
        self._stepper.forget(identity)
        self.rollouts.pop(identity, None)

    def _hear(self, wait_s: float) -> None:
        for topic, payload, _ in self._intake.pop(_BATCH_BYTES, wait_s, 0.0):
            try:
                _, _, fleet, device, kind, *rest = topic.decode().split("/")
                self._take(fleet, device, kind, rest[0] if rest else "", payload)
            except (MessageError, ValueError) as error:  # noqa: PERF203  of that one, not of all
                log.warning("rollouts=refused topic=%r error=%r", topic[:200], str(error))

    def _take(self, fleet: str, device: str, kind: str, command: str, payload: bytes) -> None:
        """command: of a result. Raises MessageError, and ValueError for a topic that no command has."""
        if not payload:  # a retained one that is cleared
            return
        if kind == "status":
            self._sender.report_presence(fleet, device, Status.from_json(payload).state in ("online", "degraded"))
        elif kind == "reported":
            self._held[fleet, device] = Reported.from_json(payload)
        else:
            self._answer(fleet, device, parse_result(command, payload))

    def _answer(self, fleet: str, device: str, result: CommandResult) -> None:
        order = self._sender.find(fleet, device, result.id)
        if order is None:
            return
        if self._signer is not None and may_answer_forged_command(result):
            self._doubts[result.id] += 1
            if self._doubts[result.id] < _DOUBTED:
                return
        former = self._heard.get(result.id)
        if former is None or not former.final:
            self._heard[result.id] = result
        self._sender.note_answer(result.id)
        for rollout in self.rollouts.values():
            if rollout.spec.file is not None and self._stepper.has_open_command(rollout.id, result.id):
                self._send_file(rollout.spec, Path(rollout.spec.file), Topics(fleet, device), result)

    def _send_file(self, spec: RolloutSpec, path: Path, topics: Topics, asked: CommandResult) -> None:
        """The pieces that the board asks for; the same once more where they were lost, not where it is impatient."""
        piece, now_s = str((asked.result or {}).get("next")), time.monotonic()
        former, since_s = self._pieces.get(asked.id, ("", -math.inf))
        if asked.final or (piece == former and now_s - since_s < _PIECES_S):
            return
        self._pieces[asked.id] = piece, now_s
        try:
            for chunk in requested_chunks(topics, spec.args, path, asked) if isinstance(spec.args, FileArgs) else ():
                self._client.publish(chunk)
        except OSError as error:
            log.error("file=%s error=%r", path, str(error))


def _check_file(spec: RolloutSpec) -> None:
    """Raises CommandError (`rollout.file`) where it is not what the rollout was made for."""
    if spec.file is None:
        return
    found = file_arguments(Path(spec.file))["sha256"]
    if found != spec.arguments["sha256"]:
        remedy = "put it back, or begin another rollout"
        raise CommandError("rollout.file", f"another content of {spec.file}", "the file of the rollout", remedy)
