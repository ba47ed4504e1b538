"""Run the control room: collect the reports of boards, show and group boards, merge histograms: `tared fleet`.

Its rollouts are in `rollout`.
"""

from __future__ import annotations

import argparse
import getpass
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agent.cli.arguments import command, number, option, print_result, table_console
from agent.common.errors import AgentError, CommandError
from fleet.cli.arguments import (
    add_broker_options,
    add_database_option,
    add_metrics_options,
    add_sign_option,
    endpoint_from,
    field_values,
    fleet_from,
    fleets_from,
    run_until_signalled,
    serving_metrics,
    signer_from,
)
from fleet.cli.rollout import add_rollout
from fleet.untrusted import printable

if TYPE_CHECKING:  # imported when a command runs, as in agent/cli/offline.py
    from _typeshed import DataclassInstance
    from prometheus_client.registry import Collector as MetricsCollector

    from fleet.devices.devices import Device, Devices
    from fleet.merge.calibration import MergedCalibration
    from fleet.merge.exchange import MergeExchange
    from fleet.store.transaction import FleetStore

T = TypeVar("T", bound="DataclassInstance")
_COUNTED = ("report", "gap", "status", "birth", "result", "refused")


def add_fleet(commands: Any) -> None:
    """Add `tared fleet`, whose actions need a broker or a database, and no board."""
    about = "the control room of a fleet: collect what its boards report, see and group them"
    actions = commands.add_parser("fleet", help=about, description=about).add_commands("actions", "ACTION")
    collect = command(actions, "collect", _collect, "store the reports of boards, and confirm their arrival")
    add_database_option(collect)
    client = "a fixed name of its own for each collector: under it the broker keeps results for it (default: "
    client += (
        "tared-collector, then the fleet and the part; with --share a new one at each start, for which nothing is "
    )
    client += "kept)"
    option(collect, "--client-id", "ID", client)
    share = "share the messages with all collectors of this group, over MQTT 5 (default: take all)"
    option(collect, "--share", "GROUP", share)
    option(collect, "--part", "N/M", "take one of M parts of the devices, by their names (default: 1/1)", _part)
    option(collect, "--keep-days", "DAYS", "days that reports are kept", number(float, 0.01, 36_500.0), default=30.0)
    unseen = "days without a message after which a device is forgotten (default: never)"
    option(collect, "--forget-days", "DAYS", unseen, number(float, 1.0, 36_500.0))
    most = "devices that the store may have; messages of more are refused, and known devices lose nothing"
    option(collect, "--most-devices", "N", most, number(int, 1, 10**8), default=100_000)
    new = "new devices that are taken in a minute; others are refused, until they send again"
    option(collect, "--new-devices-per-minute", "N", new, number(int, 1, 10**8), default=6000)
    add_metrics_options(collect)
    add_broker_options(collect, "all")
    _add_merge(actions)
    add_rollout(actions)
    _add_simulate(actions)

    devices = command(actions, "devices", _devices, "list the devices with their last reports")
    _add_selection(devices)
    most = "devices to show at most; the next ones are behind --after"
    option(devices, "--most", "N", most, number(int, 1, 100_000), default=1000)
    option(devices, "--after", "NAME", "begin with the first name behind this one (default: at the first)", default="")

    forget = command(actions, "forget", _forget, "remove devices with all of their reports")
    _add_selection(forget)
    forget.add_argument("--dry-run", action="store_true", help="only list the devices that would be removed")

    tag = command(actions, "tag", _tag, "put tags on devices, by which commands select them")
    option(tag, "tags", "NAME[=VALUE]", "the tags to put on", nargs="*")
    option(tag, "--remove", "NAME", "a tag to take off (default: none)", action="append", default=[])
    _add_selection(tag)

    report = command(actions, "report", _report, "write the state of the fleet as one HTML file")
    option(report, "-o --output", "FILE", "the page to write", Path, default=Path("report.html"))
    _add_selection(report)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    add_database_option(parser)
    conditions = "such as state=degraded,fidelity_low<0.9,tag.site=berlin (default: all devices)"
    option(parser, "--where", "CONDITIONS", conditions)
    option(parser, "--fleet", "FLEET", "the fleet of the devices", default="default")
    silence = "seconds without a message after which a device is silent"
    option(parser, "--silent", "S", silence, number(float, 1.0, 10 * 365 * 86_400.0), default=600.0)


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


def _add_merge(actions: Any) -> None:
    merge = command(actions, "merge", _merge, "merge the histograms of boards into one calibration; no frame is sent")
    option(merge, "devices", "DEVICE", "their names; none: all that are there within --within", nargs="*")
    option(merge, "--select", "CONDITIONS", "devices in --db, as --where of 'devices' (default: none)")
    add_database_option(merge)
    output = "the calibration.json to write; boards get the .bundle beside it"
    option(merge, "-o --output", "FILE", output, Path, required=True)
    option(merge, "--method", "METHOD", "as of 'tared calibrate'", default="entropy")
    option(merge, "--within", "S", "seconds to wait for boards", number(float, 0.0, 3600.0), default=10.0)
    option(merge, "--at-once", "N", "boards that send at the same time", number(int, 1, 1000), default=16)
    silence = "seconds of silence after which a board is given up"
    option(merge, "--timeout", "S", silence, number(float, 1.0, 86400.0), default=30.0)
    option(merge, "--longest", "S", "seconds for one board in all", number(float, 1.0, 86400.0), default=1800.0)
    option(merge, "--uploads", "DIR", "the folder that keeps the uploads of boards (default: a temporary folder)", Path)
    add_sign_option(merge)
    add_broker_options(merge)


def _add_simulate(actions: Any) -> None:
    simulate = command(actions, "simulate", _simulate, "run boards without cameras against a real broker")
    option(simulate, "--devices", "N", "boards to simulate", number(int, 1, 1_000_000), required=True)
    end = "seconds until it ends (default: at an interrupt)"
    option(simulate, "--seconds", "S", end, number(float, 0.1), default=math.inf)
    period = "seconds between two messages of telemetry"
    option(simulate, "--period", "S", period, number(float, 0.1, 3600.0), dest="period_s", default=5.0)
    ramp = "seconds in which they are switched on (default: N / 200)"
    option(simulate, "--ramp", "S", ramp, number(float, 0.0), dest="ramp_s")
    drift = "db, after_s, spread_s, ramp_s, groups, day_s (default: no drift)"
    option(simulate, "--drift", "K=V,...", drift, default="")
    shares = "shares crash, restore, no_clock, hostile of boards, duplicate, delay of messages; every_s (default: none)"
    option(simulate, "--faults", "K=V,...", shares, default="")
    bad = "new engines that turn out bad: named=SHA256|METHOD|REGIME; first, last: of these boards (default: none)"
    option(simulate, "--bad", "K=V,...", bad, default="")
    storms = "seconds after which all connections are cut (default: never)"
    option(simulate, "--storm", "S", storms, number(float, 0.0), dest="storms", nargs="+", default=[])
    skew = "seconds by which the boards' clocks deviate"
    option(simulate, "--clock-skew", "S", skew, number(float, 0.0), dest="clock_skew_s", default=0.0)
    option(simulate, "--job", "S", "seconds of a job, the median", number(float, 0.01), dest="job_s", default=60.0)
    option(simulate, "--failures", "P", "share of jobs that fail", number(float, 0.0, 1.0), default=0.02)
    manual = "no board answers an alarm by itself"
    simulate.add_argument("--no-automatic", dest="automatic", action="store_false", help=manual)
    trust = "an operator's public key; with one, unsigned commands are refused (default: none)"
    option(simulate, "--trust", "PUB", trust, Path, dest="operator_keys", action="append", default=[])
    option(simulate, "--seed", "N", "seed of all random draws", number(int, 0), default=0)
    add_broker_options(simulate)


def _collect(options: argparse.Namespace) -> int:
    """Run `tared fleet collect`: store the reports of boards until a signal comes, then print the counts."""
    from agent.common.console import set_up_logging
    from fleet.collector.admission import NewDevices
    from fleet.collector.batch import Part
    from fleet.collector.collector import Collector, client_id_for
    from fleet.collector.writer import ReportRetention
    from fleet.store.opening import open_store

    set_up_logging("warning")
    part, fleet = Part(*(options.part or (1, 1))), fleets_from(options)
    client_id = options.client_id or (client_id_for(part, fleet) if options.share is None else None)
    store, retention = open_store(options.db), ReportRetention(options.keep_days, options.forget_days)
    limits = NewDevices(options.most_devices, options.new_devices_per_minute)
    collector = Collector(endpoint_from(options), store, client_id, part, options.share, retention, fleet, limits)
    counts = collector.counts

    def show() -> tuple[int, str]:
        return counts["report"], f"{counts['gap']} gaps, {counts['refused']} refused; {collector.outcome}"

    def metrics() -> Sequence[MetricsCollector]:
        from fleet.metrics.processes import ProcessMetrics, collector_metrics
        from fleet.metrics.store import StoreMetrics, device_metrics

        return ProcessMetrics(lambda: collector_metrics(collector)), StoreMetrics(options.db, device_metrics)

    with serving_metrics(options, "collect", metrics):
        run_until_signalled(collector.run, "collecting", None, show)
    last = f"{counts['report']} reports, {counts['gap']} gaps, {counts['refused']} refused, in {store.where}"
    return print_result(options, {"counts": {name: counts[name] for name in _COUNTED}}, lambda: print(last))


@contextmanager
def _selection(
    db: str, fleet: str, where: str | None, silent_s: float = 600.0, most: int | None = None, after: str = ""
) -> Iterator[tuple[FleetStore, Devices, list[Device]]]:
    """Open the database; yield it, all its devices, and the selected ones.

    Args:
        db: A file of SQLite, or the address of a PostgreSQL database.
        where: Conditions, as `select` reads them; None: all devices of the fleet.
        silent_s: Seconds without a message after which a device counts as silent.
        most: At most so many devices; None: no limit.
        after: Name of the device after which the list goes on; empty: from the first.

    Raises CommandError as `select` does.
    """
    from fleet.devices.devices import Devices
    from fleet.devices.selection import select
    from fleet.store.opening import open_existing

    with open_existing(db) as store:
        devices = Devices(store)
        yield store, devices, select(devices, fleet, where, silent_s, most, after)


def _devices(options: argparse.Namespace) -> int:
    """Run `tared fleet devices`: list devices with their last reports."""
    from fleet.views.listing import device_objects, print_devices

    limits = options.silent, options.most + 1, options.after
    with _selection(options.db, options.fleet, options.where, *limits) as (store, _, selected):
        shown, more = selected[: options.most], selected[options.most :]
        if options.json:
            after = shown[-1].name if more else None
            document = {"fleet": options.fleet, "devices": device_objects(shown, options.silent), "next_after": after}
            print(json.dumps(document))
        elif shown:
            print_devices(shown, table_console(), options.silent)
            if more:
                print(f"the first {len(shown)}; the next ones: --after {printable(shown[-1].name)}")
        else:
            behind = f" behind {printable(options.after)}" if options.after else ""
            print(f"no device of the fleet {options.fleet!a}{behind} has reported yet, in {store.where}")
    return 0


def _forget(options: argparse.Namespace) -> int:
    """Run `tared fleet forget`: remove selected devices with all of their reports.

    Raises CommandError (`fleet.where`) without --where.
    """
    if not options.where:
        raise CommandError(
            "fleet.where", "no --where", "a condition for the devices to forget", "give --where, such as seen_s>7776000"
        )
    with _selection(options.db, options.fleet, options.where, options.silent) as (_, devices, selected):
        if not options.dry_run:
            devices.forget(selected, who=getpass.getuser())
    names = [each.name for each in selected]
    word = "would be forgotten" if options.dry_run else "forgotten"
    text = f"{len(names)} devices {word}: {', '.join(map(printable, names[:10]))}{' ...' if names[10:] else ''}"
    result = {"forgotten": [] if options.dry_run else names, "selected": names}
    return print_result(options, result, lambda: print(text))


def _tag(options: argparse.Namespace) -> int:
    """Run `tared fleet tag`: put tags on selected devices, or remove them."""
    from fleet.devices.selection import parse_tag

    tags = dict(map(parse_tag, options.tags))
    with _selection(options.db, options.fleet, options.where, options.silent) as (_, devices, selected):
        devices.tag(selected, tags, options.remove, who=getpass.getuser())
    names = [each.name for each in selected]
    text = f"{len(names)} devices: {', '.join(names[:10])}"
    return print_result(options, {"tagged": names}, lambda: print(text))


def _report(options: argparse.Namespace) -> int:
    """Run `tared fleet report`: write the state of the fleet as one HTML file.

    Raises AgentError (`fleet.report`) for a file that cannot be written.
    """
    from fleet.devices.records import audit_entries, quarantined
    from fleet.devices.trends import daily_trends
    from fleet.rollout.register import RolloutRegister
    from fleet.views.page import page

    with _selection(options.db, options.fleet, options.where, options.silent) as (store, _, selected):
        rollouts = RolloutRegister(store, getpass.getuser()).all(options.fleet)
        records, refused = audit_entries(store), quarantined(store, fleet=options.fleet)
        trends = daily_trends(store, [each.id for each in selected], time.time())
    text = page(options.fleet, selected, rollouts, records, refused, trends, options.silent)
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AgentError("fleet.report", str(error), "a file that can be written", "correct -o") from None
    return print_result(options, {"device_count": len(selected), "output": str(options.output)})


def _merge(options: argparse.Namespace) -> int:
    """Run `tared fleet merge`: fetch the histograms of boards, merge them, and write one calibration."""
    from agent.common.console import progress, set_up_logging
    from calibrate.threshold import parse_method
    from engines.calibration import check_destination, save_calibration
    from fleet.merge.calibration import merge_calibration, write_bundle
    from fleet.merge.exchange import MergeExchange

    set_up_logging("error")
    check_destination(options.output)
    parse_method(options.method)
    fleet, devices = fleet_from(options), list(options.devices)
    if options.select is not None:
        with _selection(options.db, fleet, options.select) as (_, _, selected):
            devices = sorted({*devices, *(each.name for each in selected)})
    endpoint, signer = endpoint_from(options), signer_from(options)
    with ExitStack() as stack:
        folder = options.uploads or _temporary_folder(stack)
        exchange = MergeExchange(endpoint, fleet, folder, options.at_once, options.timeout, signer, options.longest)
        with progress("merge", 100) as bar:

            def advance(doing: str, fraction: float) -> None:
                bar.update(round(100.0 * fraction), doing)

            exchange.gather(devices, options.within, advance)
            merged = merge_calibration(exchange.inbox.complete, options.method, fleet, advance)
    save_calibration(merged.calibration, options.output)
    write_bundle(merged.calibration, options.output)
    return _print(options, exchange, merged)


def _temporary_folder(stack: ExitStack) -> Path:
    """Make a folder that the stack removes. Raises AgentError (`merge.write`)."""
    try:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tared-merge-")))
    except OSError as error:
        remedy = "free some space, point TMPDIR to a larger disk, or choose a folder with --uploads"
        raise AgentError("merge.write", str(error), "a writable folder for the uploads of boards", remedy) from error


def _print(options: argparse.Namespace, exchange: MergeExchange, merged: MergedCalibration) -> int:
    from fleet.merge.calibration import BUNDLE

    calibration = merged.calibration
    result = {
        "output": str(options.output),
        "bundle": str(options.output.with_suffix(BUNDLE)),
        "calibration": calibration.id,
        "board_count": len(calibration.merged["boards"]),
        "frames": calibration.frames,
        "tensors": len(calibration.amax),
        "excluded": dict(merged.excluded),
        "silent": dict(exchange.failed),
        "counts": dict(exchange.inbox.counts),
        "distances_db": dict(merged.distances),
    }

    def show() -> None:
        print(f"{result['board_count']} boards, {calibration.frames} frames: {options.output}, {calibration.id}")
        for why, devices in (("excluded", merged.excluded), ("sent nothing", exchange.failed)):
            for device, reason in devices.items():
                print(f"{why}: {printable(device)}: {printable(reason)}")

    return print_result(options, result, show)


def pairs(defaults: T, text: str) -> T:
    """Return a dataclass changed by `key=value,key=value`.

    Args:
        defaults: The dataclass; its values also give the types.
        text: The pairs; empty: no change.

    Raises AgentError (`cli.arguments`) for an unknown key, or a value of another type.
    """
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
    """Run `tared fleet simulate`: connect simulated boards to a broker for some seconds, then print the outcome."""
    from agent.common.console import set_up_logging
    from fleet.simulator.options import BadEngines, Faults, SimulationOptions
    from fleet.simulator.scene import Drift
    from fleet.simulator.simulation import Simulation

    set_up_logging("error")  # else each of ten thousand boards logs its every connection
    parsed = {"drift": pairs(Drift(), options.drift), "faults": pairs(Faults(), options.faults)}
    parsed |= {"bad": pairs(BadEngines(), options.bad), "fleet": fleet_from(options)}
    simulated = SimulationOptions(**{**field_values(options, SimulationOptions), **parsed})
    simulation, ends_s = Simulation(endpoint_from(options), simulated), time.monotonic() + options.seconds
    outcome = simulation.outcome

    def show() -> tuple[int, str]:
        return outcome.connected, f"connected; {outcome.made} rows, {outcome.confirmed} confirmed"

    run_until_signalled(simulation.run, "simulating", simulated.devices, show, lambda: time.monotonic() > ends_s)
    result = outcome.as_dict()
    return print_result(options, result, lambda: print(_summary(result)))


def _summary(outcome: dict[str, Any]) -> str:
    """Return the outcome of a simulation in one line, for people."""
    results = ", ".join(f"{n} {status}" for status, n in sorted(outcome["results"].items())) or "none"
    return (
        f"{outcome['connected']} of {outcome['device_count']} boards connected at the end; "
        f"admitted {outcome['admitted']} times in {outcome['attempts']} attempts; {outcome['made']} rows, "
        f"{outcome['confirmed']} of them confirmed; commands: {results}"
    )
