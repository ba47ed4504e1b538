"""Define the tables of a fleet's store: one schema for SQLite and PostgreSQL, in the SQL that both understand.

Each migration is a script. Placeholders stand for what the dialects name differently: `{id}`, a key that the database
counts, and `{bytes}`; `{tuning}` is PostgreSQL's alone. A new table is a new migration at the end; existing migrations
are never edited.
"""

from __future__ import annotations

# Times are Unix time in seconds: `ts` by the board's clock, all others by the clock of the process that writes them.
# A document is the JSON as it was received. `newest_events` gets only events of the kind `regime`; a store that earlier
# versions have written to may have other kinds there.
_DEVICES = """
    CREATE TABLE devices (
        id {id},
        fleet TEXT NOT NULL,
        name TEXT NOT NULL,
        first_seen DOUBLE PRECISION NOT NULL,
        last_seen DOUBLE PRECISION NOT NULL,
        epoch BIGINT NOT NULL DEFAULT 0,
        state TEXT,
        session TEXT,
        boot_id TEXT,
        state_ts DOUBLE PRECISION,
        agent_version TEXT,
        model TEXT,
        engine TEXT,
        calibration TEXT,
        birth TEXT,
        UNIQUE (fleet, name)
    );
    CREATE TABLE reports (
        device BIGINT NOT NULL,
        epoch BIGINT NOT NULL,
        seq BIGINT NOT NULL,
        kind TEXT NOT NULL,
        ts DOUBLE PRECISION NOT NULL,
        received DOUBLE PRECISION NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (device, epoch, seq)
    );
    CREATE TABLE dropped (
        device BIGINT NOT NULL,
        epoch BIGINT NOT NULL,
        first BIGINT NOT NULL,
        last BIGINT NOT NULL,
        kind TEXT NOT NULL,
        n BIGINT NOT NULL,
        PRIMARY KEY (device, epoch, first, kind)
    );
    CREATE TABLE progress (
        device BIGINT NOT NULL,
        epoch BIGINT NOT NULL,
        upto BIGINT NOT NULL,
        highest BIGINT NOT NULL,
        ts DOUBLE PRECISION NOT NULL,
        heard DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (device, epoch)
    );
    CREATE TABLE newest_events (
        device BIGINT NOT NULL,
        kind TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        seq BIGINT NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (device, kind)
    );
    CREATE TABLE results (
        device BIGINT NOT NULL,
        command TEXT NOT NULL,
        status TEXT NOT NULL,
        final BIGINT NOT NULL,
        received DOUBLE PRECISION NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (device, command)
    );
    CREATE TABLE tags (
        device BIGINT NOT NULL,
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        PRIMARY KEY (device, name)
    );
    CREATE TABLE quarantine (
        id {id},
        received DOUBLE PRECISION NOT NULL,
        fleet TEXT NOT NULL,
        device TEXT NOT NULL,
        topic TEXT NOT NULL,
        code TEXT NOT NULL,
        found TEXT NOT NULL,
        payload {bytes} NOT NULL
    );
    CREATE TABLE audit (
        id {id},
        at DOUBLE PRECISION NOT NULL,
        who TEXT NOT NULL,
        what TEXT NOT NULL,
        why TEXT NOT NULL,
        subject TEXT NOT NULL,
        document TEXT NOT NULL
    );
    CREATE INDEX audit_by_subject ON audit (subject, id);
    """

# Rollouts, their boards, and their commands, each recorded before it is sent.
_ROLLOUTS = """
    CREATE TABLE rollouts (
        id TEXT PRIMARY KEY,
        fleet TEXT NOT NULL,
        spec TEXT NOT NULL,
        state TEXT NOT NULL,
        wave BIGINT NOT NULL,
        waves BIGINT NOT NULL,
        soak_until DOUBLE PRECISION,
        undo_from BIGINT NOT NULL,
        ends_as TEXT NOT NULL,
        created DOUBLE PRECISION NOT NULL,
        lease_owner TEXT,
        lease_until DOUBLE PRECISION NOT NULL
    );
    CREATE TABLE rollout_targets (
        rollout TEXT NOT NULL,
        device BIGINT NOT NULL,
        wave BIGINT NOT NULL,
        place BIGINT NOT NULL,
        zone TEXT NOT NULL,
        state TEXT NOT NULL,
        due DOUBLE PRECISION NOT NULL,
        attempts BIGINT NOT NULL,
        baseline TEXT NOT NULL,
        artefact TEXT,
        reason TEXT NOT NULL,
        settled DOUBLE PRECISION,
        PRIMARY KEY (rollout, device)
    );
    CREATE INDEX rollout_targets_by_state ON rollout_targets (rollout, wave, state, place);
    CREATE TABLE rollout_commands (
        id TEXT PRIMARY KEY,
        rollout TEXT NOT NULL,
        device BIGINT NOT NULL,
        role TEXT NOT NULL,
        payload TEXT NOT NULL,
        sent DOUBLE PRECISION NOT NULL,
        expires DOUBLE PRECISION NOT NULL,
        accepted DOUBLE PRECISION,
        ended DOUBLE PRECISION,
        status TEXT,
        document TEXT
    );
    CREATE INDEX rollout_commands_by_end ON rollout_commands (rollout, ended);
    CREATE INDEX rollout_commands_by_role ON rollout_commands (rollout, role, device);
    """

_SQLITE = {"id": "INTEGER PRIMARY KEY", "bytes": "BLOB", "tuning": ""}
_POSTGRES = {
    "id": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "bytes": "BYTEA",
    # Reports are appended in the order of their age: a summary of each range of pages finds old rows at a thousandth of
    # a B-tree's cost. Progress is updated with each batch: free space on each page lets PostgreSQL update in place.
    "tuning": "CREATE INDEX reports_by_age ON reports USING brin (received);"
    "ALTER TABLE progress SET (fillfactor = 50);",
}

# The script at n brings a store of schema n to schema n + 1. Schema 3 is that of tared 0.2.0, the first release.
_MIGRATIONS = ("", "", _DEVICES + "{tuning}" + _ROLLOUTS)
SQLITE = tuple(script.format_map(_SQLITE) for script in _MIGRATIONS)
POSTGRES = tuple(script.format_map(_POSTGRES) for script in _MIGRATIONS)
