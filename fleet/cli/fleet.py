"""`tared fleet`: the control room, which collects what boards report, and shows, groups and commands them."""

from __future__ import annotations

import argparse
import getpass
import json
import threading
from pathlib import Path
from typing import Any

from agent.cli.arguments import command, number, print_result
from fleet.cli.arguments import add_broker_options, add_database_option, endpoint_from, fleets_from
from fleet.cli.merge import add_merge
from fleet.cli.rollout import add_rollout
from fleet.cli.simulate import add_simulate

_COUNTED = ("report", "gap", "status", "birth", "result", "refused")


def add_fleet(commands: Any) -> None:
    """Add `tared fleet`, whose actions need a broker or a database, and no board."""
    about = "the control room of a fleet: collect what its boards report, see and group them"
    fleet = commands.add_parser("fleet", help=about, description=about)
    actions = fleet.add_subparsers(title="actions", required=True, metavar="ACTION")
    collect = command(actions, "collect", _collect, "store what boards report, and tell them that it has arrived")
    add_database_option(collect)
    about = "one of its own for each, and always the same: under it the broker keeps results for it (tared-collector, "
    about += "then the fleet and the part; with --share a new one at each start, for which nothing is kept)"
    collect.add_argument("--client-id", help=about)
    collect.add_argument("--share", metavar="GROUP", help="of what all of this group collect, take a share (MQTT 5)")
    collect.add_argument("--part", type=_part, metavar="N/M", help="take one of M parts of the devices, by their names")
    collect.add_argument("--keep-days", type=number(float, 0.01, 36_500.0), default=30.0, metavar="N", help="(30)")
    add_broker_options(collect, "all")
    add_merge(actions)
    add_rollout(actions)
    add_simulate(actions)

    devices = command(actions, "devices", _devices, "how the devices are, by what they last reported")
    _add_selection(devices)

    tag = command(actions, "tag", _tag, "put tags on devices: groups of them, to select by")
    tag.add_argument("tags", nargs="*", metavar="NAME[=VALUE]")
    tag.add_argument("--remove", action="append", default=[], metavar="NAME", help="take it off")
    _add_selection(tag)

    report = command(actions, "report", _report, "how the fleet is, as one HTML file")
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="(report.html)")
    _add_selection(report)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    add_database_option(parser)
    about = "such as state=degraded,fidelity_low<0.9,tag.site=berlin (all)"
    parser.add_argument("--where", metavar="CONDITIONS", help=about)
    parser.add_argument("--fleet", default="default", help="(default)")
    silent = number(float, 1.0, 10 * 365 * 86_400.0)
    parser.add_argument("--silent", type=silent, default=600.0, metavar="S", help="unheard for S s is silent (600)")


def _part(text: str) -> tuple[int, int]:
    """Parse `N/M`, part N of M."""
    number_text, _, parts_text = text.partition("/")
    try:
        part = int(number_text), int(parts_text)
    except ValueError:
        part = 0, 0
    if not 1 <= part[0] <= part[1]:
        raise argparse.ArgumentTypeError(f"expected N/M with N from 1 to M, such as 2/4, got {text!r}")
    return part


def _collect(options: argparse.Namespace) -> int:
    from agent.common.console import progress, set_up_logging
    from agent.system.process import handling_signals
    from fleet.collector.batch import Part
    from fleet.collector.collector import Collector, client_id_for
    from fleet.collector.writer import ReportRetention
    from fleet.store.opening import open_store

    set_up_logging("warning")
    part, fleet = Part(*(options.part or (1, 1))), fleets_from(options)
    client_id = options.client_id or (client_id_for(part, fleet) if options.share is None else None)
    store, retention = open_store(options.db), ReportRetention(options.keep_days)
    collector = Collector(endpoint_from(options), store, client_id, part, options.share, retention, fleet)
    counts, signalled = collector.counts, threading.Event()
    with handling_signals(lambda _: signalled.set()), progress("collecting") as bar:

        def stopping() -> bool:
            bar.update(counts["report"], f"{counts['gap']} gaps, {counts['refused']} refused; {collector.outcome}")
            return signalled.is_set()

        collector.run(stopping)
    if options.json:
        print(json.dumps({name: counts[name] for name in _COUNTED}))
    else:
        print(f"{counts['report']} reports, {counts['gap']} gaps, {counts['refused']} refused, in {store.where}")
    return 0


def _devices(options: argparse.Namespace) -> int:
    from rich.console import Console

    from fleet.devices.devices import Devices
    from fleet.devices.selection import select
    from fleet.store.opening import open_existing
    from fleet.views.listing import as_objects, print_devices

    with open_existing(options.db) as store:
        selected = select(Devices(store), options.fleet, options.where, options.silent)
    if options.json:
        print(json.dumps({"fleet": options.fleet, "devices": as_objects(selected, options.silent)}))
    elif selected:
        print_devices(selected, Console(), options.silent)
    else:
        print(f"nobody of the fleet {options.fleet!a} has reported yet, in {store.where}")
    return 0


def _tag(options: argparse.Namespace) -> int:
    from fleet.devices.devices import Devices
    from fleet.devices.selection import parse_tag, select
    from fleet.store.opening import open_existing

    tags = dict(map(parse_tag, options.tags))
    with open_existing(options.db) as store:
        devices = Devices(store)
        selected = select(devices, options.fleet, options.where, options.silent)
        devices.tag(selected, tags, options.remove, who=getpass.getuser())
    names = [each.name for each in selected]
    print(json.dumps({"devices": names}) if options.json else f"{len(names)} devices: {', '.join(names[:10])}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from agent.common.errors import AgentError
    from fleet.devices.devices import Devices
    from fleet.devices.records import audit_entries, quarantined
    from fleet.devices.selection import select
    from fleet.rollout.register import RolloutRegister
    from fleet.store.opening import open_existing
    from fleet.views.page import page

    with open_existing(options.db) as store:
        selected = select(Devices(store), options.fleet, options.where, options.silent)
        rollouts = RolloutRegister(store, getpass.getuser()).all(options.fleet)
        text = page(
            options.fleet,
            selected,
            rollouts,
            audit_entries(store),
            quarantined(store, fleet=options.fleet),
            options.silent,
        )
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AgentError("fleet.report", str(error), "a file that can be written", "correct -o") from None
    return print_result(options, {"devices": len(selected), "output": str(options.output)})
