"""`tared fleet merge`: merge the histograms of many boards into one calibration."""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import command, number
from fleet.cli.arguments import add_broker_options, endpoint_from, fleet_from

if TYPE_CHECKING:  # imported when the command runs, as in agent/cli/offline.py
    from fleet.merge.calibration import MergedCalibration
    from fleet.merge.exchange import MergeExchange


def add_merge(actions: Any) -> None:
    """Add `tared fleet merge`."""
    merge = command(actions, "merge", _merge, "one calibration of the histograms that boards send, never of frames")
    merge.add_argument("devices", nargs="*", metavar="DEVICE", help="all that are there within --within")
    merge.add_argument("--select", metavar="CONDITIONS", help="those in --db, as --where of 'devices'")
    merge.add_argument("--db", default="fleet.sqlite", metavar="FILE_OR_URL", help="for --select (fleet.sqlite)")
    merge.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="calibration.json; boards get the .bundle beside it",
    )
    merge.add_argument("--method", default="entropy", help="as of 'tared calibrate' (entropy)")
    merge.add_argument("--within", type=number(float, 0.0, 3600.0), default=10.0, metavar="S", help="seconds (10)")
    merge.add_argument("--at-once", type=number(int, 1, 1000), default=16, metavar="N", help="boards that send (16)")
    merge.add_argument("--timeout", type=number(float, 1.0, 86400.0), default=30.0, metavar="S", help="of silence (30)")
    merge.add_argument(
        "--longest", type=number(float, 1.0, 86400.0), default=1800.0, metavar="S", help="for a board in all (1800)"
    )
    merge.add_argument(
        "--uploads", type=Path, metavar="DIR", help="keep there what boards have sent (a temporary folder)"
    )
    merge.add_argument("--sign", type=Path, metavar="KEY", help="an operator's private key, of 'tared keys new'")
    add_broker_options(merge)


def _merge(options: argparse.Namespace) -> int:
    from agent.common.console import progress, set_up_logging
    from agent.contract.signing import Signer
    from calibrate.threshold import parse_method
    from engines.calibration import check_destination, save_calibration
    from fleet.merge.calibration import merge_calibration, write_bundle
    from fleet.merge.exchange import MergeExchange

    set_up_logging("error")
    check_destination(options.output)
    parse_method(options.method)
    signer = Signer(options.sign) if options.sign is not None else None
    fleet = fleet_from(options)
    devices = _devices(options, fleet)
    with ExitStack() as stack:
        exchange = MergeExchange(
            endpoint_from(options),
            fleet,
            options.uploads or _temporary_folder(stack),
            options.at_once,
            options.timeout,
            signer,
            options.longest,
        )
        with progress("merge", 100) as bar:

            def advance(doing: str, fraction: float) -> None:
                bar.update(round(100.0 * fraction), doing)

            exchange.gather(devices, options.within, advance)
            merged = merge_calibration(exchange.inbox.complete, options.method, fleet, advance)
    save_calibration(merged.calibration, options.output)
    write_bundle(merged.calibration, options.output)
    _print(options, exchange, merged)
    return 0


def _temporary_folder(stack: ExitStack) -> Path:
    """Make a folder that the stack removes. Raises AgentError (`merge.write`)."""
    from agent.common.errors import AgentError

    try:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tared-merge-")))
    except OSError as error:
        remedy = "make room, point TMPDIR to a disk that has some, or choose a folder with --uploads"
        raise AgentError("merge.write", str(error), "a folder for what boards send", remedy) from error


def _devices(options: argparse.Namespace, fleet: str) -> list[str]:
    """Return the devices that are named, and those that the database selects. Raises CommandError as `select`."""
    if options.select is None:
        return list(options.devices)
    from fleet.devices.devices import Devices
    from fleet.devices.selection import select
    from fleet.store.opening import open_existing

    with open_existing(options.db) as store:
        selected = select(Devices(store), fleet, options.select)
    return sorted({*options.devices, *(each.name for each in selected)})


def _print(options: argparse.Namespace, exchange: MergeExchange, merged: MergedCalibration) -> None:
    from fleet.merge.calibration import BUNDLE

    calibration = merged.calibration
    result = {
        "output": str(options.output),
        "bundle": str(options.output.with_suffix(BUNDLE)),
        "calibration": calibration.id,
        "boards": len(calibration.merged["boards"]),
        "frames": calibration.frames,
        "tensors": len(calibration.amax),
        "excluded": dict(merged.excluded),
        "silent": dict(exchange.failed),
        "counts": dict(exchange.inbox.counts),
        "distances_db": {device: [each.to_board_db, each.to_group_db] for device, each in merged.distances.items()},
    }
    if options.json:
        print(json.dumps(result))
        return
    from fleet.untrusted import printable

    print(f"{result['boards']} boards, {calibration.frames} frames: {options.output}, {calibration.id}")
    for why, devices in (("excluded", merged.excluded), ("sent nothing", exchange.failed)):
        for device, reason in devices.items():
            print(f"{why}: {printable(device)}: {printable(reason)}")
