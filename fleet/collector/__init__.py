"""Collect what boards send: receive it, check it, store it, acknowledge it.

Reading order: `collector` (connections, threads and acknowledgements), `batch` (from messages to what is stored),
`writer` (a batch in one transaction; deletion of old rows).

Public names:
    collector  CLIENT_ID, Collector, client_id_for, subscriptions
    batch      Batch, Part, Reader, parse_numbered, gap_for_unreadable
    writer     BatchWriter, ReportRetention
"""
