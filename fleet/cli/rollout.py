"""Send one command to many boards in waves, and judge each wave before the next starts: `tared fleet rollout`."""

from __future__ import annotations

import argparse
import getpass
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import command, number, option, print_result, table_console
from fleet.cli.arguments import (
    add_broker_options,
    add_database_option,
    add_metrics_options,
    add_sign_option,
    endpoint_from,
    field_values,
    fleets_from,
    run_until_signalled,
    serving_metrics,
    signer_from,
)

if TYPE_CHECKING:  # imported when the command runs, as in agent/cli/offline.py
    from prometheus_client.registry import Collector

    from fleet.rollout.register import RolloutRegister
    from fleet.rollout.spec import RolloutSpec

_TIME = "time, such as 90s, 30m or 2h,"
_WHY = "a reason for the record (default: none)"


def add_rollout(actions: Any) -> None:
    """Add `tared fleet rollout`, with actions of its own."""
    about = "one command for many boards, wave by wave, each judged before the next begins"
    steps = actions.add_parser("rollout", help=about, description=about).add_commands("actions", "ACTION")
    _add_create(steps)
    run = command(steps, "run", _run, "run the controller, which carries out rollouts; several may share one store")
    add_database_option(run)
    add_sign_option(run)
    lease = "seconds after which another controller takes over the rollouts of one that died"
    option(run, "--lease", "S", lease, number(float, 1.0, 3600.0), default=30.0)
    run.add_argument("--until-done", action="store_true", help="end once there is no rollout to carry out any more")
    add_metrics_options(run)
    add_broker_options(run, "all in the store")
    show = command(steps, "show", _show, "show the progress of a rollout, the reasons, and the operators")
    listed = command(steps, "list", _list, "list all rollouts, the newest first")
    option(listed, "--fleet", "FLEET", "the fleet of the boards", default="default")
    pausing = "command no further board; boards with the command continue"
    pause = command(steps, "pause", partial(_steer, "pause"), pausing)
    resume = command(steps, "resume", partial(_steer, "resume"), "continue a paused rollout")
    abort = command(steps, "abort", partial(_steer, "abort"), "command no further board, and cancel running jobs")
    undo = "let the boards of the present wave, or all, go back to what they had; all: also of one that is over "
    undo += "(default: none goes back)"
    abort.add_argument("--undo", choices=("wave", "all"), help=undo)
    for each in (show, pause, resume, abort):
        option(each, "id", "ID", "the rollout, by the id of 'create' or 'list'; its beginning is enough")
    for each in (pause, resume, abort):
        option(each, "--why", "TEXT", _WHY, default="")
    for each in (show, listed, pause, resume, abort):
        add_database_option(each)


def _add_create(steps: Any) -> None:
    create = command(steps, "create", _create, "write a rollout into the store; 'run' carries it out")
    option(create, "arguments", "key=value", "of the op; file=PATH of a model", nargs="*")
    option(create, "--op", "OP", lambda: ", ".join(import_module("fleet.rollout.spec").OPS), required=True)
    option(create, "--select", "CONDITIONS", "as --where of 'devices' (default: all boards)", default="")
    waves = "how many boards the waves have reached, one after the other: a number, or a share in %%"
    option(create, "--waves", "WAVES", waves, default="1,5%,25%,100%")
    gates = "failures<=2%%, unreached<=10%%; of each board fidelity>=0.95, latency_p99<=1.2x, @90%% of them ..."
    option(create, "--gate", "GATES", f"{gates} (default: failures<=2%%)", dest="gates", default="")
    option(create, "--soak", "TIME", f"{_TIME} until a wave is judged", _duration, dest="soak_s", default="30m")
    at_once = "boards that carry it out at the same time"
    option(create, "--at-once", "N", at_once, number(int, 1, 1_000_000), default=500)
    window = "send only in these hours, by a board's tag 'tz', else --timezone; may be repeated (default: at any hour)"
    option(create, "--window", "01:00-05:00", window, dest="windows", action="append", default=[])
    option(create, "--timezone", "ZONE", "of the windows, such as Europe/Berlin", default="UTC")
    option(create, "--order", "ORDER", "random, name, or tag.NAME: lowest first", default="random")
    option(create, "--valid", "TIME", f"{_TIME} to wait for a board", _duration, dest="valid_s", default="1h")
    option(create, "--deadline", "TIME", f"{_TIME} that a board may take", _duration, dest="deadline_s", default="2h")
    unheard = f"{_TIME} until an unheard board is silent"
    option(create, "--silent", "TIME", unheard, _duration, dest="silent_s", default="10m")
    signed = "for boards that obey signed commands alone: no controller without a key carries it out"
    create.add_argument("--signed", action="store_true", help=signed)
    option(create, "--why", "TEXT", _WHY, default="")
    create.add_argument("--dry-run", action="store_true", help="only list the boards of each wave, as without it")
    option(create, "--fleet", "FLEET", "the fleet of the boards", default="default")
    add_database_option(create)


def _duration(text: str) -> float:
    from agent.common.errors import CommandError
    from fleet.rollout.spec import parse_duration

    try:
        return parse_duration(text)
    except CommandError as error:
        raise argparse.ArgumentTypeError(f"expected {error.expected}, got {error.found}") from None


@contextmanager
def _register(options: argparse.Namespace) -> Iterator[RolloutRegister]:
    from fleet.rollout.register import RolloutRegister
    from fleet.store.opening import open_existing

    with open_existing(options.db) as store:
        yield RolloutRegister(store, getpass.getuser())


def _create(options: argparse.Namespace) -> int:
    """Run `tared fleet rollout create`: write a rollout into the store, or with --dry-run only show its waves."""
    from fleet.views.listing import print_plan

    spec = _spec(options)
    with _register(options) as register:
        waves = register.plan(options.fleet, spec)
        identity = None if options.dry_run else register.create(options.fleet, spec, waves, options.why)
    if options.json:
        print(json.dumps({"id": identity, "boards_by_wave": [[each.name for each in wave] for wave in waves]}))
    else:
        print_plan(spec, waves, table_console())
        print("nothing is written" if identity is None else f"{identity}: 'tared fleet rollout run' carries it out")
    return 0


def _spec(options: argparse.Namespace) -> RolloutSpec:
    from fleet.rollout.spec import RolloutSpec, typed_spec

    fields = {**field_values(options, RolloutSpec), "windows": tuple(options.windows)}
    return typed_spec(fields.pop("op"), fields.pop("arguments"), **fields)


def _list(options: argparse.Namespace) -> int:
    """Run `tared fleet rollout list`: list all rollouts, the newest first."""
    from fleet.views.listing import print_rollouts, rollout_object

    with _register(options) as register:
        rollouts = register.all(options.fleet)
    if options.json:
        print(json.dumps({"rollouts": [rollout_object(each) for each in rollouts]}))
    elif rollouts:
        print_rollouts(rollouts, table_console())
    else:
        print(f"no rollout in {options.fleet} so far")
    return 0


def _show(options: argparse.Namespace) -> int:
    """Run `tared fleet rollout show`: print the progress of a rollout and the answers of its boards."""
    from fleet.views.listing import print_rollout, rollout_details

    with _register(options) as register:
        overview, boards, commands = register.show(options.id)
    details = rollout_details(overview, boards, commands)
    return print_result(options, details, lambda: print_rollout(overview, boards, table_console()))


def _steer(action: str, options: argparse.Namespace) -> int:
    """Run `tared fleet rollout pause`, `resume` or `abort`, and print the new state."""
    with _register(options) as register:
        if action == "abort":
            rollout = register.abort(options.id, options.undo, options.why)
        else:
            rollout = (register.pause if action == "pause" else register.resume)(options.id, options.why)
    state = {"id": rollout.id, "state": rollout.state.value}
    return print_result(options, state, lambda: print(*state.values()))


def _run(options: argparse.Namespace) -> int:
    """Run `tared fleet rollout run`: carry out rollouts until a signal comes, with --until-done until all end."""
    from agent.common.console import set_up_logging
    from fleet.rollout.controller import Controller
    from fleet.store.opening import open_existing

    set_up_logging("info")
    signer, who = signer_from(options), f"{getpass.getuser()}@{socket.gethostname()}"
    to = endpoint_from(options), open_existing(options.db)
    controller = Controller(*to, who, signer, options.lease, fleets_from(options))

    def show() -> tuple[int, str]:
        waves = [f"{each.id} {each.op} wave {each.wave + 1}/{each.waves}" for each in controller.rollouts.values()]
        return len(waves), f"{', '.join(waves[:3]) or 'nothing to do'}; {controller.outcome}"

    def metrics() -> Sequence[Collector]:
        from fleet.metrics.processes import ProcessMetrics, controller_metrics
        from fleet.metrics.store import StoreMetrics, rollout_metrics

        return ProcessMetrics(lambda: controller_metrics(controller)), StoreMetrics(options.db, rollout_metrics)

    with serving_metrics(options, "rollout", metrics):
        run_until_signalled(controller.run, "rollouts", None, show, lambda: options.until_done and controller.is_done)
    if options.json:
        print(json.dumps({"ended": {each.id: each.state.value for each in controller.ended}}))
    return 0
