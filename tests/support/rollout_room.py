"""A rollout without a broker, for tests that step through it: what boards answer is made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from turned_clock import TurnedClock

from agent.contract.commands import CommandResult, Reported
from agent.contract.messages import Birth, Status
from agent.contract.signing import Signer
from agent.mqtt.endpoint import Endpoint
from fleet.devices.devices import Devices
from fleet.rollout import rows
from fleet.rollout.controller import Controller
from fleet.rollout.register import RolloutRegister
from fleet.rollout.rows import BoardRow, BoardStage, CommandRole, CommandRow, RolloutState
from fleet.rollout.sender import CommandSender
from fleet.rollout.spec import RolloutSpec
from fleet.rollout.stepper import RolloutStepper
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore

PERIOD = "mqtt.telemetry_period_s"
LEASE_S = 86_400.0  # a stepper has no controller that renews it


class Room:
    """A stepper of one rollout at a few boards of which the store knows an engine, `e0`."""

    def __init__(self, store: FleetStore, spec: RolloutSpec, boards: int = 2, clock: TurnedClock | None = None) -> None:
        self.store, self.boards, self.clock = store, boards, clock or TurnedClock()
        self.held: dict[tuple[str, str], Reported] = {}
        self.serves(dict.fromkeys(range(boards), "e0"))
        register = RolloutRegister(store, "operator", self.clock)
        self.id = register.create("f", spec, register.plan("f", spec), "")
        with store.transaction("write") as transaction:
            now = self.clock.wall_s()
            rows.lease(transaction, rows.free_rollouts(transaction, "owner", now), "owner", now + LEASE_S)
        self.take_over()

    def take_over(self, signer: Signer | None = None) -> None:
        """Continue with a controller of the same name, which has this key."""
        self.sender = CommandSender(self.clock)
        self.stepper = RolloutStepper(self.store, self.sender, "owner", "who", signer, self.held, LEASE_S, self.clock)

    @contextmanager
    def controllers(self, where: str, *signers: Signer | None) -> Iterator[list[Controller]]:
        """Yield controllers with these keys instead of the stepper, whose lease has ended."""
        self.stepper.forget(self.id)
        with self.store.transaction() as transaction:
            transaction.execute("UPDATE rollouts SET lease_until = 0.0, lease_owner = NULL")
        with ExitStack() as stack:
            made = []
            for signer in signers:
                beside = stack.enter_context(open_store(where))
                made.append(Controller(Endpoint("127.0.0.1", 1), beside, "who", signer, clock=self.clock))
                stack.enter_context(made[-1]._client)
            yield made

    def serves(self, engines: dict[int, str]) -> None:
        """Let these boards report their engines."""
        now, devices = self.clock.wall_s(), Devices(self.store)
        births = {("f", f"b{n}"): (Birth(agent_version="1", engine=engine), "{}") for n, engine in engines.items()}
        there = Status(state="online", session="s", boot_id="b", ts=now)
        with self.store.transaction() as transaction:
            devices.mark_seen(transaction, births.keys(), now)
            devices.apply_births(transaction, births, now)
            devices.apply_statuses(transaction, dict.fromkeys(births, there), now)

    def step(self, *results: CommandResult) -> RolloutState:
        rollout, _ = self.stepper.step(self.id, {each.id: each for each in results})
        assert rollout is not None
        return rollout.state

    def carry_out(self) -> None:
        """Let all boards that may begin succeed, and serve `e1` from now on."""
        while not (orders := self.open()):
            self.step()
        self.step(*(done(each, artefact="e1") for each in orders.values()))
        self.serves({int(name[1:]): "e1" for name in orders})

    def until(self, state: RolloutState) -> None:
        for _ in range(10):
            if self.step() is state:
                return
        raise AssertionError(self.states())

    def open(self, role: CommandRole = CommandRole.DO) -> dict[str, CommandRow]:
        """Return the open commands of a role, by board."""
        found = self.stepper._open.get(self.id, {}).values()
        return {each.name: each for each in found if each.role is role}

    def states(self) -> list[BoardStage]:
        return [each.state for each in self.rows()]

    def rows(self) -> list[BoardRow]:
        return RolloutRegister(self.store, "").show(self.id)[1]

    def turn(self, undo: str | None = "all") -> None:
        RolloutRegister(self.store, "operator").abort(self.id, undo, "")

    def sent(self) -> list[bytes]:
        """Return the payloads that are due."""
        found = []
        while (message := self.sender.pop()) is not None:
            found.append(message.payload)
        return found


def done(order: CommandRow, **result: Any) -> CommandResult:
    return CommandResult(id=order.id, status="SUCCEEDED", result=result)


def accepted(order: CommandRow) -> CommandResult:
    return CommandResult(id=order.id, status="ACCEPTED")


def failed(order: CommandRow, code: str, message: str = "") -> CommandResult:
    return CommandResult.model_validate(
        {"id": order.id, "status": "FAILED", "error": {"code": code, "message": message}}
    )


def spec(op: str = "recalibrate", **overrides: Any) -> RolloutSpec:
    return RolloutSpec(op, **{"waves": "100%", "order": "name", "soak_s": 60.0, "gates": "failures<=100%", **overrides})


def policy(value: object = 2.0, **overrides: Any) -> RolloutSpec:
    return spec("policy", arguments={PERIOD: value}, **overrides)


def reported(value: Any, version: int = 1) -> Reported:
    return Reported(version=version, values={PERIOD: value})
