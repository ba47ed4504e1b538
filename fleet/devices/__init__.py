"""Keep what the store knows of devices: their state, their reports, and what people look up about them.

Reading order: `identities` (short numbers of devices), `reports` (numbered telemetry and events), `devices` (each
device with its newest documents and tags), `facts` (figures to compare), `selection` (`--where`), `records`
(quarantine, audit, results of commands).

Public names:
    devices     Device, Devices, is_late_will, newer_schemas
    facts       FACTS, SILENT_S, Fact, facts
    identities  Identities, Name, RowCache
    records     AuditEntry, Refused, Results, audit, audit_entries, quarantine, quarantined
    reports     AddedReports, Gap, Report, Reports, Stream
    selection   COMPARISONS, FIGURES, TAG, Condition, matches, parse, parse_tag, select
"""
