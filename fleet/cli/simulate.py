"""`tared fleet simulate`: run boards without cameras, to test a fleet, or to measure what one needs."""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agent.cli.arguments import command, number
from agent.common.errors import AgentError
from fleet.cli.arguments import add_broker_options, endpoint_from, fleet_from

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def add_simulate(actions: Any) -> None:
    """Add `tared fleet simulate`."""
    simulate = command(actions, "simulate", _simulate, "run boards without cameras against a real broker")
    simulate.add_argument("--devices", type=number(int, 1, 1_000_000), required=True, metavar="N")
    simulate.add_argument("--seconds", type=number(float, 0.1), metavar="S", help="end after S s (with an interrupt)")
    simulate.add_argument("--period", type=number(float, 0.1, 3600.0), default=5.0, metavar="S", help="telemetry's (5)")
    simulate.add_argument("--ramp", type=number(float, 0.0), metavar="S", help="switch them on over S s (N / 200)")
    simulate.add_argument("--drift", default="", metavar="K=V,...", help="db, after_s, spread_s, ramp_s, groups, day_s")
    shares = "shares crash, restore, no_clock, hostile of boards, duplicate, delay of messages; every_s"
    simulate.add_argument("--faults", default="", metavar="K=V,...", help=shares)
    bad = "new engines that turn out bad: named=SHA256|METHOD|REGIME; first, last: of these boards"
    simulate.add_argument("--bad", default="", metavar="K=V,...", help=bad)
    simulate.add_argument(
        "--storm", type=number(float, 0.0), nargs="+", default=[], metavar="S", help="cut all connections after S s"
    )
    skew = "deviation of the boards' clocks (0)"
    simulate.add_argument("--clock-skew", type=number(float, 0.0), default=0.0, metavar="S", help=skew)
    simulate.add_argument("--job", type=number(float, 0.01), default=60.0, metavar="S", help="a job's median time (60)")
    failures = "share of jobs that fail (0.02)"
    simulate.add_argument("--failures", type=number(float, 0.0, 1.0), default=0.02, metavar="P", help=failures)
    simulate.add_argument("--no-automatic", action="store_true", help="no board answers an alarm by itself")
    trust = "an operator's public key; with one, unsigned commands are refused"
    simulate.add_argument("--trust", type=Path, action="append", default=[], metavar="PUB", help=trust)
    simulate.add_argument(
        "--seed", type=number(int, 0), default=0, metavar="N", help="what is drawn follows from it (0)"
    )
    add_broker_options(simulate)


def pairs(defaults: T, text: str) -> T:
    """Return the dataclass changed by `key=value,key=value`. Raises AgentError (`cli.arguments`)."""
    known = asdict(defaults)
    given: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        try:
            given[key] = type(known[key])(value)
        except (KeyError, ValueError):
            expected = ", ".join(f"{name}={default!r}" for name, default in known.items())
            raise AgentError("cli.arguments", repr(pair), f"some of {expected}", "correct it") from None
    return replace(defaults, **given)


def _simulate(options: argparse.Namespace) -> int:
    from agent.common.console import progress, set_up_logging
    from agent.system.process import handling_signals
    from fleet.simulator.options import BadEngines, Faults, SimulationOptions
    from fleet.simulator.scene import Drift
    from fleet.simulator.simulation import Simulation

    set_up_logging("error")  # else each of ten thousand boards logs its every connection
    simulated = SimulationOptions(
        devices=int(options.devices),
        fleet=fleet_from(options),
        period_s=options.period,
        ramp_s=options.ramp,
        drift=pairs(Drift(), options.drift),
        faults=pairs(Faults(), options.faults),
        bad=pairs(BadEngines(), options.bad),
        storms=tuple(options.storm),
        clock_skew_s=options.clock_skew,
        job_s=options.job,
        failures=options.failures,
        automatic=not options.no_automatic,
        operator_keys=tuple(options.trust),
        seed=int(options.seed),
    )
    simulation, signalled, started_s = (
        Simulation(endpoint_from(options), simulated),
        threading.Event(),
        time.monotonic(),
    )
    outcome = simulation.outcome
    with handling_signals(lambda _: signalled.set()), progress("simulating", simulated.devices) as bar:

        def stopping() -> bool:
            bar.update(outcome.connected, f"connected; {outcome.made} rows, {outcome.confirmed} confirmed")
            has_ended = options.seconds is not None and time.monotonic() - started_s > options.seconds
            return has_ended or signalled.is_set()

        simulation.run(stopping)
    print(json.dumps(outcome.as_dict()) if options.json else _summary(outcome.as_dict()))
    return 0


def _summary(outcome: dict[str, Any]) -> str:
    """Return the outcome for people."""
    results = ", ".join(f"{n} {status}" for status, n in sorted(outcome["results"].items())) or "none"
    return (
        f"{outcome['connected']} of {outcome['devices']} boards connected at the end; admitted {outcome['admitted']} "
        f"times in {outcome['attempts']} attempts; {outcome['made']} rows, {outcome['confirmed']} of them confirmed; "
        f"commands: {results}"
    )
