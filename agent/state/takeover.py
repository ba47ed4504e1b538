"""Take over the state directory of tared 0.2.0, where each part of the state had a file of its own.

The files stay where they are, so that 0.2.0 finds its state again. Nothing reads them once there is a `state.sqlite`.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from agent.common.errors import AgentError
from agent.common.state_files import parse_or_none, parse_state
from agent.state.salvage import Row, copy_table, insert_rows, is_regular
from engines.store.files import read_regular

Tables = Mapping[str, Sequence[Row]]


def take_over(db: sqlite3.Connection, folder: Path) -> None:
    """Fill the tables of a new file from the files of 0.2.0 in a folder; note tables as lost whose file is damaged.

    Raises AgentError (`state.schema`) for a file of another schema, sqlite3.OperationalError if the disk refuses.
    """
    for name, (schema, tables, convert) in _DOCUMENTS.items():
        if os.path.lexists(folder / name) and not _is_filled(db, _document(folder / name, schema), convert):
            _note_lost(db, tables, name)
    for name, (schema, table) in _DATABASES.items():
        if os.path.lexists(folder / name) and not _is_copied(db, folder / name, schema, table):
            _note_lost(db, [table], name)
    if os.path.lexists(folder / _NOTE):
        lines = parse_or_none(lambda: read_regular(folder / _NOTE).decode().splitlines())
        if not _is_filled(db, lines, _announcements):
            _note_lost(db, ["announcements"], _NOTE)


def _announcements(lines: Any) -> Tables:
    return {"announcements": [(line,) for line in dict.fromkeys(lines)]}


def _restraint(document: Any) -> Tables:
    kinds = {"job": document["jobs"], "rollback": document["rollbacks"]}
    kinds |= {kind: [each for each in [document[kind]] if each is not None] for kind in ("failed", "switched")}
    return {"limits": [(kind, float(wall_s)) for kind, times_s in kinds.items() for wall_s in times_s]}


def _attempts(document: Any) -> Tables:
    return {"attempts": [(artefact, document["origin"], count) for artefact, count in document["refused"].items()]}


def _refusal(document: Any) -> Tables:
    return {"refusal": [(document["settings"], json.dumps(document["scene"]), json.dumps(document["error"]))]}


def _gains(document: Any) -> Tables:
    return {"gains": [(document["identity"], *figures) for figures in document["recalibrations"]]}


def _audit(document: Any) -> Tables:
    mismatch = json.dumps(document["mismatch"]) if document["mismatch"] is not None else None
    detector, answered = json.dumps(document["detector"]), int(document["answered"])
    return {"audit": [(document["identity"], document["audited"], detector, mismatch, answered)]}


def _regimes(document: Any) -> Tables:
    regimes = [(each["artefact"], document["identity"], json.dumps(each)) for each in document["regimes"]]
    return {"regimes": regimes}


def _policies(document: Any) -> Tables:
    return {"policies": [(artefact, json.dumps(policy)) for artefact, policy in document["policies"].items()]}


def _settings(document: Any) -> Tables:
    values, signers = document["values"], document["signers"]
    return {
        "settings": [(key, json.dumps(value), signers[key]) for key, value in values.items()],
        "settings_versions": list(document["versions"].items()),
    }


def _releases(document: Any) -> Tables:
    return {"releases": list(document["versions"].items())}


def _replay_guard(document: Any) -> Tables:
    return {"replay_guard": [tuple(float(document[key]) for key in ("newest", "begun", "forgotten"))]}


# By file: its schema, the tables that are filled from it, and how.
_DOCUMENTS: Mapping[str, tuple[int, list[str], Callable[[Any], Tables]]] = {
    "restraint.json": (2, ["limits"], _restraint),
    "attempts.json": (1, ["attempts"], _attempts),
    "refusal.json": (1, ["refusal"], _refusal),
    "gains.json": (1, ["gains"], _gains),
    "audit.json": (1, ["audit"], _audit),
    "regimes.json": (2, ["regimes"], _regimes),
    "policies.json": (1, ["policies"], _policies),
    "settings.json": (1, ["settings", "settings_versions"], _settings),
    "releases.json": (1, ["releases"], _releases),
    "commands.json": (1, ["replay_guard"], _replay_guard),
}
_DATABASES = {"jobs.sqlite": (1, "jobs"), "commands.sqlite": (2, "commands")}  # schema, and the table in either
_NOTE = "home_assistant"  # a topic a line


def _document(path: Path, schema: int) -> Any:
    """Return the object in a file; None for a damaged one. Raises AgentError for one of a newer schema."""
    document = parse_or_none(lambda: parse_state(read_regular(path)))
    found = document.get("schema") if isinstance(document, dict) else None
    if isinstance(found, int) and found > schema:
        raise _other_schema(path, found, schema)
    return document if found == schema else None


def _other_schema(path: Path, found: int, schema: int) -> AgentError:
    remedy = "run the tared that wrote it, or remove the file: the board goes on without it"
    return AgentError("state.schema", f"{path} of schema {found}", f"schema {schema}", remedy)


def _is_filled(db: sqlite3.Connection, document: Any, convert: Callable[[Any], Tables]) -> bool:
    """Fill tables from a document; return False if it is none that 0.2.0 has written."""
    tables = parse_or_none(lambda: convert(document)) if document is not None else None
    return tables is not None and all(insert_rows(db, table, rows) for table, rows in tables.items())


def _is_copied(db: sqlite3.Connection, path: Path, schema: int, table: str) -> bool:
    """Copy the rows of a database; return False if it is damaged. Raises AgentError for one of another schema."""
    if not is_regular(path):
        return False
    # A power cut may have left a journal beside it, by which SQLite undoes what was half written.
    with closing(sqlite3.connect(path)) as former:
        try:
            (found,) = former.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            return False
        if found not in (0, schema):
            raise _other_schema(path, found, schema)
        return found == 0 or copy_table(db, former, table)  # 0: nothing was written yet


def _note_lost(db: sqlite3.Connection, tables: Iterable[str], aside: str) -> None:
    insert_rows(db, "lost", [(table, aside) for table in tables])
