"""The tables of a board's state: what each holds, and the scripts that make them.

Later schemas append a script. A column that is added comes last: stores read whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping

# By table: its content, and what people have to do if it is lost.
TABLES: Mapping[str, tuple[str, str]] = {
    "jobs": ("the journal of jobs", ""),
    "commands": ("the log of commands", ""),
    "replay_guard": ("the guard against replays", ""),
    "settings": ("the settings", "send them again with the command set"),
    "settings_versions": ("the versions of the settings", ""),
    "releases": ("the versions of the releases", "no model is accepted until you have dealt with this"),
    "policies": ("the policies", "set them again with the command policy"),
    "regimes": ("the regimes", ""),
    "limits": ("the limits of the day", ""),
    "attempts": ("the refused raises of precision", ""),
    "refusal": ("the latest refusal", ""),
    "gains": ("the gains of recalibrations", ""),
    "audit": ("the audit of the reference", ""),
    "announcements": ("the announcements to Home Assistant", ""),
}

MIGRATIONS = (
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        trigger TEXT NOT NULL,
        request TEXT NOT NULL,
        command_ids TEXT NOT NULL,
        state TEXT NOT NULL,
        artefact TEXT,
        error TEXT,
        result TEXT,
        created_wall REAL NOT NULL,
        updated_wall REAL NOT NULL
    ) STRICT;
    CREATE TABLE commands (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        digest TEXT NOT NULL,
        expires_wall REAL NOT NULL,
        received_wall REAL NOT NULL,
        result TEXT NOT NULL,
        final INTEGER NOT NULL,
        delivered INTEGER NOT NULL DEFAULT 0,
        reply_topic TEXT,
        reply_correlation BLOB
    ) STRICT;
    CREATE INDEX undelivered ON commands (delivered) WHERE delivered = 0;
    CREATE TABLE replay_guard (newest REAL NOT NULL, started REAL NOT NULL, forgotten REAL NOT NULL) STRICT;
    CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL, signer TEXT NOT NULL) STRICT;
    CREATE TABLE settings_versions (signer TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT;
    CREATE TABLE releases (signer TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT;
    CREATE TABLE policies (artefact TEXT PRIMARY KEY, policy TEXT NOT NULL) STRICT;
    CREATE TABLE regimes (artefact TEXT PRIMARY KEY, identity TEXT NOT NULL, regime TEXT NOT NULL) STRICT;
    CREATE TABLE limits (kind TEXT NOT NULL, wall REAL NOT NULL) STRICT;
    CREATE TABLE attempts (artefact TEXT PRIMARY KEY, origin TEXT NOT NULL, refused INTEGER) STRICT;
    CREATE TABLE refusal (settings TEXT NOT NULL, scene TEXT NOT NULL, error TEXT NOT NULL) STRICT;
    CREATE TABLE gains (
        identity TEXT NOT NULL,
        gain_db REAL NOT NULL,
        loss REAL NOT NULL,
        gained REAL NOT NULL,
        frames INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE audit (
        identity TEXT NOT NULL,
        audited INTEGER NOT NULL,
        detector TEXT NOT NULL,
        mismatch TEXT,
        answered INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE announcements (topic TEXT PRIMARY KEY) STRICT;
    CREATE TABLE lost (name TEXT PRIMARY KEY, aside TEXT NOT NULL) STRICT;
    """,
)
