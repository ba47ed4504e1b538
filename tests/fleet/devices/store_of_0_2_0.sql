BEGIN TRANSACTION;
CREATE TABLE audit (
        id INTEGER PRIMARY KEY,
        at DOUBLE PRECISION NOT NULL,
        who TEXT NOT NULL,
        what TEXT NOT NULL,
        why TEXT NOT NULL,
        subject TEXT NOT NULL,
        document TEXT NOT NULL
    );
CREATE TABLE devices (
        id INTEGER PRIMARY KEY,
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
INSERT INTO "devices" VALUES(1,'f','gate',1.0,2.0,7,NULL,NULL,NULL,NULL,NULL,NULL,'e0',NULL,NULL);
CREATE TABLE dropped (
        device BIGINT NOT NULL,
        epoch BIGINT NOT NULL,
        first BIGINT NOT NULL,
        last BIGINT NOT NULL,
        kind TEXT NOT NULL,
        n BIGINT NOT NULL,
        PRIMARY KEY (device, epoch, first, kind)
    );
CREATE TABLE newest_events (
        device BIGINT NOT NULL,
        kind TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        seq BIGINT NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (device, kind)
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
CREATE TABLE quarantine (
        id INTEGER PRIMARY KEY,
        received DOUBLE PRECISION NOT NULL,
        fleet TEXT NOT NULL,
        device TEXT NOT NULL,
        topic TEXT NOT NULL,
        code TEXT NOT NULL,
        found TEXT NOT NULL,
        payload BLOB NOT NULL
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
INSERT INTO "reports" VALUES(1,7,1,'alarm',1.5,2.0,'{"n":1}');
CREATE TABLE results (
        device BIGINT NOT NULL,
        command TEXT NOT NULL,
        status TEXT NOT NULL,
        final BIGINT NOT NULL,
        received DOUBLE PRECISION NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (device, command)
    );
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
INSERT INTO "rollouts" VALUES('r1','f','{}','COMPLETED',0,1,NULL,1,'COMPLETED',1.0,NULL,0.0);
CREATE TABLE tags (
        device BIGINT NOT NULL,
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        PRIMARY KEY (device, name)
    );
CREATE INDEX audit_by_subject ON audit (subject, id);
CREATE INDEX rollout_targets_by_state ON rollout_targets (rollout, wave, state, place);
CREATE INDEX rollout_commands_by_end ON rollout_commands (rollout, ended);
CREATE INDEX rollout_commands_by_role ON rollout_commands (rollout, role, device);
COMMIT;
PRAGMA user_version = 3;
