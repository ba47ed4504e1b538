"""Define the tables of a fleet's store: one schema for SQLite and PostgreSQL, in the SQL that both understand.

Each migration is a script. Two placeholders stand for what the dialects name differently: `{id}`, a key that the
database counts, and `{bytes}`. A new table is a new migration at the end; existing migrations are never edited.
"""

from __future__ import annotations

# Schema 1, before the table of devices: names in each row, and SQLite alone.
_REPORTS_BY_NAME = """
    CREATE TABLE reports (
        fleet TEXT NOT NULL,
        device TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        kind TEXT NOT NULL,
        ts REAL NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (fleet, device, epoch, seq)
    );
    CREATE TABLE dropped (
        fleet TEXT NOT NULL,
        device TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        first INTEGER NOT NULL,
        last INTEGER NOT NULL,
        kind TEXT NOT NULL,
        n INTEGER NOT NULL,
        PRIMARY KEY (fleet, device, epoch, first, kind)
    ) WITHOUT ROWID;
    CREATE TABLE progress (
        fleet TEXT NOT NULL,
        device TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        upto INTEGER NOT NULL,
        PRIMARY KEY (fleet, device, epoch)
    ) WITHOUT ROWID;
    """

# Times are Unix time in seconds: `ts` by the board's clock, all others by the clock of the process that writes them.
# A document is the JSON as it was received.
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

_AWAY = "".join(f"ALTER TABLE {name} RENAME TO {name}_by_name;\n" for name in ("reports", "dropped", "progress"))
_DEVICES_FROM_NAMES = """
    INSERT INTO devices (fleet, name, first_seen, last_seen)
        SELECT fleet, device, 0.0, 0.0 FROM progress_by_name
        UNION SELECT fleet, device, 0.0, 0.0 FROM reports_by_name
        UNION SELECT fleet, device, 0.0, 0.0 FROM dropped_by_name;
    UPDATE devices SET epoch = latest.epoch
        FROM (SELECT fleet, device, max(epoch) AS epoch FROM progress_by_name GROUP BY fleet, device) latest
        WHERE latest.fleet = devices.fleet AND latest.device = devices.name;
    UPDATE devices SET first_seen = span.first_ts, last_seen = span.last_ts
        FROM (
            SELECT fleet, device, min(ts) AS first_ts, max(ts) AS last_ts FROM reports_by_name GROUP BY fleet, device
        ) span
        WHERE span.fleet = devices.fleet AND span.device = devices.name;
    INSERT INTO reports
        SELECT d.id, r.epoch, seq, kind, ts, CAST(strftime('%s', 'now') AS REAL), document
        FROM reports_by_name r JOIN devices d ON d.fleet = r.fleet AND d.name = r.device ORDER BY r.rowid;
    INSERT INTO dropped
        SELECT d.id, x.epoch, first, last, kind, n
        FROM dropped_by_name x JOIN devices d ON d.fleet = x.fleet AND d.name = x.device;
    INSERT INTO progress
        SELECT d.id, p.epoch, upto, max(
            upto,
            coalesce((SELECT max(seq) FROM reports r WHERE r.device = d.id AND r.epoch = p.epoch), 0),
            coalesce((SELECT max(last) FROM dropped x WHERE x.device = d.id AND x.epoch = p.epoch), 0)
        ), d.last_seen, d.last_seen
        FROM progress_by_name p JOIN devices d ON d.fleet = p.fleet AND d.name = p.device;
    DROP TABLE reports_by_name;
    DROP TABLE dropped_by_name;
    DROP TABLE progress_by_name;
    """

# Reports are appended in the order of their age: a summary of each range of pages finds old rows at a thousandth of a
# B-tree's cost.
_BY_AGE = "CREATE INDEX reports_by_age ON reports USING brin (received);"
# Updated with each batch: free space on each page lets PostgreSQL update in place.
_IN_PLACE = "ALTER TABLE progress SET (fillfactor = 50);"

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

_SQLITE = {"id": "INTEGER PRIMARY KEY", "bytes": "BLOB"}
_POSTGRES = {"id": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "bytes": "BYTEA"}

# For both dialects, from schema 2 on: append the next migration here.
_NEXT: tuple[str, ...] = (_ROLLOUTS,)

# The script at n brings a store of schema n to schema n + 1.
SQLITE = (
    _REPORTS_BY_NAME,
    _AWAY + _DEVICES.format_map(_SQLITE) + _DEVICES_FROM_NAMES,
    *(script.format_map(_SQLITE) for script in _NEXT),
)
POSTGRES = (
    "",
    _DEVICES.format_map(_POSTGRES) + _BY_AGE + _IN_PLACE,
    *(script.format_map(_POSTGRES) for script in _NEXT),
)
