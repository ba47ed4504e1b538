"""`tared fleet`: the control room, of which there is a collector so far, and a fleet to try it with."""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from typing import Any

from agent.arguments import command
from agent.cli_fleet import add_broker_options, endpoint_from
from agent.cli_simulate import add_simulate


def add_room(commands: Any) -> None:
    """What runs beside a broker, and not on a board."""
    about = "the control room of a fleet: collect what its boards report"
    fleet = commands.add_parser("fleet", help=about, description=about)
    actions = fleet.add_subparsers(title="actions", required=True, metavar="ACTION")
    collect = command(actions, "collect", _collect, "store what boards report, and tell them that it has arrived")
    collect.add_argument("--db", type=Path, default=Path("fleet.sqlite"), metavar="FILE", help="where (fleet.sqlite)")
    collect.add_argument("--client-id", default="tared-collector", help="one of its own for each (tared-collector)")
    add_broker_options(collect)
    add_simulate(actions)


def _collect(options: argparse.Namespace) -> int:
    from agent.console import progress, set_up_logging
    from agent.signals import handling_signals
    from fleet.collector import Collector

    set_up_logging("warning")
    collector = Collector(endpoint_from(options), options.db, options.client_id)
    counts, signalled = collector.counts, threading.Event()
    with handling_signals(lambda _: signalled.set()), progress("collecting") as bar:

        def stopping() -> bool:
            bar.update(counts["report"], f"{counts['gap']} gaps, {counts['refused']} refused; {collector.outcome}")
            return signalled.is_set()

        collector.run(stopping)
    if options.json:
        print(json.dumps({name: counts[name] for name in ("report", "gap", "refused")}))
    else:
        print(f"{counts['report']} reports, {counts['gap']} gaps, {counts['refused']} refused, in {options.db}")
    return 0
