"""List the engines on the disk, verify them, and remove those that are not needed: `tared store`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import add_config_option, command, option, print_result, table_console
from agent.cli.configuration import load_board_config
from agent.common.errors import AgentError
from calibrate.errors import TaredError

if TYPE_CHECKING:  # imported when a command runs, as in offline.py
    from agent.config import Config
    from engines.store.artefact import Store
    from engines.store.retention import Pins, StoreCleaner, Stored

EXIT_DAMAGED = 1
_COLUMNS = ("id", "made", "precision", "bytes", "fidelity", "method", "roles", "trouble")


def add_store(commands: Any) -> None:
    """Add `store list` and `store verify`, which may run beside the daemon, and `store gc`, which may not."""
    about = "the engines on the disk: list them, verify them, remove those that are not needed"
    actions = commands.add_parser("store", help=about, description=about).add_commands("actions", "ACTION")
    command(actions, "list", _list, "list the engines, and the reason why each stays")
    command(actions, "verify", _verify, "read every byte; exit code 1 when something is damaged")
    gc = command(actions, "gc", _gc, "remove engines that are not needed, while no daemon runs")
    gc.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    for action in actions.choices.values():
        add_config_option(action)
        key = "count artefacts as damaged that this key has not signed (default: signatures are not checked)"
        option(action, "--key", "FILE", key, Path)


def _list(options: argparse.Namespace) -> int:
    """Run `tared store list`: print each engine with the reasons why it stays, and the free space."""
    from engines.store.retention import size

    config, store, cleaner = _open(options)
    stored, retention = cleaner.survey(_pins(config))
    rows = [_row(store, one, retention.roles.get(one.id, ())) for one in sorted(stored, key=lambda one: one.made_s)]
    cached = {str(path.relative_to(store.root)): size(path) for path in cleaner.cached()}
    if options.json:
        print(json.dumps({"artefacts": rows, "cached": cached, "free_bytes": cleaner.free_bytes()}))
        return 0
    from agent.common.table import tabulate

    for row in rows:
        row["made"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["made"]))
    console, cells = table_console(), [[_plain(row[column]) for column in _COLUMNS] for row in rows]
    console.print(tabulate(_COLUMNS, cells, console.width, prose=("method", "roles", "trouble"), right=("bytes",)))
    print(f"{len(cached)} cached, {sum(cached.values())} bytes; {cleaner.free_bytes()} bytes free on the disk")
    return 0


def _row(store: Store, one: Stored, roles: tuple[str, ...]) -> dict[str, Any]:
    from engines.store.signing import read_manifest

    manifest: Mapping[str, Any] = {}
    with suppress(TaredError):  # the row shows the fault
        manifest = read_manifest(store.root / "artefacts" / one.id, store.key)
    inputs = manifest.get("inputs", {})
    return {
        "id": one.id,
        "made": one.made_s,
        "precision": inputs.get("precision"),
        "bytes": one.nbytes,
        "fidelity": _entry(manifest.get("verdict"), "fidelity"),
        "method": _entry(inputs.get("calibration"), "method"),
        "roles": list(roles),
        "trouble": one.trouble or None,
    }


def _entry(document: object, name: str) -> Any:
    """Return an entry of what should be a mapping, which a valid seal does not promise; None without it."""
    return document.get(name) if isinstance(document, Mapping) else None


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return ", ".join(value) if isinstance(value, list) else "-" if value is None else str(value)


def _verify(options: argparse.Namespace) -> int:
    """Run `tared store verify`: read every byte; exit code 1 if anything is damaged."""
    _, _, cleaner = _open(options)
    count, errors = cleaner.verify()
    result = {"artefact_count": count, "damaged": [error.as_dict() for error in errors]}
    last = f"{count} artefacts, {len(errors)} found damaged"
    print_result(options, result, lambda: print(*errors, last, sep="\n"))
    return EXIT_DAMAGED if errors else 0


def _gc(options: argparse.Namespace) -> int:
    """Run `tared store gc`: remove engines and cached files that are not needed, while no daemon runs."""
    from agent.system.state_dir import lock_state_dir

    config, _, cleaner = _open(options)
    with lock_state_dir(config.state_dir):
        freed = cleaner.tidy(_pins(config), options.dry_run)
    removed = [*freed.artefacts, *freed.cached]
    result = {"removed": removed, "freed_bytes": freed.nbytes, "dry_run": options.dry_run}
    done = "would be removed" if options.dry_run else "removed"
    last = f"{len(removed)} {done}, {freed.nbytes} bytes"
    return print_result(
        options, result, lambda: print(*removed, f"{last}; {cleaner.free_bytes()} bytes free on the disk", sep="\n")
    )


def _open(options: argparse.Namespace) -> tuple[Config, Store, StoreCleaner]:
    """Open the store of a configuration; it must exist, since these commands create none.

    Raises AgentError (`store.missing`) if there is no store in state_dir.
    """
    from engines.store.artefact import Store
    from engines.store.retention import StoreCleaner
    from engines.store.signing import find_key

    config = load_board_config(options.config)
    if not (config.state_dir / "artefacts").is_dir():
        found, remedy = f"no store in {config.state_dir}", "run tared first, or name its configuration with -c"
        raise AgentError("store.missing", found, "the state_dir of a daemon", remedy)
    store = Store(config.state_dir, find_key(options.key))
    return config, store, StoreCleaner(store, config.store.keep, config.store.reserve_bytes)


def _pins(config: Config) -> Pins:
    """Return the artefacts that regimes need while no daemon runs. Raises AgentError as `StateStore.copy_of`."""
    from agent.monitoring.regimes import regime_artefacts
    from agent.state.store import StateStore

    return {"regime": regime_artefacts(StateStore.copy_of(config.state_dir, ["regimes"]))}
