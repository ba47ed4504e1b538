"""Keep what the store knows of devices: their state, their reports, and what people look up about them.

Reading order: `devices` (each device with its number, its newest documents and its tags), `reports` (numbered
telemetry and events), `facts` (figures to compare), `selection` (`--where`), `records` (quarantine, audit, results of
commands).

Public names:
    devices     Device, Devices, Name, RowCache, is_late_will, newer_schemas
    facts       FIGURES, SILENT_S, WORDS, Fact, facts, value_at
    records     AuditEntry, Refused, audit, audit_entries, quarantine, quarantined, result_documents, store_results
    reports     AddedReports, Gap, Report, Reports, Stream
    selection   COMPARISONS, TAG, Condition, matches, parse, parse_tag, select
"""
